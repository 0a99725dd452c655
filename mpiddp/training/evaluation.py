"""Test samples: the model's loss and metrics while it trains, and ``--evaluate-only``."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from mpiddp.files import write_whole
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.training.data.batches import EvaluationBatches
from mpiddp.training.data.data_sets import DataSet
from mpiddp.training.data.samples import Batch, Samples
from mpiddp.training.data.structure import call_model, count_samples, map_leaves
from mpiddp.training.options.config import Configuration
from mpiddp.training.preparation import Training, agree, load_initial, share_evaluation
from mpiddp.training.records import metrics
from mpiddp.training.run_output import report_left_out, say
from mpiddp.training.shared_run import after_error, enter_run
from mpiddp.training.step.divergence import refuse_divergence
from mpiddp.training.step.precision import Precision
from mpiddp.training.task.loading import choose_reading, choose_samples, load_on_all, read_first
from mpiddp.training.task.task import (
    Task,
    add_perplexity,
    add_test_metrics,
    build_model,
    check_task,
    find_task,
)
from mpiddp.training.wrapping.engine import compile_model

PREDICTIONS = "predictions.csv"

PredictionRow: TypeAlias = tuple[int, int, float] | tuple[float]
"""Of a sample: its class, the predicted one, and the loss; or the loss alone, of a task without
classes."""


def evaluate(
    task: Task, model: nn.Module, batches: Iterable[Batch], device: torch.device
) -> metrics.Average:
    """Return loss and metrics over the batches of all ranks; collective.

    Ranks may have different numbers of batches if forward passes are not collective. Those of
    weight 0 are not counted.
    """
    totals = metrics.Totals(device, task.metrics)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            inputs, targets, weight = batch.to(device)
            outputs = call_model(model, inputs)
            if weight > 0:
                totals.add(task.loss(outputs, targets), outputs, targets)
    return totals.reduce()


def add_evaluation(training: Training, row: metrics.Row) -> metrics.Row:
    """An epoch's row with the loss and metrics of the test samples; collective.

    Raises MpiddpError if the loss is not finite.
    """
    begin = time.perf_counter()
    engine = training.engine
    with engine.at_average(), engine.forward.precision.autocast():
        batches: Iterable[Batch] = training.evaluation
        if engine.gathers:
            batches = fill_up(training.evaluation)
        average = evaluate(training.tested, engine.module, batches, training.session.device)
    report_left_out(training.evaluation.reader, training.session, f"the test of epoch {row.epoch}")
    refuse_divergence("test", average.loss, row.epoch)
    average = add_perplexity(training.task, training.targets, average)
    return replace(
        row,
        test_loss=average.loss,
        test_metrics=average.metrics,
        evaluate_seconds=time.perf_counter() - begin,
    )


def evaluate_only(
    configuration: Configuration, session: Session, failure_handler: FailureHandler
) -> metrics.Average:
    """Write predictions for all test samples into a run's directory; collective.

    Raises ConfigurationError, CheckpointError.
    """
    task, configuration = find_task(configuration, None)
    agree(configuration, session)
    average, parts = predict_all(configuration, task, session)
    run = enter_run(configuration, session, failure_handler)
    with after_error(run.abandon):
        if session.world.rank == 0:
            path = run.state.directory / PREDICTIONS
            write_predictions(path, parts)
            say(session, describe(average, path))
        run.leave()
    return average


def predict_all(
    configuration: Configuration, task: Task, session: Session
) -> tuple[metrics.Average, list[list[tuple[int, PredictionRow]]]]:
    """Predict the test samples with the weights of ``configuration``; collective.

    Ranks do not wait for each other before all have finished. Returns the averages over all
    samples (with the perplexity on ranks that have any), and the rows of each rank, each with the
    sample's number: samples that cannot be read have none, if they are left out.

    Raises ConfigurationError, CheckpointError.
    """
    device = session.device
    precision = Precision(configuration.precision, device)
    loaded = load_model(configuration, task, session)
    model = loaded.model
    batches = share_evaluation(loaded.tests, session, choose_reading(configuration, session))
    totals = metrics.Totals(device, add_test_metrics(task, loaded.data.classes).metrics)
    rows, targets = list[PredictionRow](), None
    model.eval()
    with torch.no_grad(), precision.autocast():
        for batch in batches:
            inputs, targets, _ = batch.to(device)
            outputs = call_model(model, inputs)
            samples = range(count_samples(targets))
            losses = torch.stack([task.loss(*_take(place, outputs, targets)) for place in samples])
            totals.add(losses.mean(), outputs, targets)
            rows += _make_rows(outputs, targets, losses)
    batches.reader.close()
    average = add_perplexity(task, targets, totals.reduce())
    bad = {position for each in batches.reader.left_out for position in each.positions}
    report_left_out(batches.reader, session, "the predictions")
    numbers = (each for each in batches.list_positions() if each not in bad)
    return average, session.gather(list(zip(numbers, rows, strict=True)))


@dataclass(frozen=True)
class Loaded:
    """A model with weights from elsewhere, and its data."""

    model: nn.Module
    """As it is called."""
    module: nn.Module
    data: DataSet
    tests: Samples
    first: Batch
    """The first of them."""


def load_model(configuration: Configuration, task: Task, session: Session) -> Loaded:
    """The task's model with the weights of ``configuration``, on this rank's device; collective.

    Raises ConfigurationError, CheckpointError.
    """
    data = load_on_all(configuration, task, session)
    torch.manual_seed(configuration.seed)
    module = build_model(task, data).to(session.device)
    load_initial(module, configuration)
    _, tests = choose_samples(configuration, data, session.device)
    first = read_first(tests, 1, session)
    check_task(task, module, first, data.classes)
    return Loaded(compile_model(module, configuration), module, data, tests, first)


def fill_up(batches: EvaluationBatches) -> Iterator[Batch]:
    """The batches of a rank, and more of weight 0, so that all ranks have equally many.

    So all take part in equally many forward passes.
    """
    last = None
    for last in batches:
        yield last
    first = replace(batches, cut=replace(batches.cut, rank=0))
    if missing := len(first) - len(batches):
        # A rank without any batch takes rank 0's, which is one sample; all ranks can read it.
        filler = last or next(iter(first))
        yield from [filler._replace(weight=0.0)] * missing


def _take(place: int, outputs: Any, targets: Any) -> tuple[Any, Any]:
    """One sample of a batch, also of several outputs and targets."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[place : place + 1] if tensor.dim() else tensor

    return tree_map_only(torch.Tensor, take, outputs), map_leaves(take, targets)


