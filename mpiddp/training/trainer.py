"""The training loop: the same on every rank; rank 0 also writes files and the console."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpiddp.errors import SUCCESS, ConfigurationError, MpiddpError, PreemptedError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.preemption_signals import PreemptionSignals
from mpiddp.launch.session import Session
from mpiddp.sync.parameter_server.roles import Serving, describe_roles
from mpiddp.training import evaluation, metrics, overlap, run_directory
from mpiddp.training.config import Configuration
from mpiddp.training.learning_rate import describe_scaling
from mpiddp.training.malloc import keep_freed_memory
from mpiddp.training.options.synchronisation import FRAMEWORK
from mpiddp.training.parallel import find_bound, share_buffers
from mpiddp.training.pauses import Pauses, make_pauses
from mpiddp.training.preparation import Training, agree, prepare
from mpiddp.training.rank_costs import add_costs, gather_costs
from mpiddp.training.reports import Reports, say, warn
from mpiddp.training.run_directory import RunDirectory
from mpiddp.training.samples import Batch, UnreadableSampleError, describe_numbers
from mpiddp.training.saving import Saver, look_for_checkpoint
from mpiddp.training.sharded_tensors import collect
from mpiddp.training.stages import Stage
from mpiddp.training.step import Compute
from mpiddp.training.straggler import describe_straggler, parse_straggler
from mpiddp.training.task import Task, add_perplexity, find_task
from mpiddp.training.trackers import check_library
from mpiddp.training.training_state import EpochTotals, Position, Restored
from mpiddp.training.weights import export_weights


@dataclass(frozen=True)
class Place:
    """Where a rank is in its training."""

    step: int
    """Of the run, counted from 1."""
    batch: int
    """Of the rank's batches since the epoch, or its rest, began; counted from 0."""


@dataclass
class Step:
    """A step of training that is to be taken: with a batch of this rank."""

    epoch: int
    """Counted from 1."""
    number: int
    """Of the run, counted from 1."""
    batch: Batch
    _take: Callable[[Compute | None], None]
    is_taken: bool = False

    def take(self, compute: Compute | None = None) -> None:
        """Forward and backward pass, and the update; collective.

        ``compute(model, batch)``, if given, returns the model's outputs and the mean loss. It is
        called in place of the model and the task's loss, once for each pass of the step, with the
        pass's batch on the model's device.
        """
        if self.is_taken:
            raise MpiddpError(f"expected one take() for step {self.number}, found a second one")
        self.is_taken = True
        self._take(compute)


def train(
    configuration: Configuration,
    session: Session,
    failure_handler: FailureHandler,
    signals: PreemptionSignals | None = None,
    task: Task | None = None,
) -> metrics.Row:
    """Take all steps of `run_steps`, and return the last row of the metrics; collective."""
    steps = run_steps(configuration, session, failure_handler, signals, task)
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            row: metrics.Row = end.value
            return row
        step.take()


def run_steps(
    configuration: Configuration,
    session: Session,
    failure_handler: FailureHandler,
    signals: PreemptionSignals | None = None,
    task: Task | None = None,
) -> Generator[Step, None, metrics.Row]:
    """Train as the configuration says: yields this rank's steps, which must be taken; collective.

    Returns the last row of the metrics. A rank that only serves parameters has no steps.

    The parameters are the same on all ranks at the end, and the same bits in every run with the
    same configuration and number of ranks on CPUs, unless gradients may be stale. (Payloads of NaNs
    may differ; a loss that is not finite is refused.) The configuration is a resolved one; the
    failure handler learns the run directory and each step. ``task``: None for the options' one.

    Raises:
        ConfigurationError: the ranks disagree, the data cannot be shared out, the model does not
            fit the data, or the run directory is refused.
        MpiddpError: the loss is not a number any more.
        PreemptedError: one of ``signals`` has come to a rank, and a checkpoint was written.
    """
    begin = time.perf_counter()
    if session.device.type == "cpu":
        keep_freed_memory()
    task, configuration = find_task(configuration, task)
    agree(configuration, session)
    plan = look_for_checkpoint(configuration, session)
    training = prepare(plan.configuration, task, session, failure_handler)
    configuration = training.configuration
    run, path = _open_run(configuration, session, failure_handler)
    say(session, *_describe_start(training))
    saver = Saver(training, plan, run)
    begun = saver.restore()
    failure_handler.step = begun.position.step or None
    if failure_handler.attempt > 1 and begun.position == Position():
        say(session, f"Attempt {failure_handler.attempt} in {path}: starting over")
    pauses = make_pauses(training, saver, signals)
    reports = Reports(session, path, configuration, begun.position.step)
    preempted: PreemptedError | None = None
    try:
        row = yield from _run_epochs(training, pauses, reports, begun)
    except PreemptedError as error:
        preempted = error
    pauses.close()
    training.close()
    saver.close()
    reports.close(is_done=preempted is None)
    if preempted is not None:
        say(session, str(preempted))
        _finish(run, failure_handler, preempted.exit_code, str(preempted))
        raise preempted
    _export(training)
    if row.staleness is not None:
        say(session, metrics.describe_staleness(row.staleness))
    say(session, metrics.describe_end(row, time.perf_counter() - begin, path))
    _finish(run, failure_handler, SUCCESS, "done")
    return row


