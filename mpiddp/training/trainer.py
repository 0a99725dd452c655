"""The training loop: the same on every rank. Rank 0 also writes files and the console."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from mpiddp.errors import ConfigurationError, MpiddpError, PreemptedError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.training.data.samples import Batch, BatchError, UnreadableSampleError, describe_numbers
from mpiddp.training.evaluation import add_evaluation
from mpiddp.training.exported_weights import digest_parameters
from mpiddp.training.options.config import Configuration
from mpiddp.training.preparation import Training, agree, prepare
from mpiddp.training.rank_costs import add_costs, gather_costs
from mpiddp.training.records import metrics
from mpiddp.training.records.network import NetworkMeter
from mpiddp.training.resuming import look_for_checkpoint
from mpiddp.training.run_output import Reports, describe_training, report_left_out, say, warn
from mpiddp.training.run_state import DONE, Position, RunEnd, RunState
from mpiddp.training.saving import Saver, check_model
from mpiddp.training.shared_run import SharedRun, after_error, enter_run
from mpiddp.training.step.divergence import refuse_divergence
from mpiddp.training.step.malloc import keep_freed_memory
from mpiddp.training.step.stages import StepStage
from mpiddp.training.step.step import Compute
from mpiddp.training.task.task import Task, add_perplexity, find_task
from mpiddp.training.wrapping.shared_model import share_buffers


@dataclass
class Step:
    """A step of training that the loop's owner takes, with a batch of this rank."""

    epoch: int
    """Counted from 1."""
    number: int
    """Of the run, counted from 1."""
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
class RunHandlers:
    """Who is told of a run, and what may stop it."""

    failure_handler: FailureHandler
    signals: PreemptionSignals | None = None
    """The signals that preempt it."""
    take_training: Callable[[Training], object] | None = None
    """Called with what was prepared, before the first step."""


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
    steps = run_steps(configuration, task, session, RunHandlers(failure_handler, signals))
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            row: metrics.Row | None = end.value
            assert row is not None
            return row
        step.take()


