"""The training loop: the same on every rank; rank 0 also writes files and the console."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from mpiddp.errors import SUCCESS, ConfigurationError, MpiddpError, PreemptedError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.sync.parameter_server.roles import Serving
from mpiddp.training.data.batches import SharedBatches
from mpiddp.training.data.samples import Batch, BatchError, UnreadableSampleError, describe_numbers
from mpiddp.training.evaluation import add_evaluation
from mpiddp.training.options.config import Configuration
from mpiddp.training.preparation import Training, agree, prepare
from mpiddp.training.rank_costs import add_costs, gather_costs
from mpiddp.training.records import metrics
from mpiddp.training.records.run_directory import RunDirectory
from mpiddp.training.reports import Reports, describe_training, say, warn
from mpiddp.training.saving import Saver, check_model, look_for_checkpoint
from mpiddp.training.shared_run import abandoned_after_error, enter_run, leave_run
from mpiddp.training.step.divergence import refuse_divergence
from mpiddp.training.step.malloc import keep_freed_memory
from mpiddp.training.step.stages import Stage
from mpiddp.training.step.step import Compute
from mpiddp.training.task.task import Task, add_perplexity, find_task
from mpiddp.training.training_state import EpochTotals, Position
from mpiddp.training.weights import digest_parameters
from mpiddp.training.wrapping.parallel import share_buffers


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
    """Of the run, counted from 1; without a bound on staleness this rank's own count, which is set
    back to the average of the workers when these pause."""
    batch: Batch
    _take: Callable[[Compute | None], None]
    is_taken: bool = False
    has_failed: bool = False

    def take(self, compute: Compute | None = None) -> None:
        """Forward and backward pass, and the update; collective.

        ``compute(model, batch)``, if given, returns the model's outputs and the mean loss. It is
        called in place of the model and the task's loss, once for each pass of the step, with the
        pass's batch on the model's device.
        """
        if self.is_taken:
            raise MpiddpError(f"expected one take() for step {self.number}, found a second one")
        self.is_taken = True
        try:
            self._take(compute)
        except BaseException:
            self.has_failed = True
            raise

    def check(self) -> None:
        """Raises MpiddpError if it was not taken."""
        if not self.is_taken:
            raise MpiddpError(f"expected take() to be called for step {self.number}, found no call")


def train(
    configuration: Configuration,
    session: Session,
    failure_handler: FailureHandler,
    signals: PreemptionSignals | None = None,
    task: Task | None = None,
) -> metrics.Row:
    """Take all steps of `run_steps`, and return the last row of the metrics; collective.

    The configuration is a resolved one. ``task``: None for the options' one.
    """
    task, configuration = find_task(configuration, task)
    agree(configuration, session)
    steps = run_steps(configuration, task, session, failure_handler, signals)
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            row: metrics.Row | None = end.value
            assert row is not None
            return row
        step.take()


def run_steps(
    configuration: Configuration,
    task: Task,
    session: Session,
    failure_handler: FailureHandler,
    signals: PreemptionSignals | None,
) -> Generator[Step, None, metrics.Row | None]:
    """Train as the configuration says: yields this rank's steps, which must be taken; collective.

    Returns the last row of the metrics; None on a rank that only serves parameters, which has no
    steps, if the others leave before the end. If the generator is closed before its end, what was
    trained is saved, and the run has ended well.

    The parameters are the same on all ranks at the end, and the same bits in every run with the
    same configuration and number of ranks on CPUs, unless gradients may be stale. (Payloads of NaNs
    may differ; a loss that is not finite is refused.) Configuration and task are those that
    `find_task` returned, and all ranks agree on them. The failure handler learns the run directory
    and each step.

    Raises:
        ConfigurationError: the data cannot be shared out, the model does not fit the data, or the
            run directory is refused.
        MpiddpError: the loss is not a number any more.
        PreemptedError: one of ``signals`` has come to a rank, and a checkpoint was written.
    """
    begin = time.perf_counter()
    if session.device.type == "cpu":
        keep_freed_memory()
    beginning = look_for_checkpoint(configuration, session)
    taken, resumed = beginning.taken, beginning.configuration
    training = prepare(resumed, task, session, failure_handler, taken)
    check_model(training)
    run, path = enter_run(training.configuration, session, failure_handler)
    with abandoned_after_error(run) as after_error:
        say(session, *describe_training(training))
        saver = Saver(training, beginning, run, signals)
        after_error.append(saver.abandon)
        position, epoch = beginning.position, saver.restore()
        failure_handler.step = position.step or None
        if failure_handler.attempt > 1 and position == Position():
            say(session, f"Attempt {failure_handler.attempt} in {path}: starting over")
        reports = Reports(session, path, training.configuration, position.step)
        loop = Loop(training, saver, reports, run)
        try:
            row = yield from _run_epochs(loop, position, epoch)
        except PreemptedError as error:
            loop.preempt(error)
            raise
        except GeneratorExit:
            if loop.left:
                loop.finish_left()
            raise
        if row is None:
            loop.finish_left()
            return None
        loop.finish(row)
        say(session, metrics.describe_end(row, time.perf_counter() - begin, path))
        leave_run(run, failure_handler, SUCCESS, "done")
        return row


@dataclass(frozen=True)
class Left:
    """Where this rank has left the loop over the steps before its end."""

    before: Position
    """At which the ranks last agreed."""
    position: Position
    epoch: EpochTotals


@dataclass(frozen=True)
class Loop:
    """What takes part in every step, and is closed when a run ends, however that happens."""

    training: Training
    saver: Saver
    reports: Reports
    run: RunDirectory | None
    left: list[Left] = field(default_factory=list)
    """One, once the loop was left."""

    def close(self, *, is_done: bool) -> None:
        """Collective."""
        self.saver.pass_no_more()
        self.training.close()
        self.saver.close()
        self.reports.close(is_done=is_done)

    def finish(self, row: metrics.Row) -> None:
        """After the last epoch: write the weights, then the last checkpoint. Collective.

        Raises ConfigurationError if the weights cannot be written; the checkpoint is, then.
        """
        problem = self.saver.export(row.step)
        self.saver.save_end(Position(row.epoch + 1, 0, row.step, row))
        self.close(is_done=not problem)
        if problem:
            raise ConfigurationError(problem)
        if row.staleness is not None:
            say(self.training.session, metrics.describe_staleness(row.staleness))

    def preempt(self, error: PreemptedError) -> None:
        """The checkpoint is written. Collective."""
        self.close(is_done=False)
        say(self.training.session, str(error))
        leave_run(self.run, self.training.failure_handler, error.exit_code, str(error))

    def finish_left(self) -> None:
        """End a run whose loop was left: the checkpoint and the weights are written. Collective."""
        training, (left,) = self.training, self.left
        training.engine.clock.settle()
        position = _finish_steps(training, left.before, left.position)
        handler = training.failure_handler
        handler.step = position.step or None
        training.engine.update.settle()
        problem = self.saver.export(position.step)
        self.saver.save_last(position, left.epoch)
        self.close(is_done=False)
        if problem:
            raise ConfigurationError(problem)
        reason = f"left after step {position.step}"
        say(training.session, f"Training {reason}; the checkpoint is written")
        leave_run(self.run, handler, SUCCESS, reason)


def _run_epochs(
    loop: Loop, position: Position, epoch: EpochTotals
) -> Generator[Step, None, metrics.Row | None]:
    """Returns the last row; None on a rank that only serves, if the others have left."""
    training, saver, reports = loop.training, loop.saver, loop.reports
    epochs = training.configuration.epochs
    while position.epoch <= epochs:
        is_last = position.epoch == epochs
        reports.begin_epoch(position.epoch, epoch.totals)
        trained = yield from _train_epoch(loop, position, epoch)
        if trained is None:
            return None
        row = trained
        training.engine.update.settle()
        share_buffers(training.engine.module)
        row = replace(row, staleness=_count_staleness(training))
        if is_last or row.epoch % training.configuration.evaluate_every == 0:
            row = add_evaluation(training, row)
        if is_last:
            digest = digest_parameters(training.engine.module)
            row = replace(row, parameters=training.session.agree(digest, "trained parameters"))
        found = gather_costs(training.session, epoch.costs)
        row = add_costs(row, found)
        reports.end_epoch(row, found)
        position, epoch = Position(row.epoch + 1, 0, row.step, row), EpochTotals.make(training)
        if not is_last:
            saver.after_epoch(position)
    assert position.row is not None
    return position.row


def _train_epoch(
    loop: Loop, position: Position, epoch: EpochTotals
) -> Generator[Step, None, metrics.Row | None]:
    training = loop.training
    begin = time.perf_counter() - epoch.seconds
    training.engine.module.train()
    clock, traffic = training.engine.clock, training.engine.traffic
    clock.costs = epoch.costs
    traffic.forget()
    while True:
        epoch.seconds = time.perf_counter() - begin
        position = yield from _take_steps(loop, position, epoch)
        if loop.left:
            return None
        if training.batches.count(position.samples) == 0:
            break
        training.engine.update.settle()
        loop.saver.after_pause(position, epoch)
    traffic.finish_epoch(epoch.costs)
    average = epoch.totals.reduce()
    seconds = time.perf_counter() - begin
    refuse_divergence("training", average.loss, position.epoch)
    average = add_perplexity(training.task, training.targets, average)
    return metrics.Row(
        attempt=training.failure_handler.attempt,
        epoch=position.epoch,
        step=position.step,
        loss=average.loss,
        metrics=average.metrics,
        learning_rate=training.rate(training.find_rate_step(position.epoch + 1, 0) - 1),
        samples_per_second=average.samples / seconds,
        seconds=seconds,
        left_out=average.left_out,
    )


def _take_steps(
    loop: Loop, position: Position, epoch: EpochTotals
) -> Generator[Step, None, Position]:
    """Take the rest of an epoch's steps; workers without a bound may pause before its end.

    Returns the position, the same on all ranks, once all gradients have been applied.
    """
    training, saver = loop.training, loop.saver
    begin, before = time.perf_counter() - epoch.seconds, position
    taken = training.configuration.batch_size * len(training.workers)
    batches, clock = training.batches, training.engine.clock
    left, is_shared = batches.count(position.samples), isinstance(batches, SharedBatches)
    clock.skip()
    steps, number = saver.count_steps(position.step), 0
    for number, batch in enumerate(_read_batches(training, position, steps), start=1):
        clock.end(Stage.READ)
        following = Position(position.epoch, position.samples + taken, position.step + 1)
        if batch is not None:
            place = Place(following.step, number - 1)
            take = partial(_take_batch, training, batch, place, epoch.totals)
            step = Step(position.epoch, place.step, batch, take)
            training.failure_handler.step_under_way = following.step
            try:
                yield step
            except GeneratorExit:
                if not step.has_failed:
                    done = following if step.is_taken else position
                    loop.left.append(Left(before, done, epoch))
                raise
            step.check()
            training.failure_handler.step_under_way = None
            loop.reports.after_step(position.epoch, before.samples // taken + number, epoch.totals)
        position = following
        training.failure_handler.step = position.step
        epoch.seconds = time.perf_counter() - begin
        if number < left and not is_shared:
            saver.after_step(position, epoch)
        clock.skip()
    if number < left and not is_shared:
        # The workers of a rank that only serves have left.
        loop.left.append(Left(before, position, epoch))
        return position
    clock.settle()
    return _finish_steps(training, before, position)


def _finish_steps(training: Training, before: Position, position: Position) -> Position:
    """Have all gradients applied; returns the position, the same on all ranks. Collective."""
    training.engine.guard.settle()
    training.engine.update.finish_epoch()
    if isinstance(training.batches, SharedBatches):
        return _meet(training, training.batches, before, position.step - before.step)
    return position


def _meet(training: Training, batches: SharedBatches, before: Position, steps: int) -> Position:
    """Where all workers are since ``before``, of which this rank has taken so many steps.

    What they have done are the first batches of the epoch's rest. Collective.
    """
    done = sum(training.session.gather(steps))
    samples = before.samples + done * training.configuration.batch_size
    position = Position(before.epoch, samples, before.step + batches.count_steps(done))
    training.failure_handler.step = position.step
    return position


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
    engine = training.engine
    if compute is not None:
        engine = replace(engine, forward=replace(engine.forward, compute=compute))
    describe = partial(_describe_batch, training, place)
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


def _describe_batch(training: Training, place: Place) -> str:
    samples = training.batches.find_samples(place.batch)
    return f"in step {place.step}, with training {describe_numbers(samples)}"


def _tell_unreadable(training: Training, step: int) -> None:
    """Report the samples that were left out of this rank's step, counted from 1."""
    left_out = training.batches.reader.left_out
    for error in left_out:
        warn(training.session, f"{error}; left out of step {step}")
    left_out.clear()


