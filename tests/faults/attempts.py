"""Making attempts, one record for each, and going on with what is missing.

Records of one commit are lines of JSON in one file, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import launchers
from benchmarks.records.environment import find_processor
from campaign import Campaign, Fault
from laboratory import Laboratory

RESULTS = launchers.ROOT / "build" / "faults"
PARTS = ("mpiddp", "jobs", "tests")
"""Of the checkout, that decide what an attempt shows."""
CHANGED = "-changed"
PROBLEM_CHARACTERS = 4000


@dataclass(frozen=True)
class Finding:
    """What an attempt showed where everything was as it must be."""

    outcome: str
    """How it ended, in a few words that are the same for equal ends."""
    detected: float | None = None
    """Seconds from the fault until the job said so, or began to end."""
    gone: float | None = None
    """Seconds from the fault until no process of the job was left."""
    lost_steps: int | None = None
    """Steps that were made and had to be made again."""


@dataclass(frozen=True)
class Family:
    """The code of one fault."""

    choose: Callable[[Random, int, Mapping[str, Any]], dict[str, Any]]
    """Draws what an attempt does, as values that JSON can hold: dice, number, parameters."""
    attempt: Callable[[Mapping[str, Any], Laboratory, Path], Finding]
    """Does what was drawn, in an empty directory. Raises AssertionError where something is not as
    it must be."""


@dataclass(frozen=True, kw_only=True)
class Record(Finding):
    """What is kept of an attempt."""

    fault: str
    number: int
    choice: dict[str, Any]
    passed: bool
    problem: str
    """Empty, or why it has not passed."""
    seconds: float
    """That the attempt took."""
    load: float
    """Processes that wanted to run on this machine, on average over the last minute."""


def make_attempt(
    campaign: Campaign, family: Family, place: tuple[str, int], laboratory: Laboratory
) -> Record:
    """Make one attempt in a directory of its own; whatever it raises is in the record."""
    fault, number = campaign.faults[place[0]], place[1]
    choice = family.choose(campaign.make_dice(*place), number, fault.parameters)
    began = time.monotonic()
    finding, problem = Finding("failed"), ""
    with tempfile.TemporaryDirectory(prefix="mpiddp-fault-", dir="/tmp") as folder:
        # Jobs of other users look into it.
        os.chmod(folder, 0o755)
        try:
            finding = family.attempt(choice, laboratory, Path(folder))
            problem = find_excess(finding, fault)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}\n"
            problem += "".join(traceback.format_tb(error.__traceback__))
            problem += str(error)[-PROBLEM_CHARACTERS:]
    return Record(
        fault=fault.name,
        number=number,
        choice=choice,
        passed=not problem,
        problem=problem,
        **asdict(finding),
        seconds=round(time.monotonic() - began, 2),
        load=round(os.getloadavg()[0], 2),
    )


def find_excess(finding: Finding, fault: Fault) -> str:
    """Which measured value is above its limit; empty where none is."""
    found = ((name, getattr(finding, name), limit) for name, limit in fault.limits.items())
    return "; ".join(
        f"{name}: expected at most {limit:g}, found {value:.3g}"
        for name, value, limit in found
        if value is not None and value > limit
    )


class ResultFile:
    """The records of one commit."""

    def __init__(self, path: Path) -> None:
        """What was made with changed files may not be made again: it begins anew."""
        self.path = path
        self._lock = threading.Lock()
        if path.stem.endswith(CHANGED):
            path.unlink(missing_ok=True)

    def read(self) -> list[Record]:
        """All whole lines; some may have been cut off."""
        records = []
        for line in self.path.read_text("utf-8").splitlines() if self.path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                records.append(Record(**json.loads(line)))
        return records

    def append(self, record: Record) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # What was cut off before ends here.
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(asdict(record))}\n")


def find_missing(
    wanted: Iterable[tuple[str, int]], records: Iterable[Record]
) -> list[tuple[str, int]]:
    made = {(record.fault, record.number) for record in records}
    return [place for place in wanted if place not in made]


def run_all(places: Iterable[tuple[str, int]], jobs: int, make: Callable[[Any], object]) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(make, places):
            pass  # Raises what it raised; those that have not begun are left out.


def find_commit() -> str:
    """The checkout's commit; whether something was changed since then."""

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=launchers.ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = ask("rev-parse", "--short=12", "HEAD") or "no-commit"
    return commit + CHANGED * bool(ask("status", "--porcelain", "--", *PARTS))


def describe_machine() -> str:
    release = ".".join(platform.release().split(".")[:2])
    return f"{len(os.sched_getaffinity(0))} cores of {find_processor()}, Linux {release}"
