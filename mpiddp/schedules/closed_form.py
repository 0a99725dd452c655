"""Prices as formulas, for more ranks than can be simulated.

A closed form is a few kinds of steps, each with the load of its slowest rank. For chunks of equal
size it equals ``simulate``, which the tests show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mpiddp.schedules.cost import Machine


class Load(NamedTuple):
    """Messages, and their volume as a multiple of the buffer."""

    messages: float = 0
    volume: float = 0

    def scaled(self, messages: float, volume: float) -> Load:
        return Load(self.messages * messages, self.volume * volume)


NOTHING = Load()


@dataclass(frozen=True)
class Phase:
    """Steps that are alike for the rank that decides how long they take."""

    steps: int
    near: Load = NOTHING
    """What it sends (or receives) in each step within its node."""
    far: Load = NOTHING
    """What it sends to other nodes."""
    link: float = 0.0
    """Volume over its node's link in each step, of all its ranks together."""
    added: float = 0.0
    """What it adds in each step, as a multiple of the buffer."""

    def seconds(self, size: float, machine: Machine) -> float:
        near, far = machine.inside, machine.between
        rank = (
            self.near.messages * near.latency
            + self.near.volume * size * near.seconds_per_byte
            + self.far.messages * far.latency
            + self.far.volume * size * far.seconds_per_byte
        )
        link = far.latency + self.link * size * machine.uplink if self.link else 0.0
        return self.steps * (max(rank, link) + self.added * size * machine.addition)


def make_phase(steps: int, nodes: int, messages: float, volume: float, added: float = 0.0) -> Phase:
    """Steps whose slowest message goes to another node, if there is one."""
    load = Load(messages, volume)
    return Phase(steps, *((load, NOTHING) if nodes == 1 else (NOTHING, load)), added=added)


def exchange_phase(nodes: int, each: int, share: float, added: float) -> Phase:
    """One step in which everybody sends ``share`` of the buffer to everybody."""
    others = (nodes - 1) * each
    near, far = Load(1, share).scaled(each - 1, each - 1), Load(1, share).scaled(others, others)
    return Phase(1 if nodes * each > 1 else 0, near, far, each * far.volume, added)


@dataclass(frozen=True)
class ClosedForm:
    """The price of an algorithm as a formula, for chunks of equal size."""

    phases: tuple[Phase, ...]

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def seconds(self, size: float, machine: Machine) -> float:
        return math.fsum(phase.seconds(size, machine) for phase in self.phases)

    @property
    def near(self) -> Load:
        """The sum of all steps' loads within nodes."""
        return _sum_loads((phase.steps, phase.near) for phase in self.phases)

    @property
    def far(self) -> Load:
        """The sum of all steps' loads between nodes."""
        return _sum_loads((phase.steps, phase.far) for phase in self.phases)

    @property
    def added(self) -> float:
        """The sum of all steps' additions, as a multiple of the buffer."""
        return math.fsum(phase.steps * phase.added for phase in self.phases)


def _sum_loads(loads: Iterable[tuple[int, Load]]) -> Load:
    scaled = [load.scaled(steps, steps) for steps, load in loads]
    return Load(sum(load.messages for load in scaled), sum(load.volume for load in scaled))
