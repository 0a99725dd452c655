"""The campaign, making its attempts, and one record for each.

``campaign.toml`` holds a seed, and for each fault the number of attempts, limits and parameters.
What attempt i of a fault does is drawn from the seed, the fault's name and i alone: it is the same
in each run, whatever else is run. Records of one commit are lines of JSON in one file, so that a
run that was interrupted goes on.
"""

import contextlib
import json
import math
import os
import random
import subprocess
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import launchers
from laboratory import Laboratory

CAMPAIGN = Path(__file__).with_name("campaign.toml")
RESULTS = launchers.ROOT / "build" / "faults"
PARTS = ("mpiddp", "jobs", "tests")
"""Of the checkout, that decide what an attempt shows."""
CHANGED = "-changed"
PROBLEM_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    title: str
    attempts: int
    seconds: float
    """That one attempt takes, about, on two quiet cores."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the fault's choices are drawn from."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """The most that a measured value may be, by the value's name in `Finding`."""


@dataclass(frozen=True)
class Campaign:
    seed: int
    faults: Mapping[str, Fault]

    def make_dice(self, fault: str, number: int) -> random.Random:
        return random.Random(f"{self.seed}:{fault}:{number}")

    def choose(self, only: list[str], fraction: float) -> list[tuple[str, int]]:
        """Faults and numbers of the attempts to make, each fault's first ones.

        ``only``: names of faults; empty for all. ``fraction``: of each one's attempts, rounded up.
        """
        return [
            (fault.name, number)
            for fault in self.faults.values()
            if not only or fault.name in only
            for number in range(math.ceil(fraction * fault.attempts))
        ]

    def parse_place(self, text: str) -> tuple[str, int]:
        """Fault and number of ``FAULT:NUMBER``. Raises ValueError."""
        name, _, number = text.partition(":")
        if name not in self.faults or int(number) not in range(self.faults[name].attempts):
            raise ValueError(text)
        return name, int(number)


def read_campaign() -> Campaign:
    values = tomllib.loads(CAMPAIGN.read_text(encoding="utf-8"))
    faults = {name: Fault(name=name, **given) for name, given in values["faults"].items()}
    return Campaign(values["seed"], faults)


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
    choose: Callable[[random.Random, int, Mapping[str, Any]], dict[str, Any]]
    """Draws what an attempt does, as values that JSON can hold: dice, number, parameters."""
    attempt: Callable[[Mapping[str, Any], Laboratory, Path], Finding]
    """Does what was drawn, in an empty directory. Raises AssertionError where something is not as
    it must be."""


@dataclass(frozen=True, kw_only=True)
class Record(Finding):
    fault: str
    number: int
    choice: dict[str, Any]
    passed: bool
    problem: str
    seconds: float


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
            found = ((name, getattr(finding, name), most) for name, most in fault.limits.items())
            problem = "; ".join(
                f"{name}: expected at most {most:g}, found {value:.3g}"
                for name, value, most in found
                if value is not None and value > most
            )
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}\n"
            problem += "".join(traceback.format_tb(error.__traceback__))
            problem += str(error)[-PROBLEM_CHARACTERS:]
    return Record(
        fault=fault.name, number=number, choice=choice, passed=not problem, problem=problem,
        **asdict(finding), seconds=round(time.monotonic() - began, 2),
    )  # fmt: skip


def find_results() -> Path:
    """The file of the commit's records; emptied if files differ from the commit: they may again."""

    def ask(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=launchers.ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = ask("rev-parse", "--short=12", "HEAD") or "no-commit"
    is_changed = bool(ask("status", "--porcelain", "--", *PARTS))
    path = RESULTS / f"{commit}{CHANGED * is_changed}.jsonl"
    RESULTS.mkdir(parents=True, exist_ok=True)
    path.open("w" if is_changed else "a").close()
    return path


def read_records(path: Path) -> list[Record]:
    """All whole lines; some may have been cut off."""
    records = []
    for line in path.read_text("utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(Record(**json.loads(line)))
    return records