def evaluate_only(
    configuration: Configuration, session: Session, failure_handler: FailureHandler
) -> metrics.Average:
    """Write predictions for all test samples into a run's directory; collective.

    Raises ConfigurationError, CheckpointError.
    """
    task, configuration = find_task(configuration, None)
    agree(configuration, session)
    average, parts = evaluation.predict_all(configuration, task, session)
    run, _ = _open_run(configuration, session, failure_handler)
    if run is not None:
        path = run.path / evaluation.PREDICTIONS
        evaluation.write_predictions(path, parts)
        say(session, evaluation.describe(average, path))
    _finish(run, failure_handler, SUCCESS, "done")
    return average


def evaluate(
    task: Task, model: nn.Module, batches: Iterable[Batch], device: torch.device
) -> metrics.Average:
    """Return loss and metrics over the batches of all ranks; collective.

    Ranks may have different numbers of batches where forward passes are not collective. Those of
    weight 0 are not counted.
    """
    totals = metrics.Totals(device, task.metrics)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            inputs, targets, weight = batch.to(device)
            outputs = model(inputs)
            if weight > 0:
                totals.add(task.loss(outputs, targets), outputs, targets)
    return totals.reduce()


def digest_parameters(model: nn.Module) -> str:
    """Return the SHA-256 over the bytes of all parameters and buffers, in their order.

    Collective where they are sharded.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        whole: Any = collect(tensor.detach()).cpu().contiguous()
        digest.update(whole.view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _open_run(
    configuration: Configuration, session: Session, failure_handler: FailureHandler
) -> tuple[RunDirectory | None, Path]:
    """Open the run on rank 0, and tell all ranks and their failure handlers where it is."""
    run: RunDirectory | None = None
    answer: Any = None
    if session.world.rank == 0:
        try:
            if configuration.track is not None:
                check_library(configuration.track)
            export = configuration.export
            if export is not None and not export.parent.is_dir():
                raise ConfigurationError(f"export: {export.parent} is no directory")
            run = run_directory.open_run(configuration)
            answer = (run.path, run.attempt)
        except ConfigurationError as error:
            answer = error
    answer = session.broadcast(answer)
    if isinstance(answer, ConfigurationError):
        raise answer
    failure_handler.enter_run(*answer)
    return run, answer[0]


def _finish(
    run: RunDirectory | None, failure_handler: FailureHandler, code: int, reason: str
) -> None:
    """Write the outcome, on rank 0."""
    if run is not None:
        failure_handler.finish(code, reason)
        # After a failure the run stays locked while the failure handler writes, until the end.
        run.close()


def _export(training: Training) -> None:
    path = training.configuration.export
    if path is None:
        return
    problem = None
    try:
        with training.engine.at_average():
            export_weights(training.engine.module, path, training.session.world.rank)
    except OSError as error:
        problem = error.strerror
    if problem := training.session.broadcast(problem):
        raise ConfigurationError(f"export: cannot write {path}: {problem}")
    say(training.session, f"Weights written: {path}")


def _describe_start(training: Training) -> list[str]:
    session, world = training.session, training.session.world
    counts = torch.zeros(world.node_count, dtype=torch.int64, device=session.device)
    counts[world.node_rank] = 1
    dist.all_reduce(counts)
    lines = metrics.describe_start(
        session.device.type,
        counts.tolist(),
        world.master_hostname,
        training.configuration.batch_size,
        len(training.workers),
    )
    if training.engine.about:
        lines.append(training.engine.about)
    if training.configuration.base_batch is not None:
        batch = training.configuration.batch_size * len(training.workers)
        lines.append(describe_scaling(training.configuration, batch))
    if training.configuration.straggler is not None:
        lines.append(describe_straggler(parse_straggler(training.configuration.straggler)))
    if training.roles is not None:
        bound = find_bound(training.configuration)
        lines.append(f"Weights: {describe_roles(training.roles, bound)}")
    elif training.configuration.sync != FRAMEWORK:
        lines.append(_describe_synchronization(training))
    return lines


def _describe_synchronization(training: Training) -> str:
    configuration, pace = training.configuration, training.pace
    parts = [f"Gradients: {configuration.sync} over transport {configuration.transport}"]
    if configuration.wire_dtype != "auto":
        parts.append(f"in {configuration.wire_dtype}")
    how = "during" if configuration.overlap == "on" else "after"
    parts.append(f"{how} the backward pass of their bucket")
    if pace is not None:
        parts.append(f"({overlap.describe(pace)})")
    return " ".join(parts)


def _run_epochs(
    training: Training, pauses: Pauses, reports: Reports, begun: Restored
) -> Generator[Step, None, metrics.Row]:
    epochs = training.configuration.epochs
    position, epoch = begun.position, begun.epoch
    while position.epoch <= epochs:
        is_last = position.epoch == epochs
        reports.begin_epoch(position.epoch, epoch.totals)
        row = yield from _train_epoch(training, pauses, reports, position, epoch)
        training.engine.update.settle()
        share_buffers(training.engine.module)
        row = replace(row, staleness=_count_staleness(training))
        if is_last or row.epoch % training.configuration.evaluate_every == 0:
            row = _add_evaluation(training, row)
        if is_last:
            digest = digest_parameters(training.engine.module)
            row = replace(row, parameters=training.session.agree(digest, "trained parameters"))
        found = gather_costs(training.session, epoch.costs)
        row = add_costs(row, found)
        reports.end_epoch(row, found)
        position = Position(row.epoch + 1, 0, row.step, row)
        epoch = EpochTotals.make(training)
        pauses.after_epoch(position, is_last=is_last)
    assert position.row is not None
    return position.row


def _train_epoch(
    training: Training,
    pauses: Pauses,
    reports: Reports,
    position: Position,
    epoch: EpochTotals,
) -> Generator[Step, None, metrics.Row]:
    begin = time.perf_counter() - epoch.seconds
    taken = training.configuration.batch_size * len(training.workers)
    left, before = training.batches.count(position.samples), position.samples // taken
    training.engine.module.train()
    clock, traffic = training.engine.clock, training.engine.traffic
    clock.costs = epoch.costs
    traffic.forget()
    clock.skip()
    for number, batch in enumerate(_read_batches(training, position), start=1):
        clock.end(Stage.READ)
        if batch is not None:
            place = Place(position.step + 1, number - 1)
            take = partial(_take_batch, training, batch, place, epoch.totals)
            training.failure_handler.step_under_way = place.step
            yield from _offer(Step(position.epoch, place.step, batch, take))
            training.failure_handler.step_under_way = None
            reports.after_step(position.epoch, before + number, epoch.totals)
        position = replace(
            position, samples=position.samples + taken, step=position.step + 1, row=None
        )
        training.failure_handler.step = position.step
        if number < left:
            epoch.seconds = time.perf_counter() - begin
            pauses.after_step(position, epoch)
        clock.skip()
    clock.settle()
    training.engine.guard.settle()
    training.engine.update.finish_epoch()
    traffic.finish_epoch(epoch.costs)
    average = epoch.totals.reduce()
    seconds = time.perf_counter() - begin
    _refuse_divergence("training", average, position.epoch)
    average = add_perplexity(training.task, training.targets, average)
    last = training.find_rate_step(position.epoch + 1, 0)
    return metrics.Row(
        attempt=training.failure_handler.attempt,
        epoch=position.epoch,
        step=position.step if training.can_pause else last,
        loss=average.loss,
        metrics=average.metrics,
        learning_rate=training.rate(last - 1),
        samples_per_second=average.samples / seconds,
        seconds=seconds,
        left_out=average.left_out,
    )


def _offer(step: Step) -> Iterator[Step]:
    yield step
    if not step.is_taken:
        raise MpiddpError(f"expected take() to be called for step {step.number}, found no call")


def _take_batch(
    training: Training,
    batch: Batch,
    place: Place,
    totals: metrics.Totals,
    compute: Compute | None = None,
) -> None:
    _tell_unreadable(training, place.step)
    if training.slowdown is not None:
        training.slowdown.wait(place.step - 1)
        training.engine.clock.end(Stage.FORWARD)

    def describe() -> str:
        return _describe_batch(training, place)

    engine = training.engine
    if compute is not None:
        engine = replace(engine, forward=replace(engine.forward, compute=compute))
    bad = engine.take_step(batch, training.session.device, totals, describe)
    if bad is not None:
        warn(training.session, f"the loss is {bad.item()} {describe()}: the step is left out")


def _count_staleness(training: Training) -> dict[int, int] | None:
    """How often a gradient was so many updates late, over all servers; None without any."""
    update = training.engine.update
    if not isinstance(update, Serving):
        return None
    counts: Counter[int] = Counter()
    for found in training.session.gather(update.staleness):
        counts.update(found)
    return dict(sorted(counts.items()))


def _refuse_divergence(what: str, average: metrics.Average, epoch: int) -> None:
    if not math.isfinite(average.loss):
        raise MpiddpError(
            f"expected a finite {what} loss, found {average.loss} in epoch {epoch}: training has "
            "diverged; try a smaller --learning-rate"
        )


def _describe_batch(training: Training, place: Place) -> str:
    samples = training.batches.find_samples(place.batch)
    return f"in step {place.step}, with training {describe_numbers(samples)}"


def _tell_unreadable(training: Training, step: int) -> None:
    """Report the samples that were left out of this rank's step, counted from 1."""
    left_out = training.batches.reader.left_out
    for error in left_out:
        warn(training.session, f"{error}; left out of step {step}")
    left_out.clear()