def _make_rows(outputs: Any, targets: Any, losses: torch.Tensor) -> Iterator[PredictionRow]:
    are_single = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
    if are_single and (outputs.ndim, targets.ndim) == (2, 1) and not targets.is_floating_point():
        classes = outputs.argmax(dim=1)
        yield from zip(targets.tolist(), classes.tolist(), losses.tolist(), strict=True)
    else:
        yield from zip(losses.tolist(), strict=True)


def write_predictions(path: Path, parts: list[list[tuple[int, PredictionRow]]]) -> None:
    """Write a row for each sample, in the order of the data set. Raises OSError."""
    rows = sorted(each for part in parts for each in part)
    has_classes = any(len(row) > 1 for _, row in rows)
    names = [*(["class", "predicted"] if has_classes else []), "loss"]
    write_rows(path, names, rows)


def write_rows(path: Path, names: Sequence[str], rows: Iterable[tuple[int, Sequence[Any]]]) -> None:
    """Write CSV: the rows of the samples, each with its number. Raises OSError."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", *names])
    writer.writerows([number, *row] for number, row in rows)
    write_whole(path, text.getvalue())


def describe(average: metrics.Average, path: Path) -> str:
    """The console's line."""
    named = metrics.name_test_metrics(average.metrics)
    loss = f"loss {average.loss:.6f}" if named else f"test loss {average.loss:.6f}"
    found = ", ".join([*named, loss])
    return f"Evaluation done: {found} over {average.samples} samples (predictions in {path})"