def run_steps(
    configuration: Configuration, task: Task, session: Session, handlers: RunHandlers
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
        MpiddpError: the loss is not finite.
        PreemptedError: a rank got a signal, and a checkpoint was written.
    """
    begin, failure_handler = time.perf_counter(), handlers.failure_handler
    if session.device.type == "cpu":
        keep_freed_memory()
    beginning = look_for_checkpoint(configuration, session)
    training = prepare(
        beginning.configuration, task, session, failure_handler.fail, beginning.taken
    )
    check_model(training)
    run = enter_run(training.configuration, session, failure_handler, beginning.taken)
    with after_error(run.abandon):
        say(session, *describe_training(training))
        saver = Saver(training, beginning, run, handlers.signals)
        with after_error(saver.abandon):
            saver.restore()
            if handlers.take_training is not None:
                handlers.take_training(training)
            loop = Loop(training, saver, run, beginning.position)
            try:
                yield from loop.take_steps()
                if not loop.is_left:
                    return loop.finish(begin)
                loop.stop()
            except GeneratorExit:
                if loop.settle_left():
                    loop.stop()
                raise
            except PreemptedError as error:
                loop.stop(error)
            return None


class Loop:
    """One rank's run, from its first step to its end. Methods are collective."""

    def __init__(
        self, training: Training, saver: Saver, run: SharedRun, position: Position
    ) -> None:
        """``position``: where it begins."""
        self.training, self.saver, self.run = training, saver, run
        self.state, self.epoch = run.state, saver.epoch
        self.state.move_to(position)
        self.reports = Reports(training, self.state)
        self.is_left = False
        """Whether a rank has left the loop early; the same on all ranks, from `_settle_steps`."""
        self._step_samples = training.batches.cut.step_samples
        """Of a step of all ranks."""
        self._meter: NetworkMeter | None = None
        if training.configuration.track_network:
            self._meter = NetworkMeter(training.session.world.local_rank == 0)
        self._step: Step | None = None
        """Of this rank's, under way."""
        self._left = 0
        """Steps that are left in this epoch."""

    def take_steps(self) -> Generator[Step, None, None]:
        """Yields this rank's steps up to the end of the last epoch, and does what is due after each
        step and epoch. On a rank that only serves it ends early if the others have left."""
        training, state = self.training, self.state
        clock = training.engine.clock
        while state.position.epoch <= training.configuration.epochs:
            self.begin_epoch()
            clock.skip()
            with closing(_read_batches(training, state)) as batches:
                for batch in batches:
                    clock.end_reading(training.batches.reader.work)
                    if batch is not None:
                        self._step = Step(state.position.epoch, state.begin_step(), batch, self)
                        yield self._step
                    self.end_step()
                    clock.skip()
            self._settle_steps()
            if self.is_left:
                return
            self.end_epoch()

    def begin_epoch(self) -> None:
        training = self.training
        self.reports.begin_epoch(self.epoch.totals)
        self.epoch.begin_time()
        training.engine.module.train()
        training.engine.clock.count_in(self.epoch.costs)
        if self._meter is not None:
            self._meter.begin(self.epoch.costs.steps)
        training.engine.traffic.forget()
        self._left = training.batches.count(self.state.position.samples)

    def take_batch(self, step: Step, compute: Compute | None) -> None:
        """What `Step.take` does."""
        training, engine = self.training, self.training.engine
        if training.batches.reader.left_out:
            report_left_out(training.batches.reader, training.session, f"step {step.number}")
        if training.slowdown is not None:
            training.slowdown.wait(step.number - 1)
            engine.clock.end(StepStage.FORWARD)
        device, totals = training.session.device, self.epoch.totals
        describe = partial(self._describe, self.state.position)
        bad = engine.take_step(step.batch, device, totals, describe, compute)
        if bad is not None:
            warn(training.session, f"the loss is {bad.item()} {describe()}: the step is left out")

    def _describe(self, position: Position) -> str:
        """The step that begins there, with its samples."""
        samples = self.training.batches.find_samples(position.epoch, position.samples)
        return f"in step {position.step + 1}, with training {describe_numbers(samples)}"

    def end_step(self) -> None:
        """Do what is due after a step. Raises MpiddpError if this rank's step was not taken, and
        PreemptedError."""
        step, self._step = self._step, None
        if step is not None and not step.is_taken:
            raise MpiddpError(f"expected take() to be called for step {step.number}, found no call")
        self.state.end_step(self._step_samples)
        self._left -= 1
        if step is not None and self.reports.follows_steps:
            batch = self.state.position.samples // self._step_samples
            self.reports.after_step(batch, self.epoch.totals)
        if self._left:
            self.saver.after_step(self.reports.flush)

    def _settle_steps(self, *, is_left: bool = False) -> None:
        """After the last step of an epoch, or before the loop is left: apply all gradients."""
        training = self.training
        training.engine.clock.settle()
        training.engine.guard.settle()
        training.engine.update.finish_epoch()
        self.is_left = self._ask_left(is_left)
        self.epoch.count_time()

    def _ask_left(self, is_left: bool) -> bool:
        """Whether a rank has left the loop. Collective if some ranks only serve.

        These do not know otherwise why their workers send no more.
        """
        training = self.training
        if len(training.workers) == training.session.world.size:
            return is_left
        return training.session.any(is_left)

    def end_epoch(self) -> None:
        """Measure and report the epoch, and make a checkpoint if one is due."""
        training = self.training
        is_last = self.state.position.epoch == training.configuration.epochs
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
        self.state.move_to(Position(row.epoch + 1, 0, row.step, row))
        self.epoch.clear()
        if not is_last:
            self.saver.after_epoch()

    def _sum_epoch(self) -> metrics.Row:
        """The row of all ranks. Raises MpiddpError if the mean loss is not finite."""
        training, position = self.training, self.state.position
        training.engine.traffic.finish_epoch(self.epoch.costs)
        average = self.epoch.totals.reduce()
        self.epoch.count_time()
        seconds = self.epoch.seconds
        refuse_divergence("training", average.loss, position.epoch)
        average = add_perplexity(training.task, training.targets, average)
        return metrics.Row(
            attempt=self.state.attempt,
            epoch=position.epoch,
            step=position.step,
            loss=average.loss,
            metrics=average.metrics,
            learning_rate=training.rate(training.find_rate_step(position.epoch + 1, 0) - 1),
            samples_per_second=average.samples / seconds,
            seconds=seconds,
            left_out=average.left_out,
        )

    # The two ends of a run

    def finish(self, begin: float) -> metrics.Row:
        """The run is done: write the weights, then the last checkpoint.

        ``begin``: of perf_counter. Raises ConfigurationError if the weights cannot be written; the
        checkpoint is, then.
        """
        row, session = self.state.position.row, self.training.session
        assert row is not None
        problem = self.saver.export()
        self.saver.save_end()
        self._close(is_done=not problem)
        if problem:
            raise ConfigurationError(problem)
        if row.staleness is not None:
            say(session, metrics.describe_staleness(row.staleness))
        seconds = time.perf_counter() - begin
        say(session, metrics.describe_end(row, seconds, self.state.directory))
        self.run.leave(DONE)
        return row

    def stop(self, error: PreemptedError | None = None) -> None:
        """The run ends before its last epoch is over, since the loop was left, or with ``error``.

        A run that is preempted has its checkpoint already, and ``error`` is raised; unless a rank
        has left the loop. Raises ConfigurationError if the weights cannot be written.
        """
        training, state = self.training, self.state
        if error is not None and not self._ask_left(False):
            self._close(is_done=False)
            say(training.session, str(error))
            self.run.leave(RunEnd(str(error), error.exit_code))
            raise error
        state.move_to(state.position)
        training.engine.update.settle()
        problem = self.saver.export()
        self.reports.flush()
        self.saver.save_last()
        # What a script predicts with is the same on all ranks.
        training.engine.update.exchange_weights(is_due=True)
        share_buffers(training.engine.module)
        self._close(is_done=False)
        if problem:
            raise ConfigurationError(problem)
        end = RunEnd(f"left after step {state.position.step}")
        say(training.session, f"Training {end.reason}; the checkpoint is written")
        self.run.leave(end)

    def settle_left(self) -> bool:
        """The script has left its loop: do what is due after its last step, as on other ranks.

        Returns whether the run is to be stopped: not after a step that has failed.
        """
        step = self._step
        if step is None or step.has_failed:
            return False
        try:
            if step.is_taken:
                self.saver.note_last(step.number)
                self.end_step()
            self._settle_steps(is_left=True)
        except PreemptedError:
            # The checkpoint is written, and the script wants no more.
            self._ask_left(True)
        return True

    def _close(self, *, is_done: bool) -> None:
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


def _read_batches(training: Training, state: RunState) -> Generator[Batch | None, None, None]:
    """Yield this rank's batch for each remaining step of the epoch; None if only others have one.

    Shows a bar on rank 0's terminal. An error that ends the run names the step.
    """
    position, rank = state.position, training.session.world.rank
    batches = training.batches.start(position.epoch, position.samples)
    if rank == 0 and rank in training.workers and sys.stderr.isatty():
        from tqdm import tqdm

        what, left = f"Epoch {position.epoch}", training.batches.count(position.samples)
        batches = iter(tqdm(batches, desc=what, total=left, unit="batch", leave=False))
    try:
        yield from batches
    except (UnreadableSampleError, BatchError) as error:
        advice = ""
        if isinstance(error, UnreadableSampleError):
            is_skipped = training.configuration.on_bad_sample == "skip"
            what = "nothing is left of" if is_skipped else "--on-bad-sample skip leaves it out of"
            advice = f"; {what} the batch"
        raise MpiddpError(f"{error}, in step {state.position.step + 1}{advice}") from error