def _add_evaluation(training: Training, row: metrics.Row) -> metrics.Row:
    begin = time.perf_counter()
    engine = training.engine
    with engine.at_average(), engine.forward.precision.autocast():
        batches: Iterable[Batch] = training.evaluation
        if engine.gathers:
            batches = evaluation.fill_up(training.evaluation)
        average = evaluate(training.tested, engine.module, batches, training.session.device)
    _refuse_divergence("test", average, row.epoch)
    average = add_perplexity(training.task, training.targets, average)
    return replace(
        row,
        test_loss=average.loss,
        test_metrics=average.metrics,
        evaluate_seconds=time.perf_counter() - begin,
    )


def _read_batches(training: Training, position: Position) -> Iterator[Batch | None]:
    """As `_show_progress`. An error that ends the run names the step."""
    try:
        yield from _show_progress(training, position)
    except UnreadableSampleError as error:
        step = (training.failure_handler.step or 0) + 1
        raise MpiddpError(f"{error}, in step {step}; --on-bad-sample skip leaves it out") from error


def _show_progress(training: Training, position: Position) -> Iterator[Batch | None]:
    """Pass the rest of the epoch's batches through; with a bar on rank 0's terminal, if any.

    A rank that computes nothing gets as many Nones, one after each of the workers' steps, where the
    ranks can pause together.
    """
    rank = training.session.world.rank
    left = training.batches.count(position.samples)
    if rank not in training.workers:
        update = training.engine.update
        assert isinstance(update, Serving)
        return update.follow_steps(left) if training.can_pause else iter([])
    batches = training.batches.start(position.epoch, position.samples)
    if rank > 0 or not sys.stderr.isatty():
        return iter(batches)
    from tqdm import tqdm

    what = f"Epoch {position.epoch}"
    return iter(tqdm(batches, desc=what, total=left, unit="batch", leave=False))
