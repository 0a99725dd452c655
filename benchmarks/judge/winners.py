"""Cells that are measured by the size of a buffer, put together where they are comparable."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.judge.ratios import (
    Ratio,
    compare_rounds,
    compare_runs,
    divide_all,
    divide_rounds,
    estimate_ratio,
    estimate_rounds,
    find_common,
    find_greater,
)
from benchmarks.records.contenders import GLOO, MPI, NCCL, OWN, PREPARED
from benchmarks.records.material import Measured
from benchmarks.records.statistics import Spread, spread
from mpiddp.wording import count_noun

MOST_SHOWN = 6
"""Lines that a panel shows at a time."""
FRAMEWORKS = (NCCL, GLOO)
"""Makers, the one that counts first."""


@dataclass(frozen=True)
class Place:
    """Where contenders were measured beside each other, but for the size."""

    quantity: str
    ranks: int
    nodes: int
    conditions: tuple[str, ...]
    """The type, the operator, whether caches were cold, and the like."""

    @property
    def parts(self) -> tuple[str, ...]:
        where = f"{count_noun(self.ranks, 'rank')} on {count_noun(self.nodes, 'node')}"
        return (where, *self.conditions)


def describe_condition(name: str, value: object) -> str:
    """A coordinate of a cell, as short as it can be said."""
    known = {
        ("link", "node"): "inside a node",
        ("link", "network"): "between nodes",
        ("direction", "both"): "both ways",
    }
    words = {
        "operator": str(value),
        "cold": "cold caches",
        "busy": f"beside {value} busy processes",
        "overlap": "while computing",
    }
    return known.get((name, str(value)), words.get(name, f"{name} {value}"))


def find_place(measured: Measured) -> Place:
    cell = measured.cell
    kind = cell.at.get("type")
    others = sorted(each for each in cell.at.items() if each[0] not in ("bytes", "type"))
    words = [describe_condition(name, value) for name, value in others]
    on_gpu = ["GPU"] if cell.details.get("buffer") == "gpu" else []
    first = [str(kind)] if kind is not None else []
    return Place(cell.quantity, cell.ranks, cell.nodes, (*first, *words, *on_gpu))


@dataclass(frozen=True)
class Verdict:
    """Who is the fastest at a size, and by how much."""

    winner: Measured
    second: Measured | None
    """The next one, of another kind; None if there is none."""
    lead: Ratio | None
    """How many times as fast as the second the winner is."""
    framework: Measured | None
    """Of the winner's record."""
    speed: Ratio | None
    """How many times as fast as the framework the winner is."""
    is_settled: bool
    """Whether it is told from the next one; each size is judged alone."""


def are_paired(one: Measured, other: Measured) -> bool:
    """Whether they took turns in the same rounds."""
    return one.record == other.record and len(one.cell.samples) == len(other.cell.samples)


def estimate(one: Measured, other: Measured) -> float:
    """How many times as fast one is as the other: as `Group.compare`, without the interval."""
    find = estimate_rounds if are_paired(one, other) else estimate_ratio
    return find(one.cell.samples, other.cell.samples)


def name_kind(measured: Measured, name: str = "") -> str:
    """The name, or the contender's, with the algorithm that ran in place of ``auto``."""
    name, ran = name or measured.name, measured.cell.ran[0]
    return name.replace("mpiddp auto", f"mpiddp {ran}", 1) if ran else name


