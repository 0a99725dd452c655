"""When a training makes checkpoints and stops for others, and from which one it goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from mpiddp import environment
from mpiddp.checkpoints.checkpointer import Checkpointer
from mpiddp.checkpoints.packing import pack
from mpiddp.checkpoints.storage.directory import CheckpointDirectory, Source, Written
from mpiddp.checkpoints.storage.finding import Found, Survey, find_valid, read_together
from mpiddp.checkpoints.storage.manifest import CHECKPOINTS
from mpiddp.checkpoints.storage.ranks import Ranks
from mpiddp.checkpoints.storage.shards import WriteError
from mpiddp.errors import ConfigurationError, PreemptedError
from mpiddp.launch.session import Session
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.process.step_agreement import PREEMPTED, AgreeingRanks, StepAgreement, Wish
from mpiddp.training.data.seeding import mix_seed, seed_generators
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.checkpoints import AUTO, NEVER, has_places, parse_interval
from mpiddp.training.preparation import Training
from mpiddp.training.records.metrics import Row
from mpiddp.training.records.run_directory import RunDirectory, find_path
from mpiddp.training.reports import say
from mpiddp.training.training_state import (
    EpochSums,
    Position,
    check_fit,
    describe_changes,
    keep_measured,
    list_deciding,
    list_open,
    name_values,
    read_position,
)
from mpiddp.training.weights import Exports, export_saved, export_trained
from mpiddp.wording import count_noun

DUE, WRITTEN = "checkpoint", "written"
"""What all ranks may do after a step, beside being preempted."""
ADVICE = "choose another --checkpoint-dir, or begin from it with --resume {path}"


@dataclass(frozen=True)
class Beginning:
    """What was found before training begins."""

    ranks: Ranks
    directory: CheckpointDirectory | None
    """Of the run, if its name is known already."""
    survey: Survey | None
    """What is in the directory; None if nobody has looked."""
    found: Found | None
    """The checkpoint to go on from."""
    configuration: Configuration
    """With what was chosen by measurement when the checkpoint's run began."""
    changed: list[str]
    """Options that were others then, and decide the result."""
    position: Position
    """Where training begins."""

    @property
    def taken(self) -> int | None:
        """Samples of its first epoch that were trained on before; None if the run is new."""
        return None if self.found is None else self.position.samples


def look_for_checkpoint(configuration: Configuration, session: Session) -> Beginning:
    """Find the checkpoint to go on from; collective.

    The directory is locked from now on, so that nobody adds to it; nothing else is changed.

    Raises CheckpointError if there are checkpoints, but none can be used, StorageError if one
    cannot be read now, and ConfigurationError if the directory is another run's or no epoch is
    left.
    """
    ranks, directory, survey = Ranks(), None, None
    path = session.broadcast(_find_directory(configuration, find_path(configuration)))
    if path is not None:
        source = _make_source(configuration, path, "")
        directory = CheckpointDirectory(path, ranks, source, configuration.keep)
        if configuration.resume != NEVER or environment.is_restarted():
            survey = directory.look()
    found = _choose(configuration, ranks, directory, survey)
    changed, position = list[str](), Position()
    if found is not None:
        configuration = keep_measured(configuration, found.manifest.configuration)
        values = name_values(configuration)
        changed = check_fit(found, values)
        position = read_together(found, ranks, partial(read_position, found))
        if position.epoch > configuration.epochs:
            _check_end(values, found, position, changed)
    return Beginning(ranks, directory, survey, found, configuration, changed, position)


def _choose(
    configuration: Configuration,
    ranks: Ranks,
    directory: CheckpointDirectory | None,
    survey: Survey | None,
) -> Found | None:
    """The demanded checkpoint if the run begins there, the run's newest one if it goes on.

    Only a job's first attempt starts over, or goes on from an older checkpoint of its own. Later
    attempts go on from what this job has saved.
    """
    newest = None if survey is None else survey.newest
    if configuration.resume == AUTO or (newest is not None and _is_this_jobs(newest)):
        return newest
    if configuration.resume == NEVER:
        return None
    demanded = Path(configuration.resume)
    is_own = directory is not None and demanded.resolve().parent == directory.path.resolve()
    if newest is not None and not is_own:
        return newest
    return find_valid(demanded, ranks)[0]


def _is_this_jobs(found: Found) -> bool:
    """Whether this is a later attempt of the job that wrote it."""
    if not environment.is_restarted():
        return False  # The script itself has trained this run before, and asks for another start.
    front = os.environ.get(environment.JOB_DIRECTORY)
    if front and found.manifest.front == front:
        return True
    job = environment.job_identity(os.environ)
    is_requeued = environment.read_count(environment.SLURM_RESTART_COUNT) > 0
    return is_requeued and job is not None and found.manifest.job == job


