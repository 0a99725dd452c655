"""What this project promises of its all-reduce and of its harness, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product, starmap
from typing import TypeVar

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.collectives.cells import find_probe, group_like
from benchmarks.records.contenders import (
    ALL_REDUCE,
    BOUND_BYTES,
    COPIES,
    EMPTY,
    GLOO,
    LINK,
    MPI,
    OWN,
    PERSISTENT,
    PREPARED,
    PRIVATE,
    RING,
    SHARED,
    TORCH_JOB,
    Contender,
)
from benchmarks.records.schema import Cell, group_by
from mpiddp.wording import describe_size

K, M = 1 << 10, 1 << 20
ANY = range(1 << 60)
SMALL, LARGE = range(32 * K + 1), range(256 * K, 64 * M + 1)
"""Sizes for which latency is promised, and those for which it is speed."""
LARGEST = range(64 * M, 64 * M + 1)
GLOO_ROW, MPI_ROW = Contender(GLOO, TORCH_JOB), Contender(MPI)
PRIVATE_OWN, SHARED_OWN = (Contender(OWN, buffer=each) for each in (PRIVATE, SHARED))
PREPARED_OWN = Contender(PREPARED)
RING_OWN = Contender(PREPARED, algorithm="ring", transport="mpi").label
PLAIN_RINGS = [Contender(maker).label for maker in (RING, PERSISTENT)]
TWO_RANKS = (
    (PRIVATE_OWN, GLOO_ROW, LARGE, 4.0),
    (PRIVATE_OWN, MPI_ROW, range(M, 64 * M + 1), 1.0),
    (PRIVATE_OWN, MPI_ROW, LARGEST, 2.0),
    (SHARED_OWN, GLOO_ROW, LARGE, 8.0),
    (SHARED_OWN, MPI_ROW, LARGEST, 4.0),
)
"""Who is at least how many times as fast as whom, at which sizes."""
LINKED_NODES = (
    (PRIVATE_OWN, GLOO_ROW, range(M, 4 * M + 1), 1.03),
    (PRIVATE_OWN, GLOO_ROW, range(16 * M, 16 * M + 1), 0.98),
)

Value = TypeVar("Value", Ratio, float)
Rows = Mapping[str, Cell]
"""The all-reduces of one size, by contender."""


def list_targets(cells: Iterable[Cell], cores: int | None) -> list[Target]:
    """The targets that these cells say something about.

    A speed is how many times faster it is than the other contender, the median over the rounds.
    """
    runs = group_by(cells, lambda cell: (cell.ranks, cell.nodes))
    return [target for run in runs.values() for target in _Run(run).judge(cores) if target.found]


class _Run:
    """Judges the cells of one number of ranks; a target without a value says nothing."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells, self._ranks, self._nodes = cells, cells[0].ranks, cells[0].nodes
        like = ([cell.samples for cell in group] for group in group_like(cells))
        self._coefficient = find_common(like)
        reduces = (cell for cell in cells if cell.quantity == ALL_REDUCE)
        self._sizes: dict[int, Rows] = {
            # Of several types and operators, the first.
            size: {cell.contender: cell for cell in reversed(row)}
            for size, row in sorted(group_by(reduces, lambda cell: cell.bytes).items())
        }

    def judge(self, cores: int | None) -> Iterator[Target]:
        nothing = find_probe(self._cells, EMPTY)
        if nothing is not None:
            text = f"the harness on {self._ranks} ranks: less than 1 µs of an iteration of nothing"
            yield Target(text, {"": 1e6 * nothing.summary.median}, at_most=1)
        if self._nodes > 1:
            if self._ranks == self._nodes:
                yield from self._judge_nodes()
            return
        if self._ranks == 2:
            yield from starmap(self._judge_speed, TWO_RANKS)
            yield from self._judge_bound(SHARED_OWN)
            for own in (PRIVATE_OWN, SHARED_OWN, PREPARED_OWN):
                yield self._judge_latency(own, 1.2)
        yield from self._judge_executor()
        if cores is not None and self._ranks > cores:
            note = f" ({self._ranks} ranks, {cores} cores)"
            for own, other in product((PRIVATE_OWN, SHARED_OWN), (GLOO_ROW, MPI_ROW)):
                yield self._judge_speed(own, other, ANY, 1, note)

    def _judge_nodes(self) -> Iterator[Target]:
        """One rank on each node: latency, or, if a link was timed, how much of it is used."""
        link = find_probe(self._cells, LINK)
        if link is None:
            for own in (PRIVATE_OWN, PREPARED_OWN):
                yield self._judge_latency(own, 1)
            return
        yield from starmap(self._judge_speed, LINKED_NODES)
        share = 2 * (self._ranks - 1) / self._ranks
        seconds_per_byte = share * link.summary.median / link.bytes

        def find_share(rows: Rows) -> float:
            own = rows[PRIVATE_OWN.label]
            return seconds_per_byte * own.bytes / own.summary.median

        text = f"{PRIVATE_OWN.label}: at least 0.98 of what the link carries"
        yield Target(text, self._find(range(M, 16 * M + 1), find_share), at_least=0.98)

    def _judge_bound(self, own: Contender) -> Iterator[Target]:
        copy = find_probe(self._cells, *COPIES)
        if copy is not None:
            bound = copy.summary.median
            sizes = range(BOUND_BYTES, BOUND_BYTES + 1)
            found = self._find(sizes, lambda rows: bound / rows[own.label].summary.median)
            text = f"{own.label}: at least 0.8 of the memory bound"
            yield Target(text, found, at_least=0.8)

    def _judge_speed(
        self, own: Contender, other: Contender, sizes: range, least: float, note: str = ""
    ) -> Target:
        text = f"{own.label}: at least {least:g} × {other.name}{note}"
        return Target(text, self._compare(own, other, sizes), at_least=least)

    def _judge_latency(self, own: Contender, most: float) -> Target:
        text = f"{own.label}: at most {most:g} of {MPI_ROW.name}'s time"
        return Target(text, self._compare(MPI_ROW, own, SMALL), at_most=most)

    def _judge_executor(self) -> Iterator[Target]:
        """mpiddp's ring beside the quicker one of the plain rings."""

        def find_plain(rows: Rows) -> Cell:
            known = [label for label in PLAIN_RINGS if label in rows]
            return rows[min(known, key=lambda label: rows[label].summary.median, default="")]

        def find_more(rows: Rows) -> float:
            return 1e6 * (rows[RING_OWN].summary.median - find_plain(rows).summary.median)

        where, large = f"on {self._ranks} ranks, {RING_OWN}", range(32 * K, ANY.stop)
        found = self._find(large, lambda rows: self._divide(find_plain(rows), rows[RING_OWN]))
        yield Target(f"{where}: at most 1.05 of the plain ring's time", found, at_most=1.05)
        more = self._find(range(32 * K), find_more)
        yield Target(f"{where}: at most 1 µs more than the plain ring", more, at_most=1)

    def _compare(self, old: Contender, new: Contender, sizes: range) -> dict[str, Ratio]:
        """The second one's times over the first one's."""
        return self._find(sizes, lambda rows: self._divide(rows[old.label], rows[new.label]))

    def _divide(self, old: Cell, new: Cell) -> Ratio:
        return compare_rounds(old.samples, new.samples, self._coefficient)

    def _find(self, sizes: range, find: Callable[[Rows], Value]) -> dict[str, Value]:
        """The value at each of the sizes, but for those at which a contender was not timed."""
        found = {}
        for size, rows in self._sizes.items():
            if size in sizes:
                with suppress(KeyError):
                    found[describe_size(size)] = find(rows)
        return found