@dataclass(frozen=True)
class Group:
    """The contenders of one place."""

    place: Place
    rows: Mapping[str, Mapping[int, Measured]]
    """By contender and bytes."""

    @cached_property
    def times(self) -> Mapping[str, Mapping[int, Spread]]:
        return {
            name: {size: each.cell.summary.spread for size, each in row.items()}
            for name, row in self.rows.items()
        }

    @property
    def sizes(self) -> list[int]:
        return sorted(set().union(*self.rows.values()))

    def find_makers(self, *makers: str) -> list[str]:
        """The contenders by one of the makers; those of the first maker first."""
        found = {
            name: makers.index(maker)
            for name, row in self.rows.items()
            if (maker := next(iter(row.values())).cell.details.get("maker")) in makers
        }
        return sorted(found, key=lambda name: found[name])

    @property
    def frameworks(self) -> list[str]:
        return self.find_makers(*FRAMEWORKS)

    @property
    def mpi(self) -> list[str]:
        return self.find_makers(MPI)

    @property
    def autos(self) -> list[str]:
        """mpiddp's own choice."""
        return [
            name
            for name in self.find_makers(OWN, PREPARED)
            if next(iter(self.rows[name].values())).cell.details.get("algorithm") == "auto"
        ]

    def find_framework(self, measured: Measured) -> Measured | None:
        """The framework's cell of the same size and record; None if there is none."""
        for name in self.frameworks:
            base = self.rows[name].get(measured.cell.bytes)
            if base is not None and base.record == measured.record:
                return base
        return None

    def find_speed(self, base: Measured, other: Measured) -> Spread:
        """How many times as fast the other is: of the ratios, as the map's are."""
        divide = divide_rounds if are_paired(base, other) else divide_all
        ratios = spread(list(divide(other.cell.samples, base.cell.samples)))
        return replace(ratios, median=estimate(other, base))

    @cached_property
    def coefficient(self) -> float:
        """How alike neighbouring rounds are, in the ratios of contenders of a size."""
        runs = []
        for size in self.sizes:
            first, *others = (row[size].cell for row in self.rows.values() if size in row)
            pairs = [other for other in others if len(other.samples) == len(first.samples)]
            runs.append([each.samples for each in (first, *pairs)])
        return find_common(runs)

    def compare(self, one: Measured, other: Measured) -> Ratio:
        """How many times as fast one is as the other."""
        mine, theirs = one.cell.samples, other.cell.samples
        if are_paired(one, other):
            return compare_rounds(mine, theirs, self.coefficient)
        return compare_runs(mine, [theirs], self.coefficient)

    @cached_property
    def verdicts(self) -> Mapping[int, Verdict]:
        """By size; without sizes at which no contender has a right result."""
        found = {size: self._find_winner(size) for size in self.sizes}
        return {size: each for size, each in found.items() if each is not None}

    def _find_winner(self, size: int) -> Verdict | None:
        order = self.rank_at(size)
        if not order:
            return None
        winner = order[0]
        # What mpiddp has chosen is no second contender beside what was chosen.
        others = (each for each in order if name_kind(each) != name_kind(winner))
        second = next(others, None)
        base = self.find_framework(winner)
        lead, speed = (
            self.compare(winner, each) if each is not None else None for each in (second, base)
        )
        is_settled = lead is None or bool(find_greater({size: lead}))
        return Verdict(winner, second, lead, base, speed, is_settled)

    def rank_at(self, size: int) -> list[Measured]:
        """Contenders with right results, the quickest first: by their ratios to the framework, or
        to the one with the least median."""
        known = [row[size] for row in self.rows.values() if size in row and not row[size].wrong]
        if not known:
            return []
        least = min(known, key=lambda each: self.times[each.name][size].median)
        base = self.find_framework(least) or least
        return sorted(known, key=lambda each: -estimate(each, base))

    def choose(self) -> list[str]:
        """The lines to begin with: framework, MPI, mpiddp's choice, and what is quickest."""
        usual = [*self.frameworks[:1], *self.mpi[:1], *self.autos[:1]]
        scores: dict[str, float] = defaultdict(float)
        for size in self.sizes:
            order = self.rank_at(size)
            for each in order:
                # 1 for the quickest, half of it at twice the time.
                scores[each.name] += estimate(each, order[0])
        others = sorted(scores, key=lambda name: -scores[name])
        return list(dict.fromkeys([*usual, *others]))[:MOST_SHOWN]


def make_groups(cells: Iterable[Measured]) -> list[Group]:
    """The groups of cells with a size and times; small ones first."""
    found: dict[Place, dict[str, dict[int, Measured]]] = defaultdict(lambda: defaultdict(dict))
    for each in cells:
        size = each.cell.at.get("bytes")
        is_sized = each.cell.unit == "s" and isinstance(size, int) and size > 0
        if is_sized and all(map(is_usable, each.cell.samples)):
            found[find_place(each)][each.name][int(size or 0)] = each
    places = sorted(found, key=lambda one: (one.quantity, one.ranks, one.nodes, one.conditions))
    return [Group(place, found[place]) for place in places]


def name_places(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """What tells each group from the others; and what they have in common."""
    parts = [group.place.parts for group in groups]
    if len(groups) == 1:
        return [", ".join(parts[0])], []
    common = [part for part in parts[0] if all(part in other for other in parts)]
    if any(set(each) <= set(common) for each in parts):
        # Where one has nothing of its own, where it was measured stays its name.
        common = common[1:]
    return [", ".join(part for part in each if part not in common) for each in parts], common


def is_usable(value: float) -> bool:
    """Whether a logarithmic axis has a place for it."""
    return math.isfinite(value) and value > 0