def _find_directory(configuration: Configuration, run: Path | None) -> Path | None:
    if configuration.checkpoint_dir is not None:
        return configuration.checkpoint_dir
    return None if run is None else run / CHECKPOINTS


def _make_source(configuration: Configuration, path: Path, attempt: str) -> Source:
    """Whose checkpoints they are: the run's by its name, else those with equal options."""
    is_within_run = configuration.checkpoint_dir is None
    values, open_ones = name_values(configuration), list_open(configuration)
    return Source(
        run=path.parent.name if is_within_run else configuration.name,
        attempt=attempt,
        configuration=values,
        identity={name: values[name] for name in list_deciding() if name not in open_ones},
        advice=ADVICE,
        options=("--keep", "--checkpoint-dir"),
        replaces=configuration.resume == NEVER,
    )


def _check_end(
    values: Mapping[str, Any], found: Found, position: Position, changed: Sequence[str]
) -> None:
    """There is nothing left to train: raise ConfigurationError if there is nothing to report.

    What was trained with other options is not these options' result.
    """
    if position.row is None:
        raise ConfigurationError(
            f"epochs: expected {position.epoch} or more, since the checkpoint {found.path} is "
            f"within epoch {position.epoch}, found {values['epochs']}"
        )
    others = [name for name in changed if name != "epochs"]
    if others:
        listed = describe_changes(others, found.manifest.configuration, values)
        raise ConfigurationError(
            f"the checkpoint {found.path} ends a training with other options ({listed}), and no "
            f"epoch is left: choose another --name or --checkpoint-dir, or more than "
            f"{position.epoch - 1} --epochs"
        )


def check_model(training: Training) -> None:
    """Raises ConfigurationError if checkpoints cannot hold the model's state."""
    pack({"model": training.engine.module.state_dict()}, is_copied=True)


class SteppedRun(Protocol):
    """What is asked of a run if a checkpoint is due after a step."""

    @property
    def position(self) -> Position:
        """After the step."""

    def prepare_checkpoint(self) -> None:
        """Called before a checkpoint is begun."""


