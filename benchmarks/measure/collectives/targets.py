"""What this project promises of its all-reduce and of its harness, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product, starmap

from benchmarks.judge.promises import make_target
from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.collectives.cells import find_probe
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
    PROBE,
    RING,
    SHARED,
    TORCH_JOB,
    Contender,
)
from benchmarks.records.schema import Cell, group_by
from mpiddp.wording import describe_size

K, M, ANY = 1 << 10, 1 << 20, 1 << 60
SMALL = range(32 * K + 1)
"""Sizes for which latency is promised; from 256 KiB on it is speed."""
LARGE = range(256 * K, 64 * M + 1)
LARGEST = range(64 * M, 64 * M + 1)
GLOO_ROW, MPI_ROW = Contender(GLOO, TORCH_JOB), Contender(MPI)
PRIVATE_OWN, SHARED_OWN = (Contender(OWN, buffer=each) for each in (PRIVATE, SHARED))
PREPARED_OWN = Contender(PREPARED)
RING_OWN = Contender(PREPARED, algorithm="ring", transport="mpi")
PLAIN_RINGS = [Contender(maker).label for maker in (RING, PERSISTENT)]

TWO_RANKS = (
    (PRIVATE_OWN, GLOO_ROW, LARGE, 4.0),
    (PRIVATE_OWN, MPI_ROW, range(M, 64 * M + 1), 1.0),
    (PRIVATE_OWN, MPI_ROW, LARGEST, 2.0),
    (SHARED_OWN, GLOO_ROW, LARGE, 8.0),
    (SHARED_OWN, MPI_ROW, LARGEST, 4.0),
)
"""Who is at which sizes at least how many times as fast as whom."""
LINKED_NODES = (
    (PRIVATE_OWN, GLOO_ROW, range(M, 4 * M + 1), 1.03),
    (PRIVATE_OWN, GLOO_ROW, range(16 * M, 16 * M + 1), 0.98),
)
Rows = Mapping[str, Cell]
"""The all-reduces of one size, by contender."""
Find = Callable[[Rows], Ratio | float | None]


def judge(cells: Iterable[Cell], cores: int | None) -> list[Target]:
    """The targets that these cells say something about.

    A speed is how many times faster it is than the other contender, the median over the rounds.
    """
    runs = group_by(cells, lambda cell: (cell.ranks, cell.nodes))
    targets = (target for run in runs.values() for target in _Run(run).judge(cores))
    return [target for target in targets if target is not None]


class _Run:
    """The cells of one number of ranks."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells, self._ranks, self._nodes = cells, cells[0].ranks, cells[0].nodes
        measured = [cell for cell in cells if cell.quantity != PROBE]
        groups = group_by(measured, lambda cell: (cell.quantity, *sorted(cell.at.items())))
        self._coefficient = find_common([c.samples for c in group] for group in groups.values())
        reduces = (cell for cell in measured if cell.quantity == ALL_REDUCE)
        self._sizes: dict[int, Rows] = {
            # Of several types and operators, the first.
            size: {cell.contender: cell for cell in reversed(row)}
            for size, row in sorted(group_by(reduces, lambda cell: cell.bytes).items())
        }

    def judge(self, cores: int | None) -> Iterator[Target | None]:
        nothing = find_probe(self._cells, EMPTY)
        if nothing is not None:
            text = f"the harness on {self._ranks} ranks: less than 1 µs of an iteration of nothing"
            yield make_target(text, {"": 1e6 * nothing.summary.median}, at_most=1)
        if self._nodes > 1:
            if self._ranks == self._nodes:
                yield from self._judge_nodes()
            return
        if self._ranks == 2:
            yield from starmap(self._judge_speed, TWO_RANKS)
            yield self._judge_bound(SHARED_OWN, 0.8)
            for own in (PRIVATE_OWN, SHARED_OWN, PREPARED_OWN):
                yield self._judge_latency(own, 1.2)
        yield from self._judge_executor()
        if cores is not None and self._ranks > cores:
            note = f" ({self._ranks} ranks, {cores} cores)"
            for own, other in product((PRIVATE_OWN, SHARED_OWN), (GLOO_ROW, MPI_ROW)):
                yield self._judge_speed(own, other, range(ANY), 1, note)

    def _judge_nodes(self) -> Iterator[Target | None]:
        """One rank on each node: latency, or, if a link was timed, how much of it is used."""
        link = find_probe(self._cells, LINK)
        if link is None:
            for own in (PRIVATE_OWN, PREPARED_OWN):
                yield self._judge_latency(own, 1)
            return
        yield from starmap(self._judge_speed, LINKED_NODES)
        least = 2 * (self._ranks - 1) / self._ranks * link.summary.median / link.bytes
        """Seconds a byte of the buffer."""

        def find_share(rows: Rows) -> float | None:
            own = rows.get(PRIVATE_OWN.label)
            return least * own.bytes / own.summary.median if own else None

        text = f"{PRIVATE_OWN.label}: at least 0.98 of what the link carries"
        yield self._make(text, range(M, 16 * M + 1), find_share, at_least=0.98)

    def _make(
        self,
        text: str,
        sizes: range,
        find: Find,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> Target | None:
        """Over those of the sizes at which something is known; None if there are none."""
        found = {size: find(rows) for size, rows in self._sizes.items() if size in sizes}
        known = {describe_size(size): value for size, value in found.items() if value is not None}
        return make_target(text, known, at_least, at_most) if known else None

    def _compare(self, old: str, new: str, rows: Rows) -> Ratio | None:
        """The second one's times over the first one's, if both were timed."""
        if old not in rows or new not in rows:
            return None
        return compare_rounds(rows[old].samples, rows[new].samples, self._coefficient)

    def _judge_speed(
        self, own: Contender, other: Contender, sizes: range, least: float, note: str = ""
    ) -> Target | None:
        text = f"{own.label}: at least {least:g} × {other.name}{note}"
        find = partial(self._compare, own.label, other.label)
        return self._make(text, sizes, find, at_least=least)

    def _judge_latency(self, own: Contender, most: float) -> Target | None:
        text = f"{own.label}: at most {most:g} of {MPI_ROW.name}'s time"
        find = partial(self._compare, MPI_ROW.label, own.label)
        return self._make(text, SMALL, find, at_most=most)

    def _judge_bound(self, own: Contender, least: float) -> Target | None:
        copy = find_probe(self._cells, *COPIES)

        def find_share(rows: Rows) -> float | None:
            cell = rows.get(own.label)
            return copy.summary.median / cell.summary.median if cell and copy else None

        text = f"{own.label}: at least {least:g} of the memory bound"
        return self._make(text, range(BOUND_BYTES, BOUND_BYTES + 1), find_share, at_least=least)

    def _judge_executor(self) -> Iterator[Target | None]:
        """mpiddp's ring beside the quicker one of the plain rings."""
        own = RING_OWN.label

        def find_plain(rows: Rows) -> str:
            plains = [rows[label] for label in PLAIN_RINGS if label in rows]
            return min(plains, key=lambda cell: cell.summary.median).contender if plains else ""

        def find_share(rows: Rows) -> Ratio | None:
            return self._compare(find_plain(rows), own, rows)

        def find_more(rows: Rows) -> float | None:
            plain, mine = rows.get(find_plain(rows)), rows.get(own)
            return 1e6 * (mine.summary.median - plain.summary.median) if plain and mine else None

        where = f"on {self._ranks} ranks, {own}"
        text = f"{where}: at most 1.05 of the plain ring's time"
        yield self._make(text, range(32 * K, ANY), find_share, at_most=1.05)
        text = f"{where}: at most 1 µs more than the plain ring"
        yield self._make(text, range(32 * K), find_more, at_most=1)
