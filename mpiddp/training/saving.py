"""When a training makes checkpoints, and when it stops because the job is preempted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NoReturn

import torch.distributed as dist

from mpiddp.checkpoints.checkpointer import Checkpointer
from mpiddp.checkpoints.packing import pack
from mpiddp.checkpoints.storage.directory import CheckpointDirectory, Written
from mpiddp.checkpoints.storage.shards import WriteError
from mpiddp.errors import PreemptedError
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.process.step_agreement import PREEMPTED, AgreeingRanks, StepAgreement, Wish
from mpiddp.training.data.seeding import mix_seed, seed_generators
from mpiddp.training.exported_weights import Exports, export_saved, export_trained
from mpiddp.training.options.groups.checkpoints import has_places, parse_interval
from mpiddp.training.preparation import Training
from mpiddp.training.records.metrics import Row
from mpiddp.training.records.run_directory import RunDirectory
from mpiddp.training.resuming import Beginning, describe_resumption, find_directory, make_source
from mpiddp.training.run_output import say
from mpiddp.training.run_state import EpochSums
from mpiddp.training.shared_run import SharedRun

DUE, WRITTEN = "checkpoint", "written"
"""What ranks agree on after a step, beside a preemption: a checkpoint is due, or on the disk."""


def check_model(training: Training) -> None:
    """Raises ConfigurationError if checkpoints cannot hold the model's state."""
    pack({"model": training.engine.module.state_dict()}, is_copied=True)


