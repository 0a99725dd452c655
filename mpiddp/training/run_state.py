"""Where a run stands, and how it has ended.

The order of samples depends on seed, epoch and position alone, and the learning rate on the step.
So a position, and what checkpoints hold beside the model, are all that a run's future depends on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.errors import SUCCESS, CheckpointError
from mpiddp.training.preparation import Training
from mpiddp.training.records.metrics import Row, Totals
from mpiddp.training.step.stages import Costs, StepStage


class Position(NamedTuple):
    """Between two steps; the same on all ranks after the same step."""

    epoch: int = 1
    """The one that the next step belongs to, counted from 1."""
    samples: int = 0
    """Of the epoch, that all ranks together have trained on."""
    step: int = 0
    """Steps taken so far."""
    row: Row | None = None
    """Of the last epoch, if the next one has not begun."""

    @property
    def last_epoch(self) -> int:
        """The one that the last step belonged to; 0 if there was none."""
        return self.epoch if self.samples else self.epoch - 1


@dataclass(frozen=True)
class RunEnd:
    """How a run has ended: it is done, or has stopped for a reason."""

    reason: str
    """For ``outcome.json``."""
    code: int = SUCCESS


DONE = RunEnd("done")


class RunState:
    """One rank's run. The trainer's loop alone moves it on (`mpiddp.training.trainer.Loop`); the
    saver and the failure handler read it."""

    def __init__(
        self, directory: Path, attempt: int, tell_step: Callable[[int | None], object]
    ) -> None:
        """``attempt``: of the run, counted from 1. ``tell_step``: is given `step` if it changes."""
        self.directory, self.attempt = directory, attempt
        self.position = Position()
        """Of the next step; of the one under way, if there is one."""
        self.step_under_way: int | None = None
        """The step that is being made, from 1; None between steps."""
        self._tell_step = tell_step

    @property
    def step(self) -> int | None:
        """Steps taken so far; None for none. May be read in any thread."""
        return self.position.step or None

    def move_to(self, position: Position) -> None:
        """No step is under way."""
        self.step_under_way, self.position = None, position
        self._tell_step(self.step)

    def begin_step(self) -> int:
        """Returns the step's number."""
        self.step_under_way = self.position.step + 1
        return self.step_under_way

    def end_step(self, samples: int) -> None:
        """All ranks together have trained on so many more."""
        epoch, before, step, _ = self.position
        self.move_to(Position(epoch, before + samples, step + 1))


class EpochSums:
    """The sums of the epoch so far, of one rank; a part of checkpoints."""

    def __init__(self, training: Training, position: Position) -> None:
        """``position``: where training begins."""
        self._training, self._position = training, position
        self._start = time.perf_counter()
        self.clear()

    def clear(self) -> None:
        """Another epoch begins."""
        self.totals = Totals(self._training.session.device, self._training.task.metrics)
        self.costs = Costs()
        self.seconds = 0.0
        """Since the epoch began, without the time between two attempts."""

    def begin_time(self) -> None:
        """From now on time counts."""
        self._start = time.perf_counter() - self.seconds

    def count_time(self) -> None:
        """Count the time until now."""
        self.seconds = time.perf_counter() - self._start

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": self.totals.sums,
            "metrics": list(self._training.task.metrics),
            "seconds": self.seconds,
            "costs": asdict(self.costs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._check_metrics(state):
            self.totals.load(state["sums"])
        self.seconds, self.costs = state["seconds"], Costs(**state["costs"])
        if len(self.costs.seconds) < len(StepStage):  # It was written before TRANSFORM existed.
            self.costs.seconds.insert(StepStage.TRANSFORM, 0.0)

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Another number of ranks: rank 0 goes on with the sums of all."""
        if self._training.session.world.rank == 0:
            total = sum(each["sums"] for each in states)
            self.load_state_dict({**states[0], "sums": total})

    def _check_metrics(self, state: Mapping[str, Any]) -> bool:
        """Whether the sums are of the task's metrics.

        Between two epochs they may be of others. Raises CheckpointError if they must not.
        """
        expected, metrics = list(self._training.task.metrics), state["metrics"]
        if metrics == expected:
            return True
        if self._position.samples == 0:
            return False
        raise CheckpointError(
            f"the checkpoint is within epoch {self._position.epoch}, of which it has sums for the "
            f"metrics {', '.join(metrics) or 'none'}, but the task has "
            f"{', '.join(expected) or 'none'}: change metrics at the end of an epoch, or start "
            "over with --resume never"
        )
