"""Reads ``metrics.jsonl`` of finished and running runs; without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import convert, decode, read_whole
from mpiddp.options.checks import read_usable

METRICS = "metrics.jsonl"
STAGES = ("read", "transform", "transfer", "forward", "backward", "communication", "update")
"""Of a training step, in their order (`mpiddp.training.step.stages`)."""
STEPS = "steps"
"""The ``kind`` of a row of ``--log-every``; rows of epochs have no kind."""
MOST_BYTES = 1 << 30
"""Of a file: 1 GiB, some millions of rows."""
LARGEST = 1e300
"""What is beyond it, or not a number, cannot be drawn."""


@dataclass(frozen=True)
class Needed:
    """What each row must have, and what is computed with."""

    epoch: int
    step: int
    loss: float | None
    """None for one that is not finite."""
    stages: Mapping[str, float] | None = None


@dataclass(frozen=True)
class History:
    """What a run has reported so far."""

    label: str
    """The run's name, or its path if two runs have one name."""
    rows: tuple[Mapping[str, Any], ...]
    """One per epoch, in their order. If a later attempt went back to an epoch, the rows before it
    have nothing from that epoch on."""
    steps: tuple[Mapping[str, Any], ...] = ()
    """Those of ``--log-every``, in the order of steps."""

    def find_values(self, name: str) -> list[tuple[int, float]]:
        """(epoch, value) of each row that has a number under ``name``."""
        return [(row["epoch"], row[name]) for row in self.rows if _is_number(row.get(name))]

    def find_curve(self, name: str) -> list[tuple[float, float]]:
        """(epochs trained, value) of each row of steps that has numbers there."""
        found = [(row.get("epochs"), row.get(name)) for row in self.steps]
        return [(x, y) for x, y in found if _is_number(x) and _is_number(y)]

    def find_stages(self) -> list[tuple[int, dict[str, float]]]:
        """(epoch, milliseconds of each stage in a step) of each row that has them."""
        found = []
        before = 0
        for row in self.rows:
            steps, before = row["step"] - before, row["step"]
            seconds = row.get("stages")
            if isinstance(seconds, dict) and steps > 0:
                values = {name: 1000 * seconds.get(name, 0.0) / steps for name in STAGES}
                found.append((row["epoch"], values))
        return found


def read_histories(names: Sequence[str], runs_dir: Path = Path("runs")) -> list[History]:
    """Read runs, each named by its directory, or by its name in ``runs_dir``.

    What is no run, has no rows yet, or has a damaged one, is left out with a line. Raises
    ConfigurationError for a run that is missing, and if none is left.
    """
    found = read_usable([_find_run(name, runs_dir) for name in names], _read_run)
    short = [path.resolve().name for path, _ in found]
    return [
        History(label if short.count(label) == 1 else str(path), *rows)
        for (path, rows), label in zip(found, short, strict=True)
    ]


def _find_run(name: str, runs_dir: Path) -> Path:
    places = (Path(name), runs_dir / name)
    path = next((path for path in places if path.is_dir()), places[0])
    if os.path.lexists(path):
        return path
    found = sorted(path.parent.name for path in runs_dir.glob(f"*/{METRICS}"))
    shown = f"{', '.join(found[:8])}{', …' * (len(found) > 8)}" if found else "none"
    raise ConfigurationError(f"no run {name!r}: expected a run directory; in {runs_dir}: {shown}")


def _read_run(run: Path) -> tuple[Path, list[tuple[Mapping[str, Any], ...]]]:
    """With its rows: those of epochs, then those of steps."""
    path = run / METRICS
    try:
        text = read_whole(path, MOST_BYTES)
    except FileNotFoundError:
        text = b""
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except ContentError as error:
        raise ContentError(f"{path}: {error}") from None
    rows: dict[int, Mapping[str, Any]] = {}
    steps: dict[int, Mapping[str, Any]] = {}
    # The last part is empty, or half a row: of a job that is writing it, or was killed then.
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            row = _read_row(line)
        except ContentError as error:
            raise ContentError(f"{path}, line {number}: {error}: remove the line") from None
        # A later attempt may have gone back.
        if is_of_steps(row):
            _take_place(steps, row["step"], row)
        else:
            _take_place(rows, row["epoch"], row)
    if not rows and not steps and any(run.glob(f"*/{METRICS}")):
        raise ConfigurationError(f"{run} is no run, but holds runs: give {run}/*")
    if not rows and not steps:
        raise ConfigurationError(
            f"{path} has no rows: no epoch is finished, or none was trained (an evaluation)"
        )
    return run, [tuple(found.values()) for found in (rows, steps)]


def _take_place(rows: dict[int, Mapping[str, Any]], place: int, row: Mapping[str, Any]) -> None:
    """Add a row after those of earlier places; others are left out."""
    while rows and next(reversed(rows)) >= place:
        rows.popitem()
    rows[place] = row


def is_of_steps(row: Mapping[str, Any]) -> bool:
    return row.get("kind") == STEPS


def parse_row(line: bytes) -> Mapping[str, Any] | None:
    """None for whatever is no row."""
    try:
        return _read_row(line)
    except ContentError:
        return None


def _read_row(line: bytes) -> Mapping[str, Any]:
    """Raises ContentError."""
    row = decode(line, dict[str, Any])
    convert(row, Needed)
    return row


def _is_number(value: object) -> TypeGuard[float]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -LARGEST < value < LARGEST