class Saver:
    """What all ranks do between two steps: make checkpoints, and leave when they are asked to.

    All ranks call the same methods.
    """

    def __init__(
        self,
        training: Training,
        beginning: Beginning,
        run: RunDirectory | None,
        signals: PreemptionSignals | None,
    ) -> None:
        """Collective. ``run``: on rank 0. ``signals``: that preempt the job; None if none do."""
        self._training, self._beginning, self._signals = training, beginning, signals
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
        """The step whose weights were written for others, once training is over."""
        self._is_writing = False
        """Whether a checkpoint was begun and nobody has asked yet how that ended."""
        position = beginning.position
        self.epoch = EpochSums(training, position)
        """What the training counts, and checkpoints hold."""
        self._rate_step = training.find_rate_step(position.epoch, position.samples)
        parts = training.engine.update.list_parts(self._rate_step)
        directory = self._open_directory(run)
        self._checkpointer = Checkpointer(
            directory,
            training.engine.module,
            parts.pop("optimizer", None),
            tell=self._tell,
            epoch=self.epoch,
            **parts,
        )
        self._agreement = self._make_agreement()
        training.engine.update.pause_when(self.is_pause_due)

    def _open_directory(self, run: RunDirectory | None) -> CheckpointDirectory:
        beginning, configuration = self._beginning, self._training.configuration
        handler = self._training.failure_handler
        path = _find_directory(configuration, handler.run_directory)
        assert path is not None
        source = _make_source(configuration, path, f"attempt-{handler.attempt}")
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
        # Workers without a bound do not pass the same places: they pause by their server's word.
        has_places = self._interval is not None and not training.batches.is_shared
        if has_places and world.rank == 0:
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
        attempt = training.failure_handler.attempt
        if found is None and attempt > 1:
            path = training.failure_handler.run_directory
            say(session, f"Attempt {attempt} in {path}: starting over")
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

    def after_step(self, step: int, run: SteppedRun) -> None:
        """Do what is due; not after an epoch's last step. Raises PreemptedError."""
        due, every = self._agreement.find_due(), self._every
        is_due = every is not None and step % every == 0
        if WRITTEN in due:
            self._finish_write()
        if not (is_due or DUE in due or PREEMPTED in due):
            return
        self._training.settle()
        # Once there is a checkpoint, the job may be killed, and nobody takes its steps again.
        run.prepare_checkpoint()
        if PREEMPTED in due:
            self._leave(due[PREEMPTED], run.position)
        self.write(run.position)

    def is_pause_due(self) -> bool:
        """Whether workers that share out batches are to pause; asked in a server's thread."""
        return self.is_time() or (self._signals is not None and self._agreement.is_next(PREEMPTED))

    def after_pause(self, position: Position) -> None:
        """Such workers have paused within an epoch: make a checkpoint. Raises PreemptedError."""
        due = self._agreement.find_due()
        if PREEMPTED in due:
            self._leave(due[PREEMPTED], position)
        self.write(position)

    def after_epoch(self, position: Position) -> None:
        """Do what is due after an epoch that is not the last; ``position``: of the next one.

        Raises PreemptedError.
        """
        if self._interval is not None and self._is_due_after_epoch(position):
            self.write(position)
        due = self._agreement.find_due()
        if PREEMPTED in due:
            self._leave(due[PREEMPTED], position)

    def _is_due_after_epoch(self, position: Position) -> bool:
        interval = self._interval
        assert interval is not None
        if interval.share is not None:
            is_due = self.is_time() or self._is_cheap(interval.share)
            return self._training.session.broadcast(is_due)
        if interval.epochs is not None:
            return (position.epoch - 1) % interval.epochs == 0
        if interval.steps is not None:
            return position.step % interval.steps == 0
        return self._training.session.broadcast(self.is_time())

    def count_steps(self, step: int) -> int | None:
        """How many steps after ``step`` a checkpoint is due; None if steps do not decide it."""
        return None if self._every is None else self._every - step % self._every

    def is_time(self) -> bool:
        """Whether a checkpoint is due by the time; may be asked in any thread."""
        seconds = None if self._interval is None else self._interval.seconds
        return seconds is not None and time.monotonic() - self._last_time >= seconds

    def _is_cheap(self, share: float) -> bool:
        """On rank 0: whether another checkpoint would take at most this share of the time."""
        seconds = time.monotonic() - self._last_time
        return not self._checkpointer.is_busy and self._write_seconds <= share * seconds

    def write(self, position: Position) -> None:
        """Begin a checkpoint; the training is settled. Collective."""
        self._finish_write()
        self._last_time = time.monotonic()
        score = None if position.row is None else find_score(position.row)
        values = asdict(position)
        with self._training.engine.united():
            self._checkpointer.save(values.pop("step"), score=score, **values)
        if self._training.roles is not None:
            # A server's thread must not change what its rank is still copying.
            dist.barrier()
        self._saved, self._is_writing = position.step, True

    def save_last(self, position: Position) -> None:
        """Make a checkpoint now, unless there is one of this step; the training is settled.

        It is on the disk once the saver is closed.
        """
        if self._saved != position.step:
            self.write(position)

    def save_end(self, position: Position) -> None:
        """After the last epoch: make a checkpoint, unless none are wanted, or nothing was trained.

        A run that begins where its checkpoint ends has that one.
        """
        if self._interval is not None and position.step > self._beginning.position.step:
            self.save_last(position)

    def _leave(self, reason: str, position: Position) -> NoReturn:
        self.save_last(position)
        self._finish_write(is_last=True)
        raise PreemptedError(
            f"preempted after step {position.step}: {reason}; the checkpoint is written"
        )

    def _finish_write(self, *, is_last: bool = False) -> None:
        """Wait until what was begun is on the disk. Collective.

        Raises UnwritableError or WriteError if it could not be written, unless training is to go
        on: not after the last one, since nothing would be left of the steps since the one before.
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

    def export(self, position: Position) -> str:
        """Training is over: write the weights for others, if asked for. Collective.

        Returns, on all ranks, why they cannot be written; empty if they are.
        """
        self._exported = position.step
        if self._exports is None:
            return ""
        return export_trained(self._training, self._exports, position)

    def pass_no_more(self) -> None:
        """There are no more steps: other ranks do not wait for this one's answers. Collective."""
        self._agreement.close()

    def abandon(self) -> None:
        """After an error: signals end the process again. Not collective; may be called twice."""
        self._agreement.stop()

    def close(self) -> None:
        """Wait until the last checkpoint is on the disk. Collective. Raises as `wait`."""
        try:
            self._finish_write(is_last=True)
        finally:
            self._checkpointer.close()


def find_score(row: Row) -> float | None:
    """How good the weights are, by the test samples; None if they were not evaluated.

    The accuracy, or for a task without one the loss, negative: of other metrics nobody knows
    whether more is better.
    """
    if row.test_loss is None:
        return None
    return (row.test_metrics or {}).get("accuracy", -row.test_loss)


def describe_resumption(
    found: Found, position: Position, attempt: int, changed: Sequence[str]
) -> str:
    """The console's line."""
    since = f"; changed since then: {', '.join(changed)}" if changed else ""
    return (
        f"Resumed from {found.path}: step {position.step}, epoch {position.epoch}, "
        f"attempt {attempt}, written by {count_noun(found.manifest.world, 'rank')}{since}"
    )
