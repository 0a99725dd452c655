"""When a training makes checkpoints, and from which one it goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from mpiddp.errors import CheckpointError, ConfigurationError, MpiddpError
from mpiddp.launch.launcher.hostnames import count_noun
from mpiddp.launch.session import Session
from mpiddp.training.checkpoint import (
    CheckpointDirectory,
    Found,
    Source,
    Survey,
    Written,
    find_demanded,
    find_newest,
)
from mpiddp.training.config import Configuration
from mpiddp.training.metrics import Row
from mpiddp.training.packing import pack
from mpiddp.training.preparation import Training
from mpiddp.training.ranks import Ranks
from mpiddp.training.run_directory import CHECKPOINTS, RunDirectory, find_path
from mpiddp.training.save_interval import NEVER, parse_interval
from mpiddp.training.shards import WriteError
from mpiddp.training.training_state import (
    EpochTotals,
    Position,
    Restored,
    capture,
    check_fit,
    keep_measured,
    name_values,
    read_position,
    restore,
)

AUTO = "auto"
MEETING_SECONDS = 1.0
"""Between two agreements of all ranks."""


@dataclass(frozen=True)
class Plan:
    """What was found before training begins."""

    ranks: Ranks
    survey: Survey
    configuration: Configuration
    """With what was chosen by measurement when the checkpoint's run began."""
    changed: list[str]
    """Options that were others then, and decide the result."""
    position: Position
    """Where training begins."""


def look_for_checkpoint(configuration: Configuration, session: Session) -> Plan:
    """Find the checkpoint to go on from; collective, and nothing is changed.

    Raises CheckpointError where there are checkpoints, but none can be used, and ConfigurationError
    where no epoch is left.
    """
    ranks = Ranks()
    survey = _find(configuration, session, ranks)
    found, changed, position = survey.newest, list[str](), Position()
    if found is not None:
        configuration = keep_measured(configuration, found.manifest.configuration)
        changed = check_fit(found, name_values(configuration))
        position = read_position(found)
        _check_epochs(configuration.epochs, found, position)
    return Plan(ranks, survey, configuration, changed, position)


def _check_epochs(epochs: int, found: Found, position: Position) -> None:
    """Raises ConfigurationError where there is nothing left to do, and nothing to report."""
    if position.epoch > epochs and position.row is None:
        raise ConfigurationError(
            f"epochs: expected {position.epoch} or more, since the checkpoint {found.path} is "
            f"within epoch {position.epoch}, found {epochs}"
        )


def _find(configuration: Configuration, session: Session, ranks: Ranks) -> Survey:
    if configuration.resume == NEVER:
        return Survey(None)
    if configuration.resume != AUTO:
        return find_demanded(Path(configuration.resume), ranks)
    directory = session.broadcast(_find_directory(configuration, find_path(configuration)))
    return Survey(None) if directory is None else find_newest(directory, ranks)


def _find_directory(configuration: Configuration, run: Path | None) -> Path | None:
    if configuration.checkpoint_dir is not None:
        return configuration.checkpoint_dir
    return None if run is None else run / CHECKPOINTS


def check_model(training: Training) -> None:
    """Raises ConfigurationError where checkpoints cannot hold the model's state."""
    if training.configuration.save_every != NEVER:
        pack({"model": training.engine.module.state_dict()})