class Saver:
    """Makes checkpoints between two steps, and ends the run if the job is preempted.

    All ranks call the same methods.
    """

    def __init__(
        self,
        training: Training,
        beginning: Beginning,
        run: SharedRun,
        signals: PreemptionSignals | None,
    ) -> None:
        """Collective. ``signals``: that preempt the job; None if none do."""
        self._training, self._beginning, self._signals = training, beginning, signals
        self._state = run.state
        configuration = training.configuration
        self._interval = parse_interval(configuration.save_every)
        self._every = None if self._interval is None else self._interval.steps
        """Steps between two checkpoints, if steps decide."""
        self._last_time = time.monotonic()
        self._write_seconds = 0.0
        """On rank 0, of the last checkpoint."""
        self._saved: int | None = None
        """The step of the last checkpoint that was begun, unless it could not be written."""
        named = configuration.export
        self._exports = None if named is None else Exports(named)
        self._exported: int | None = None
        """The run's last step, once it is known: `export` writes its weights."""
        self._is_writing = False
        """Whether a checkpoint was begun whose end has not been waited for."""
        position = beginning.position
        self.epoch = EpochSums(training, position)
        """What the training counts, and checkpoints hold."""
        self._rate_step = training.find_rate_step(position.epoch, position.samples)
        parts = training.engine.update.list_parts(self._rate_step)
        directory = self._open_directory(run.opened)
        self._checkpointer = Checkpointer(
            directory,
            training.engine.module,
            parts.pop("optimizer", None),
            tell=self._tell,
            epoch=self.epoch,
            **parts,
        )
        self._agreement = self._make_agreement()

    def _open_directory(self, run: RunDirectory | None) -> CheckpointDirectory:
        beginning, configuration = self._beginning, self._training.configuration
        path = find_directory(configuration, self._state.directory)
        source = make_source(configuration, path, f"attempt-{self._state.attempt}")
        if run is not None:
            source = replace(source, is_current=run.is_current)
        directory, survey = beginning.directory, beginning.survey
        if directory is None:
            directory = CheckpointDirectory(path, beginning.ranks, source, configuration.keep)
            survey = directory.look()
        directory.open(survey, source)
        return directory

    def _make_agreement(self) -> StepAgreement:
        training, world = self._training, self._training.session.world
        session = training.session
        members = AgreeingRanks(world.rank, world.size, session.store, session.timeout)
        wishes: dict[str, Wish] = {}
        if self._interval is not None and world.rank == 0:
            wishes[DUE] = lambda: "the time" if self.is_time() else ""
            wishes[WRITTEN] = lambda: (
                "a checkpoint" if self._is_writing and not self._checkpointer.is_busy else ""
            )
        return StepAgreement(members, wishes, self._signals)

    def restore(self) -> None:
        """Give the training the state to begin with. Collective.

        Raises CheckpointError.
        """
        training, session = self._training, self._training.session
        found, position = self._beginning.found, self._beginning.position
        attempt = self._state.attempt
        if found is None and attempt > 1:
            say(session, f"Attempt {attempt} in {self._state.directory}: starting over")
        if found is not None:
            self._checkpointer.restore(found)
            world = session.world
            if found.manifest.world != world.size:
                # No rank has gone on from another's random state, and none repeats its draws.
                seed = training.configuration.seed
                seed_generators(mix_seed(seed, world.rank, position.step))
            training.engine.update.begin_at(self._rate_step)
            say(session, describe_resumption(found, position, attempt, self._beginning.changed))
            if training.configuration.weights is not None:
                say(session, "The weights are the checkpoint's: --weights is not read again")

    def after_step(self, prepare: Callable[[], object]) -> None:
        """Do what is due; not after an epoch's last step. Raises PreemptedError.

        ``prepare`` is called before a checkpoint is begun.
        """
        due, every = self._agreement.find_due(), self._every
        is_due = every is not None and self._state.position.step % every == 0
        if WRITTEN in due:
            self._finish_write()
        if not (is_due or DUE in due or PREEMPTED in due):
            return
        self._training.settle()
        # The job may be killed once there is a checkpoint, whose steps are not taken again.
        self.epoch.count_time()
        prepare()
        if PREEMPTED in due:
            self._leave(due[PREEMPTED])
        self.write()

    def after_epoch(self) -> None:
        """Do what is due after an epoch that is not the last. Raises PreemptedError."""
        if self._interval is not None and self._is_due_after_epoch():
            self.write()
        due = self._agreement.find_due()
        if PREEMPTED in due:
            self._leave(due[PREEMPTED])

    def _is_due_after_epoch(self) -> bool:
        interval, position = self._interval, self._state.position
        assert interval is not None
        if interval.share is not None:
            is_due = self.is_time() or self._is_cheap(interval.share)
            return self._training.session.broadcast(is_due)
        if interval.epochs is not None:
            return (position.epoch - 1) % interval.epochs == 0
        if interval.steps is not None:
            return position.step % interval.steps == 0
        return self._training.session.broadcast(self.is_time())

    def is_time(self) -> bool:
        """Whether a checkpoint is due by the time; may be asked in any thread."""
        seconds = None if self._interval is None else self._interval.seconds
        return seconds is not None and time.monotonic() - self._last_time >= seconds

    def _is_cheap(self, share: float) -> bool:
        """On rank 0: whether another checkpoint would take at most this share of the time."""
        seconds = time.monotonic() - self._last_time
        return not self._checkpointer.is_busy and self._write_seconds <= share * seconds

    def write(self) -> None:
        """Begin a checkpoint; the training is settled. Collective."""
        self._finish_write()
        self._last_time = time.monotonic()
        position = self._state.position
        score = None if position.row is None else find_score(position.row)
        row = None if position.row is None else asdict(position.row)
        with self._training.engine.united():
            self._checkpointer.save(
                position.step, score=score, epoch=position.epoch, samples=position.samples, row=row
            )
        if self._training.roles is not None:
            # A server's thread must not change what its rank is still copying.
            dist.barrier()
        self._saved, self._is_writing = position.step, True

    def save_last(self) -> None:
        """Make a checkpoint now, unless there is one of this step; the training is settled.

        It is on the disk once the saver is closed.
        """
        if self._saved != self._state.position.step:
            self.write()

    def save_end(self) -> None:
        """After the last epoch: make a checkpoint, unless none are wanted, or no epoch was ended.

        A run that begins where its checkpoint ends has that one.
        """
        begun = self._beginning.position.epoch
        if self._interval is not None and self._state.position.epoch > begun:
            self.save_last()

    def _leave(self, reason: str) -> NoReturn:
        self.save_last()
        self._finish_write(is_last=True)
        step = self._state.position.step
        raise PreemptedError(f"preempted after step {step}: {reason}; the checkpoint is written")

    def _finish_write(self, *, is_last: bool = False) -> None:
        """Wait until what was begun is on the disk. Collective.

        Raises UnwritableError or WriteError if it could not be written and was the last one, or the
        run is to end then.
        """
        self._is_writing = False
        try:
            self._checkpointer.wait()
        except (OSError, WriteError) as error:
            # On all ranks alike. After any other error ranks may be in different places.
            self._saved = None
            if is_last or self._training.configuration.on_save_error == "stop":
                raise
            say(self._training.session, f"mpiddp: {error}, and training goes on")

    def _tell(self, written: Written) -> None:
        self._write_seconds = written.seconds
        say(
            self._training.session,
            f"Checkpoint written: {written.path} ({written.seconds:.2f} s, of which training "
            f"waited {written.staging_seconds:.2f} s)",
        )
        exports = self._exports
        if exports and has_places(exports.named) and written.step != self._exported:
            say(self._training.session, export_saved(written, exports))

    def note_last(self, step: int) -> None:
        """The run ends after this step: `export` writes its weights, no checkpoint's thread."""
        self._exported = step

    def export(self) -> str:
        """Training is over: write the weights for others, if asked for. Collective.

        Returns, on all ranks, why they cannot be written; empty if they are.
        """
        position = self._state.position
        self.note_last(position.step)
        if self._exports is None:
            return ""
        return export_trained(self._training, self._exports, position)

    def abandon(self) -> None:
        """After an error: no step acts on a signal any more. Not collective."""
        self._agreement.stop()

    def close(self) -> None:
        """There are no more steps: wait until the last checkpoint is on the disk. Collective.

        Raises UnwritableError or WriteError if it could not be written.
        """
        self._agreement.close()
        try:
            self._finish_write(is_last=True)
        finally:
            self._checkpointer.close()


def find_score(row: Row) -> float | None:
    """How good the weights are on the test samples; None if they were not evaluated.

    The accuracy; for a task without one, the negative loss. Whether more of another metric is
    better is not known.
    """
    if row.test_loss is None:
        return None
    return (row.test_metrics or {}).get("accuracy", -row.test_loss)
