"""Where a run stands between two steps, and what its future depends on beside the model.

The learning rate is a function of the step, and the order of samples one of seed, epoch and
position.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mpiddp.checkpoints.state import read_values
from mpiddp.checkpoints.storage.finding import Found
from mpiddp.errors import CheckpointError
from mpiddp.files import decode
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.data import AUTO_BATCH
from mpiddp.training.options.groups.effects import FIXED, FREE, list_options
from mpiddp.training.options.groups.synchronisation import PARAMETER_SERVER
from mpiddp.training.preparation import Training
from mpiddp.training.records.metrics import Row, Totals
from mpiddp.training.step.stages import Costs, Stage


@dataclass(frozen=True)
class Position:
    """Between two steps."""

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


def name_values(configuration: Any) -> dict[str, Any]:
    """The options, as JSON can hold them."""
    return decode(json.dumps(asdict(configuration), default=str), dict[str, Any])


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
        if len(self.costs.seconds) < len(Stage):  # It was written before there was TRANSFORM.
            self.costs.seconds.insert(Stage.TRANSFORM, 0.0)

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


def read_position(found: Found) -> Position:
    """How far the run was. Not collective. Raises CheckpointError, or OSError."""
    try:
        values = read_values(found)["given"]
        row = values.pop("row")
        return Position(**values, row=None if row is None else Row(**row))
    except OSError:
        raise  # It says nothing about the checkpoint.
    except Exception as error:  # Whatever names and contents lead to.
        raise CheckpointError(
            f"the checkpoint {found.path} is not one of a training of mpiddp.train: {error}"
        ) from error


def check_fit(found: Found, values: Mapping[str, Any]) -> list[str]:
    """Options that differ from the checkpoint's, if it can be used none the less.

    Raises CheckpointError if it cannot.
    """
    before = found.manifest.configuration
    changed = list_changed(before, values)
    fixed = {*list_options(Configuration, FIXED), *_list_server_options(before, values)}
    if refused := [name for name in changed if name in fixed]:
        listed = describe_changes(refused, before, values)
        raise CheckpointError(
            f"the checkpoint {found.path} is of another training ({listed}): choose another "
            "--name or --checkpoint-dir, or start over with --resume never"
        )
    return changed


def _list_server_options(before: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Options that must stay, since parameter servers hold the optimizer's state in parts."""
    are_serving = [each.get("sync") == PARAMETER_SERVER for each in (before, values)]
    if not any(are_serving):
        return []
    return ["servers"] if all(are_serving) else ["sync"]


def describe_changes(
    names: Iterable[str], before: Mapping[str, Any], values: Mapping[str, Any]
) -> str:
    """The values of these options ``before`` and now, for a message."""
    return ", ".join(f"{name} {before.get(name)!r}, now {values[name]!r}" for name in names)


def list_deciding() -> list[str]:
    """The options that decide the result."""
    free = set(list_options(Configuration, FREE))
    return [each.name for each in fields(Configuration) if each.name not in free]


def list_changed(before: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """The options that decide the result, and are others now than ``before``."""
    return [name for name in list_deciding() if values[name] != before.get(name)]


def keep_measured(configuration: Configuration, before: Mapping[str, Any]) -> Configuration:
    """The configuration with what was chosen by measurement ``before``, if it is still open."""
    known = {name: before[name] for name in list_open(configuration) if name in before}
    return replace(configuration, **known)


def list_open(configuration: Configuration) -> list[str]:
    """The options that are to be chosen by measurement."""
    return [name for name, word in MEASURED.items() if getattr(configuration, name) == word]


MEASURED = {"overlap": "auto", "batch_size": AUTO_BATCH}
