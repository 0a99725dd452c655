"""The campaign: which faults are tried how often, and with which choices.

``campaign.toml`` holds a seed, and for each fault the number of attempts, limits and parameters.
What attempt i of a fault does is drawn from the seed, the fault's name and i alone: it is the same
in each run, whatever else is run.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CAMPAIGN = Path(__file__).with_name("campaign.toml")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table."""

    name: str
    title: str
    """What happens, for the table."""
    attempts: int
    seconds: float
    """That one attempt takes, about, on two quiet cores."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the fault's choices are drawn from."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """The most that a measured value may be, by the value's name in `attempts.Finding`."""


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
