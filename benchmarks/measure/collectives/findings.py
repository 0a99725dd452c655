"""What a measurement on one number of ranks finds, item by item."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.measure import trials
from benchmarks.measure.collectives.options import Plan
from benchmarks.records.contenders import PROBE, Contender
from benchmarks.records.schema import Cell, Coordinate, RecordWriter


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A contender that cannot do something, and why."""

    quantity: str
    contender: str
    at: Mapping[str, Coordinate]
    reason: str
    is_wrong: bool = False
    """Whether it can, but computes something else."""


@dataclass(frozen=True, kw_only=True)
class Surroundings(trials.Surroundings):
    """Told at the start, and again at the end."""

    collectives: Mapping[str, Any] = field(default_factory=dict)
    """How mpiddp's collectives wait."""
    first_calls: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the first collective that each maker made, which never counts."""


Finding = Cell | Refusal | Surroundings


@dataclass(kw_only=True)
class Findings:
    """All items of one number of ranks so far."""

    plan: Plan
    surroundings: Surroundings
    cells: list[Cell] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.surroundings.ranks

    @property
    def nodes(self) -> int | None:
        return self.surroundings.nodes

    def collect(self, items: Iterable[Finding], writer: RecordWriter) -> None:
        """Keep items as they come, and write them."""
        for item in items:
            if isinstance(item, Cell):
                self.cells.append(item)
                writer.add(item)
            elif isinstance(item, Refusal):
                self.refusals.append(item)
                at = {"ranks": self.ranks, **item.at}
                writer.refuse(item.quantity, item.contender, item.reason, **at)
            else:
                self.surroundings = item
                writer.write("surroundings", **vars(item))

    @property
    def measured(self) -> list[Cell]:
        """All cells but the probes."""
        return [cell for cell in self.cells if cell.quantity != PROBE]

    def group(self, *, by_size: bool) -> list[list[Cell]]:
        """The measured cells by quantity, type, operator and conditions, and by size if asked."""
        groups: dict[Hashable, list[Cell]] = {}
        for cell in self.measured:
            at = {name: cell.at[name] for name in sorted(cell.at) if by_size or name != "bytes"}
            groups.setdefault((cell.quantity, *at.items()), []).append(cell)
        return list(groups.values())

    def find(self, contender: Contender, size: int) -> Cell | None:
        """Its cell at a size, of the first type and operator."""
        name, quantity = contender.label, contender.quantity
        cells = (each for each in self.cells if (each.contender, each.quantity) == (name, quantity))
        return next((each for each in cells if each.bytes == size), None)

    def find_probe(self, *names: str) -> Cell | None:
        """The fastest of these limits of the machine; None if none of them was measured."""
        cells = (cell for cell in self.cells if cell.quantity == PROBE and cell.contender in names)
        return min(cells, key=lambda cell: cell.summary.median, default=None)

    def find_median(self, contender: Contender, size: int) -> float | None:
        """Seconds; None if it was not timed."""
        cell = self.find(contender, size)
        return None if cell is None else cell.summary.median

    def find_coefficient(self) -> float:
        """How alike neighbouring rounds are, in the ratios of contenders, so far."""
        return find_common([cell.samples for cell in group] for group in self.group(by_size=True))

    def find_speed(
        self, own: Contender, other: Contender, size: int, coefficient: float
    ) -> Ratio | None:
        """How many times faster it is than another contender; None if either was not timed."""
        mine, others = self.find(own, size), self.find(other, size)
        if mine is None or others is None:
            return None
        return compare_rounds(mine.samples, others.samples, coefficient)

    def find_like(self, cell: Cell, maker: str) -> Cell | None:
        """The cell of the first contender of a maker, measured as this one was."""
        place = (cell.quantity, dict(cell.at))
        cells = (each for each in self.cells if each.details.get("maker") == maker)
        return next((each for each in cells if (each.quantity, dict(each.at)) == place), None)