class StepAgreement:
    """Lets all ranks act after the same step on what one of them alone knows.

    They meet about once in MEETING_SECONDS, not in each step: rank 0 says after how many steps.
    """

    def __init__(self, device: torch.device, step: int) -> None:
        """``step``: the one that the training begins after."""
        self._device = device
        self._last, self._next = step, step + 1
        self._time = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether the ranks meet after this step: the same answer on all."""
        return step >= self._next

    def meet(self, step: int, wishes: list[bool]) -> list[bool]:
        """Which of the wishes any rank has. Collective, where it is due."""
        now = time.monotonic()
        per_step = (now - self._time) / max(1, step - self._last)
        pause = max(1, min(2 * (step - self._last), round(MEETING_SECONDS / max(per_step, 1e-6))))
        mine = pause if dist.get_rank() == 0 else 0
        values = torch.tensor([*wishes, mine], dtype=torch.int64, device=self._device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        *found, pause = values.tolist()
        self._last, self._next, self._time = step, step + pause, now
        return [bool(each) for each in found]


class Saver:
    """Makes a training's checkpoints. All ranks call the same methods."""

    def __init__(self, training: Training, plan: Plan, run: RunDirectory | None) -> None:
        """``run``: on rank 0. Collective."""
        self._training = training
        self._ranks = plan.ranks
        self._plan = plan
        configuration = training.configuration
        handler = training.failure_handler
        path = _find_directory(configuration, handler.run_directory)
        assert path is not None
        source = Source(f"attempt-{handler.attempt}", name_values(configuration))
        if run is not None:
            source = replace(source, is_current=run.is_current)
        self.directory = CheckpointDirectory(path, plan.ranks, source, configuration.keep)
        self._interval = parse_interval(configuration.save_every)
        self._last_time = time.monotonic()
        self._saved: int | None = None
        """The step of the last checkpoint that was begun, unless it could not be written."""
        self._agreement: StepAgreement | None = None
        self.directory.open(plan.survey)

    def restore(self) -> Restored:
        """The state to begin with; the training has it. Collective.

        Raises CheckpointError.
        """
        found = self._plan.survey.newest
        if found is None:
            restored = Restored(self._plan.position, EpochTotals.make(self._training))
        else:
            restored = self._load(found)
            attempt = self._training.failure_handler.attempt
            self._say(describe_resumption(found, restored, attempt, self._plan.changed))
        # Workers that may be apart would wait for each other only to agree.
        if self._interval is not None and self._training.is_in_step:
            step = restored.position.step
            self._agreement = StepAgreement(self._training.session.device, step)
        return restored

    def _load(self, found: Found) -> Restored:
        restored, problem = None, None
        try:
            restored = restore(self._training, found, self._plan.position)
        except CheckpointError as error:
            problem = str(error)
        problems = [each for each in self._ranks.gather(problem) if each]
        if problems:
            raise CheckpointError(problems[0])
        assert restored is not None
        return restored

    def after_step(self, position: Position, epoch: EpochTotals) -> None:
        """Make a checkpoint if one is due; not after an epoch's last step."""
        if self._interval is None:
            return
        steps = self._interval.steps
        is_due = steps is not None and position.step % steps == 0
        if self._agreement is not None and self._agreement.is_due(position.step):
            wishes = [self.is_time(), self.directory.is_busy]
            is_time, is_busy = self._agreement.meet(position.step, wishes)
            is_due |= is_time
            if not is_busy:
                self._finish_write()
        if is_due:
            self._training.settle()
            self.write(position, epoch)

    def count_steps(self, step: int) -> int | None:
        """How many steps after ``step`` a checkpoint is due; None where steps do not decide it."""
        if self._interval is None or self._interval.steps is None:
            return None
        return self._interval.steps - step % self._interval.steps

    def save(self, position: Position, epoch: EpochTotals) -> None:
        """Make a checkpoint now, unless there is one of this step already; the training is settled.

        It is on the disk then. Raises MpiddpError where it could not be written.
        """
        if self._saved != position.step:
            self.write(position, epoch)
        self._finish_write(is_last=True)

    def after_epoch(self, position: Position, *, is_last: bool) -> None:
        """Make a checkpoint if one is due: ``position`` is where the next epoch begins."""
        interval = self._interval
        if interval is None:
            return
        is_due = is_last
        if interval.epochs is not None:
            is_due |= (position.epoch - 1) % interval.epochs == 0
        elif interval.steps is not None:
            is_due |= position.step % interval.steps == 0
        elif not is_last:
            is_due = self._training.session.broadcast(self.is_time())
        if is_due:
            self.write(position, EpochTotals.make(self._training))

    def is_time(self) -> bool:
        """Whether a checkpoint is due by the time; may be asked in any thread."""
        seconds = None if self._interval is None else self._interval.seconds
        return seconds is not None and time.monotonic() - self._last_time >= seconds

    def write(self, position: Position, epoch: EpochTotals) -> None:
        """Begin a checkpoint; the training is settled. Collective."""
        score = None if position.row is None else find_score(position.row)
        self._last_time = time.monotonic()
        tensors = capture(self._training, position, epoch)
        self._finish_write()
        self.directory.start(position.step, tensors, score, self._tell)
        if self._training.roles is not None:
            # A server's thread must not change what its rank is still copying.
            dist.barrier()
        self._saved = position.step

    def _finish_write(self, *, is_last: bool = False) -> None:
        """Wait until what was begun is on the disk. Collective.

        Raises MpiddpError where it could not be written, unless training is to go on: not after
        the last one, since nothing would be left of the steps since the one before.
        """
        try:
            self.directory.wait()
        except (OSError, WriteError) as error:
            # On all ranks alike. After any other error ranks may be in different places.
            self._saved = None
            reason = error.reason if isinstance(error, WriteError) else error.strerror or error
            text = (
                f"a checkpoint in {self.directory.path} could not be written: {reason}; the older "
                "ones are as they were"
            )
            if is_last or self._training.configuration.on_save_error == "stop":
                raise MpiddpError(text) from None
            self._say(f"mpiddp: {text}, and training goes on")

    def _tell(self, written: Written) -> None:
        self._say(
            f"Checkpoint written: {written.path} ({written.seconds:.2f} s, of which training "
            f"waited {written.staging_seconds:.2f} s)"
        )

    def close(self) -> None:
        """Wait until the last checkpoint is on the disk. Collective."""
        self._finish_write(is_last=True)
        self._ranks.close()

    def _say(self, line: str) -> None:
        if self._training.session.world.rank == 0:
            print(line, flush=True)


def find_score(row: Row) -> float | None:
    """How good the weights are, by the test samples; None where they were not evaluated.

    The accuracy, or for a task without one the loss, negative: of other metrics nobody knows
    whether more is better.
    """
    if row.test_loss is None:
        return None
    return (row.test_metrics or {}).get("accuracy", -row.test_loss)


def describe_resumption(
    found: Found, restored: Restored, attempt: int, changed: Sequence[str]
) -> str:
    """The console's line."""
    position = restored.position
    since = f"; changed since then: {', '.join(changed)}" if changed else ""
    return (
        f"Resumed from {found.path}: step {position.step}, epoch {position.epoch}, "
        f"attempt {attempt}, written by {count_noun(found.manifest.world, 'rank')}{since}"
    )
