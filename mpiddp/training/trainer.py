"""The training loop: the same on every rank; rank 0 also writes files and the console."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mpiddp.errors import SUCCESS, ConfigurationError, MpiddpError, PreemptedError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.training.data.samples import Batch, BatchError, UnreadableSampleError, describe_numbers
from mpiddp.training.evaluation import add_evaluation
from mpiddp.training.options.config import Configuration
from mpiddp.training.preparation import Training, agree, prepare
from mpiddp.training.rank_costs import add_costs, gather_costs
from mpiddp.training.records import metrics
from mpiddp.training.records.network import NetworkMeter
from mpiddp.training.records.run_directory import RunDirectory
from mpiddp.training.reports import Reports, describe_training, report_left_out, say, warn
from mpiddp.training.saving import Saver, check_model, look_for_checkpoint
from mpiddp.training.shared_run import abandoned_after_error, enter_run, leave_run
from mpiddp.training.step.divergence import refuse_divergence
from mpiddp.training.step.malloc import keep_freed_memory
from mpiddp.training.step.stages import Stage
from mpiddp.training.step.step import Compute
from mpiddp.training.task.task import Task, add_perplexity, find_task
from mpiddp.training.training_state import Position
from mpiddp.training.weights import digest_parameters
from mpiddp.training.wrapping.parallel import share_buffers


@dataclass
class Step:
    """A step of training that is to be taken: with a batch of this rank."""

    epoch: int
    """Counted from 1."""
    number: int
    """Of the run, counted from 1; without a bound on staleness this rank's own count, which is set
    back to the average of the workers when these pause."""
    batch: Batch
    _loop: Loop
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
            self._loop.take_batch(self, compute)
        except BaseException:
            self.has_failed = True
            raise


@dataclass(frozen=True)
class Handlers:
    """Who else is to know of a run."""

    failure_handler: FailureHandler
    signals: PreemptionSignals | None = None
    """That preempt it."""
    note: Callable[[Training], object] = id
    """Is given what was prepared, before the first step."""


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
    steps = run_steps(configuration, task, session, Handlers(failure_handler, signals))
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            row: metrics.Row | None = end.value
            assert row is not None
            return row
        step.take()


def run_steps(
    configuration: Configuration, task: Task, session: Session, handlers: Handlers
) -> Generator[Step, None, metrics.Row | None]:
    """Train as the configuration says: yields this rank's steps, which must be taken; collective.

    Returns the last row of the metrics; None on a rank that only serves parameters, which has no
    steps, if the others leave before the end. If the generator is closed before its end, what was
    trained is saved, and the run has ended well.

    The parameters are the same on all ranks at the end, and the same bits in every run with the
    same configuration and number of ranks on CPUs, unless gradients may be stale. Configuration and
    task are those that `find_task` returned, and all ranks agree on them.

    Raises:
        ConfigurationError: the data cannot be shared out, the model does not fit the data, or the
            run directory is refused.
        MpiddpError: the loss is not a number any more.
        PreemptedError: a signal has come to a rank, and a checkpoint was written.
    """
    begin, failure_handler = time.perf_counter(), handlers.failure_handler
    if session.device.type == "cpu":
        keep_freed_memory()
    beginning = look_for_checkpoint(configuration, session)
    training = prepare(beginning.configuration, task, session, failure_handler, beginning.taken)
    check_model(training)
    run, path = enter_run(training.configuration, session, failure_handler, beginning.taken)
    with abandoned_after_error(run) as after_error:
        say(session, *describe_training(training))
        saver = Saver(training, beginning, run, handlers.signals)
        after_error.append(saver.abandon)
        saver.restore()
        handlers.note(training)
        loop = Loop(training, saver, run, path, beginning.position)
        try:
            try:
                while loop.position.epoch <= training.configuration.epochs:
                    loop.begin_epoch()
                    with closing(loop.read_batches()) as batches:
                        for batch in batches:
                            if batch is not None:
                                yield loop.begin_step(batch)
                            loop.end_step()
                    if loop.is_left:
                        loop.finish_left()
                        return None
                    loop.end_epoch()
            except GeneratorExit:
                loop.leave()
                raise
        except PreemptedError as error:
            loop.preempt(error)
            return None
        row = loop.finish()
        say(session, metrics.describe_end(row, time.perf_counter() - begin, path))
        leave_run(run, failure_handler, SUCCESS, "done")
        return row


class Loop:
    """One rank's run, from its first step to its end, however it ends. Methods are collective."""

    def __init__(
        self,
        training: Training,
        saver: Saver,
        run: RunDirectory | None,
        path: Path,
        position: Position,
    ) -> None:
        """``run``: on rank 0; ``path``: of its directory. ``position``: where it begins."""
        self.training, self.saver, self.run = training, saver, run
        self.reports = Reports(training, path, position.step)
        self.epoch = saver.epoch
        self.is_left = False
        """Whether a rank has left the loop early; the same on all ranks, from `_settle_steps`."""
        self._agreed = position
        """The last position that was the same on all ranks."""
        self._taken = self._left = 0
        """Steps that were made since then, and steps that were left then."""
        self._step_samples = training.configuration.batch_size * len(training.workers)
        """Of a step of all ranks."""
        self._meter: NetworkMeter | None = None
        if training.configuration.track_network:
            self._meter = NetworkMeter(training.session.world.local_rank == 0)
        self._step: Step | None = None
        """Of this rank's, under way."""
        training.failure_handler.end_step(position.step or None)

    @property
    def position(self) -> Position:
        """Of the next step; ranks that share batches each have their own within an epoch."""
        agreed, taken = self._agreed, self._taken
        if not taken:
            return agreed
        samples = agreed.samples + taken * self._step_samples
        return Position(agreed.epoch, samples, agreed.step + taken)

    # From an epoch's beginning to its end

    def begin_epoch(self) -> None:
        training = self.training
        self.reports.begin_epoch(self.position.epoch, self.epoch.totals)
        self.epoch.begin_time()
        training.engine.module.train()
        training.engine.clock.count_in(self.epoch.costs)
        if self._meter is not None:
            self._meter.begin(self.epoch.costs.steps)
        training.engine.traffic.forget()

    def read_batches(self) -> Generator[Batch | None, None, None]:
        """The rest of the epoch's batches; None is a step of other ranks.

        Ranks that share batches pause for checkpoints before the epoch's end.
        """
        training, clock = self.training, self.training.engine.clock
        reader = training.batches.reader
        while True:
            position = self._agreed
            self._left = training.batches.count(position.samples)
            steps = self.saver.count_steps(position.step)
            clock.skip()
            for batch in _read_batches(training, position, steps):
                clock.end_reading(reader.work)
                yield batch
                clock.skip()
            self._settle_steps()
            if self.is_left or training.batches.count(self._agreed.samples) == 0:
                return
            training.engine.update.settle()
            self.prepare_checkpoint()
            self.saver.after_pause(self._agreed)

    def begin_step(self, batch: Batch) -> Step:
        number = self._agreed.step + self._taken + 1
        self._step = Step(self._agreed.epoch, number, batch, self)
        self.training.failure_handler.begin_step(number)
        return self._step

    def take_batch(self, step: Step, compute: Compute | None) -> None:
        """What `Step.take` does."""
        training, engine = self.training, self.training.engine
        if training.batches.reader.left_out:
            report_left_out(training.batches.reader, training.session, f"step {step.number}")
        if training.slowdown is not None:
            training.slowdown.wait(step.number - 1)
            engine.clock.end(Stage.FORWARD)
        device, totals = training.session.device, self.epoch.totals
        describe = partial(self._describe, step.number)
        bad = engine.take_step(step.batch, device, totals, describe, compute)
        if bad is not None:
            text = f"the loss is {bad.item()} {describe()}: the step is left out"
            warn(training.session, text)

    def _describe(self, step: int) -> str:
        """A step since ranks were last at the same position, with its samples."""
        samples = self.training.batches.find_samples(step - self._agreed.step - 1)
        return f"in step {step}, with training {describe_numbers(samples)}"

    def end_step(self) -> None:
        """Do what is due after a step of this rank, or of others. Raises MpiddpError if this rank's
        was not taken, and PreemptedError."""
        training, step = self.training, self._step
        if step is not None:
            if not step.is_taken:
                raise MpiddpError(
                    f"expected take() to be called for step {step.number}, found no call"
                )
            self._step = None
        self._taken += 1
        if step is not None and self.reports.follows_steps:
            batch = self._agreed.samples // self._step_samples + self._taken
            self.reports.after_step(self.position, batch, self.epoch.totals)
        number = self._agreed.step + self._taken
        training.failure_handler.end_step(number)
        if self._taken < self._left and not training.batches.is_shared:
            self.saver.after_step(number, self)

    def prepare_checkpoint(self) -> None:
        """The epoch's sums are as they are now, and rows of steps are written."""
        self.epoch.count_time()
        self.reports.flush()

    def _settle_steps(self, *, is_left: bool = False) -> None:
        """Have all gradients applied; the position is the same on all ranks then."""
        training, agreed = self.training, self._agreed
        training.engine.clock.settle()
        training.engine.guard.settle()
        training.engine.update.finish_epoch()
        self.is_left = self._ask_left(is_left)
        samples, steps = training.batches.sum_up(self._taken, training.session.gather)
        if steps:
            self._agreed = Position(agreed.epoch, agreed.samples + samples, agreed.step + steps)
            self._taken = 0
            training.failure_handler.end_step(self._agreed.step)
        self.epoch.count_time()

    def end_epoch(self) -> None:
        """Measure and report the epoch, and make a checkpoint if one is due."""
        training = self.training
        is_last = self._agreed.epoch == training.configuration.epochs
        training.engine.update.exchange_weights(is_due=True)
        training.engine.clock.settle()
        row = self._sum_epoch()
        network, costs = None, self.epoch.costs
        if self._meter is not None:
            network = self._meter.measure(costs.sent_bytes, costs.steps)
        training.engine.update.settle()
        share_buffers(training.engine.module)
        row = replace(row, staleness=_count_staleness(training))
        if is_last or row.epoch % training.configuration.evaluate_every == 0:
            row = add_evaluation(training, row)
        if is_last:
            digest = digest_parameters(training.engine.module)
            row = replace(row, parameters=training.session.agree(digest, "trained parameters"))
        found = gather_costs(training.session, costs, network)
        row = add_costs(row, found)
        self.reports.end_epoch(row, found)
        self._agreed = Position(row.epoch + 1, 0, row.step, row)
        self.epoch.clear()
        if not is_last:
            self.saver.after_epoch(self._agreed)

    def _sum_epoch(self) -> metrics.Row:
        """The row of all ranks. Raises MpiddpError if the mean loss is not finite."""
        training, position = self.training, self._agreed
        training.engine.traffic.finish_epoch(self.epoch.costs)
        average = self.epoch.totals.reduce()
        self.epoch.count_time()
        seconds = self.epoch.seconds
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

    # The ends of a run

    def finish(self) -> metrics.Row:
        """After the last epoch: write the weights, then the last checkpoint.

        Raises ConfigurationError if the weights cannot be written; the checkpoint is, then.
        """
        row = self.position.row
        assert row is not None
        problem = self.saver.export(self.position)
        self.saver.save_end(self.position)
        self._close(is_done=not problem)
        if problem:
            raise ConfigurationError(problem)
        if row.staleness is not None:
            say(self.training.session, metrics.describe_staleness(row.staleness))
        return row

    def preempt(self, error: PreemptedError) -> None:
        """The checkpoint is written. Raises ``error``, unless ranks have left the loop."""
        if self._ask_left(False):
            self.finish_left()
            return
        self._close(is_done=False)
        say(self.training.session, str(error))
        leave_run(self.run, self.training.failure_handler, error.exit_code, str(error))
        raise error

    def leave(self) -> None:
        """The script has left its loop; nothing is saved if that is because a step has failed.

        What is due after its last step is done first, as on ranks that only serve.
        """
        step = self._step
        if step is None or step.has_failed:
            return
        try:
            if step.is_taken:
                self.saver.note_last(step.number)
                self.end_step()
            self._settle_steps(is_left=True)
        except PreemptedError:
            # The checkpoint is written, and the script wants no more.
            self._ask_left(True)
        self.finish_left()

    def _ask_left(self, is_left: bool) -> bool:
        """Whether a rank has left the loop. Collective where ranks differ in their steps.

        A rank that only serves does not know otherwise why its workers send no more.
        """
        training = self.training
        are_alike = len(training.workers) == training.session.world.size
        if are_alike and not training.batches.is_shared:
            return is_left
        return training.session.any(is_left)

    def finish_left(self) -> None:
        """End a run whose loop was left: the checkpoint and the weights are written."""
        training = self.training
        position, handler = self.position, training.failure_handler
        handler.end_step(position.step or None)
        training.engine.update.settle()
        problem = self.saver.export(position)
        self.reports.flush()
        self.saver.save_last(position)
        # What a script predicts with is the same on all ranks.
        training.engine.update.exchange_weights(is_due=True)
        share_buffers(training.engine.module)
        self._close(is_done=False)
        if problem:
            raise ConfigurationError(problem)
        reason = f"left after step {position.step}"
        say(training.session, f"Training {reason}; the checkpoint is written")
        leave_run(self.run, handler, SUCCESS, reason)

    def _close(self, *, is_done: bool) -> None:
        self.saver.pass_no_more()
        self.training.close()
        self.saver.close()
        self.reports.close(is_done=is_done)
        if self.training.engine.average is not None:
            # What was exported is what a script predicts with.
            self.training.engine.average.apply()


def _count_staleness(training: Training) -> dict[int, int] | None:
    """How often a gradient was so many updates late, over all servers; None without any."""
    mine = training.engine.update.staleness
    if mine is None:
        return None
    counts: Counter[int] = Counter()
    for found in training.session.gather(mine):
        counts.update(found)
    return dict(sorted(counts.items()))


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
    """Pass the rest of the epoch's batches through, with a bar on rank 0's terminal, if any.

    Ranks that share batches pause after ``steps`` on average, if it is given.
    """
    found = training.batches.start(position.epoch, position.samples, steps)
    rank = training.session.world.rank
    if rank > 0 or rank not in training.workers or not sys.stderr.isatty():
        return found
    from tqdm import tqdm

    what, left = f"Epoch {position.epoch}", training.batches.count(position.samples)
    return iter(tqdm(found, desc=what, total=left, unit="batch", leave=False))
