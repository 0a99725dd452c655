"""``--evaluate-only``: predictions of saved weights, by all ranks, in one file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from mpiddp.launch.failure.outcome import write_whole
from mpiddp.launch.session import Session
from mpiddp.training import metrics
from mpiddp.training.batches import Cut, EvaluationBatches, make_evaluation_batches
from mpiddp.training.config import Configuration
from mpiddp.training.loading import choose_reading, choose_samples, load_on_all
from mpiddp.training.preparation import EVALUATION_BATCH
from mpiddp.training.samples import EVALUATION, Batch, Key
from mpiddp.training.task import Task, add_perplexity, add_test_metrics, build_model
from mpiddp.training.weights import load_weights

PREDICTIONS = "predictions.csv"

Row: TypeAlias = tuple[int, int, float] | tuple[float]
"""Of a sample: its class, the predicted one, and the loss; or the loss alone, of a task without
classes."""


def predict_all(
    configuration: Configuration, task: Task, session: Session
) -> tuple[metrics.Average, list[list[Row]]]:
    """Predict the test samples with the weights of ``configuration``; collective.

    Ranks do not wait for each other before all have finished. Returns the averages over all
    samples (with the perplexity on ranks that have any), and the rows of each rank, which has every
    ``ranks``-th sample from its own number on.

    Raises ConfigurationError, CheckpointError.
    """
    assert configuration.weights is not None
    data = load_on_all(configuration, task, session)
    torch.manual_seed(configuration.seed)
    module = build_model(task, data).to(session.device)
    load_weights(module, configuration.weights)
    world, device = session.world, session.device
    _, tests = choose_samples(configuration, data, session.device)
    batches = make_evaluation_batches(
        tests, Cut(EVALUATION_BATCH, world.rank, world.size), choose_reading(configuration, session)
    )
    totals = metrics.Totals(device, add_test_metrics(task, data.classes).metrics)
    rows, targets = list[Row](), torch.empty(0)
    module.eval()
    with torch.no_grad():
        for batch in batches:
            inputs, targets, _ = batch.to(device)
            outputs = module(inputs)
            samples = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
            losses = torch.stack([task.loss(*sample) for sample in samples])
            totals.add(losses.mean(), outputs, targets)
            rows += _make_rows(outputs, targets, losses)
    batches.reader.close()
    average = add_perplexity(task, targets, totals.reduce())
    return average, session.gather(rows)


def fill_up(batches: EvaluationBatches) -> Iterator[Batch]:
    """The batches of a rank, and more of weight 0, so that all ranks have equally many.

    So all take part in equally many forward passes.
    """
    last = None
    for last in batches:
        yield last
    first = replace(batches, cut=replace(batches.cut, rank=0))
    if missing := len(first) - len(batches):
        # A rank without any batch takes the first sample; all ranks can read it.
        filler = last or next(iter(batches.reader.read([Key(EVALUATION, [0])])))
        yield from [filler._replace(weight=0.0)] * missing


def _make_rows(outputs: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> Iterator[Row]:
    if outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point():
        classes = outputs.argmax(dim=1)
        yield from zip(targets.tolist(), classes.tolist(), losses.tolist(), strict=True)
    else:
        yield from zip(losses.tolist(), strict=True)


def write_predictions(path: Path, parts: list[list[Row]]) -> None:
    """Write a row for each sample, in the order of the data set. Raises OSError."""
    rows = sorted(
        (rank + len(parts) * place, *row)
        for rank, part in enumerate(parts)
        for place, row in enumerate(part)
    )
    has_classes = any(len(row) > 2 for row in rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", *(["class", "predicted"] if has_classes else []), "loss"])
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def describe(average: metrics.Average, path: Path) -> str:
    """The console's line."""
    named = metrics.name_test_metrics(average.metrics)
    loss = f"loss {average.loss:.6f}" if named else f"test loss {average.loss:.6f}"
    found = ", ".join([*named, loss])
    return f"Evaluation done: {found} over {average.samples} samples (predictions in {path})"