def _read_batches(
    training: Training, position: Position, steps: int | None
) -> Iterator[Batch | None]:
    """As `_show_progress`. An error that ends the run names the step."""
    try:
        yield from _show_progress(training, position, steps)
    except (UnreadableSampleError, BatchError) as error:
        step = (training.failure_handler.step or 0) + 1
        advice = ""
        if isinstance(error, UnreadableSampleError):
            is_skipped = training.configuration.on_bad_sample == "skip"
            what = "nothing is left of" if is_skipped else "--on-bad-sample skip leaves it out of"
            advice = f"; {what} the batch"
        raise MpiddpError(f"{error}, in step {step}{advice}") from error


def _show_progress(
    training: Training, position: Position, steps: int | None
) -> Iterator[Batch | None]:
    """Pass the rest of the epoch's batches through; with a bar on rank 0's terminal, if any.

    A rank that computes nothing gets as many Nones, one after each of the workers' steps, if
    they take equally many. Others pause after ``steps`` on average, if it is given.
    """
    rank = training.session.world.rank
    batches = training.batches
    left, is_shared = batches.count(position.samples), isinstance(batches, SharedBatches)
    if rank not in training.workers:
        update = training.engine.update
        assert isinstance(update, Serving)
        return iter([]) if is_shared else update.follow_steps(left)
    if isinstance(batches, SharedBatches):
        found = batches.start(position.epoch, position.samples, steps)
    else:
        found = batches.start(position.epoch, position.samples)
    if rank > 0 or not sys.stderr.isatty():
        return found
    from tqdm import tqdm

    what = f"Epoch {position.epoch}"
    return iter(tqdm(found, desc=what, total=left, unit="batch", leave=False))
