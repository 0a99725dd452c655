"""What a fitted model says of cells: lower bounds and predictions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.judge.fit.check import can_flow, find_choice, predict_flow
from benchmarks.judge.fit.fitted import Fit, fit_records, read_fit
from benchmarks.records.collectives import COLLECTIVES, find_bus_factor
from benchmarks.records.contenders import COPIES, LINK, PROBE
from benchmarks.records.schema import Cell, Record
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.cost import bound, split
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.registry import Choice

TYPE = "float32"
"""Of the additions that are fitted."""
MOST_PARTS = 100_000
"""Messages that are simulated in all, some seconds; what would need more is not predicted."""
PART_BYTES = 60 << 10
"""About what mpiddp sends in one message between nodes."""
PROBED = "copies within the node, or messages between nodes, timed beside it, are the bound"


@dataclass(frozen=True)
class Model:
    """What it says in seconds; None for what it knows nothing of."""

    bound: Callable[[Cell], float | None]
    """What no algorithm can beat."""
    predict: Callable[[Cell], float | None]
    source: str
    """Where the model is from, in words."""


def find_fit(path: Path | None, records: Sequence[Record]) -> tuple[Fit | None, str]:
    """The given fit, or one of the records' messages and additions, and where it is from.

    Raises ConfigurationError if the file is no fit.
    """
    if path is not None:
        return read_fit(path), f"the model is {path.name}"
    try:
        return fit_records(records, None, TYPE), "the model is fitted to point-to-point"
    except ConfigurationError:
        return None, ""


class Flows:
    """Predictions of chunks that flow through the steps, as many as can be afforded."""

    def __init__(self, find_machine: Callable[[int, int], Machine | None]) -> None:
        self._find_machine = find_machine
        self._found: dict[Hashable, float | None] = {}
        self._parts = 0

    def find(self, choice: Choice, cell: Cell) -> float | None:
        """Seconds; None if that would take too many messages, or the machine is not known."""
        key = (choice, cell.ranks, cell.nodes, cell.bytes)
        machine = self._find_machine(cell.ranks, cell.nodes)
        if key not in self._found and machine is not None:
            parts = count_parts(choice, cell)
            is_affordable = self._parts + parts <= MOST_PARTS
            self._found[key] = predict_flow(choice, cell, machine) if is_affordable else None
            self._parts += parts if is_affordable else 0
        return self._found.get(key)


def make_model(fit: Fit | None, source: str, cells: Sequence[Cell], sizes: Sequence[int]) -> Model:
    """``cells`` have the probes that count without a fit; ``sizes``: of all that are predicted."""
    if fit is None:
        probes = [cell for cell in cells if cell.quantity == PROBE]
        return Model(functools.partial(find_probed, probes), lambda cell: None, PROBED)
    choices: dict[Hashable, Choice | None] = {}

    @functools.cache
    def find_machine(ranks: int, nodes: int) -> Machine | None:
        try:
            return fit.make_machine(split(ranks, nodes))
        except ConfigurationError:
            return None

    @functools.cache
    def list_prices(choice: Choice, ranks: int, nodes: int) -> Mapping[int, float]:
        machine = find_machine(ranks, nodes)
        if machine is None:
            return {}
        try:
            prices = choice.prices(sizes, machine, split(ranks, nodes))
        except ConfigurationError:
            return {}
        return {size: price.seconds for size, price in zip(sizes, prices, strict=True)}

    flows = Flows(find_machine)

    def find_bound(cell: Cell) -> float | None:
        kind = COLLECTIVES.get(cell.quantity)
        machine = find_machine(cell.ranks, cell.nodes)
        if kind is None or machine is None or cell.ranks < 2:
            return None
        hosts = split(cell.ranks, cell.nodes)
        return bound(cell.bytes, machine, hosts, collective=kind).seconds

    def predict(cell: Cell) -> float | None:
        if cell.ranks < 2:
            return None
        others = (each for each in cell.at.items() if each[0] != "bytes")
        ran = cell.ran[0]
        key = (cell.quantity, ran, cell.ranks, cell.nodes, *others)
        if key not in choices:
            choices[key] = find_choice(replace(cell, details={**cell.details, "ran": ran}))
        choice = choices[key]
        if choice is None:
            return None
        if can_flow(cell):
            return flows.find(choice, cell)
        return list_prices(choice, cell.ranks, cell.nodes).get(cell.bytes)

    return Model(find_bound, predict, source)


def count_parts(choice: Choice, cell: Cell) -> int:
    """How many messages are simulated for the prediction of chunks that flow, about."""
    schedule = choice.build(cell.ranks, split(cell.ranks, cell.nodes))
    each = math.ceil(cell.bytes / schedule.chunks / PART_BYTES)
    return max(1, each) * sum(map(len, schedule.steps))


def find_probed(probes: Sequence[Cell], cell: Cell) -> float | None:
    """What the network alone takes, or, within a node, writing the result into each memory."""
    if cell.quantity not in COLLECTIVES or cell.ranks < 2:
        return None
    rates = [
        probe.bytes / probe.summary.median
        for probe in probes
        if (probe.ranks, probe.nodes) == (cell.ranks, cell.nodes)
        and (probe.contender == LINK if cell.nodes > 1 else probe.contender in COPIES)
    ]
    share = find_bus_factor(cell.quantity, cell.nodes) if cell.nodes > 1 else 1.0
    return share * cell.bytes / max(rates) if rates else None
