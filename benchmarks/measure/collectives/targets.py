"""What this project promises of its all-reduce and of its harness, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from benchmarks.judge.ratios import Ratio, compare_rounds
from benchmarks.judge.targets import Target
from benchmarks.measure.collectives.findings import Findings
from benchmarks.records.contenders import (
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
from benchmarks.records.schema import Cell
from mpiddp.wording import describe_size

K, M = 1 << 10, 1 << 20
SMALL = range(32 * K + 1)
"""Sizes for which latency is promised; from 256 KiB on it is speed."""
LARGE = range(256 * K, 64 * M + 1)
GLOO_ROW, MPI_ROW = Contender(GLOO, TORCH_JOB), Contender(MPI)


def judge(groups: Sequence[Findings], cores: int | None) -> list[Target]:
    """The targets that these measurements say something about.

    A speed is how many times faster it is than the other contender, the median over the rounds.
    """
    targets: list[Target | None] = []
    for found in groups:
        targets.append(_judge_harness(found))
        if (found.nodes or 1) > 1:
            targets += _judge_nodes(found)
            continue
        if found.ranks == 2:
            targets += _judge_two_ranks(found)
        targets += _judge_executor(found)
        if cores is not None and found.ranks > cores:
            targets += _judge_many_ranks(found, cores)
    return [target for target in targets if target is not None]


def _judge_harness(found: Findings) -> Target | None:
    nothing = found.find_probe(EMPTY)
    if nothing is None:
        return None
    text = f"the harness on {found.ranks} ranks: less than 1 µs of an iteration of nothing"
    return Target(text, {"": 1e6 * nothing.summary.median}, at_most=1)


def _judge_two_ranks(found: Findings) -> Iterable[Target | None]:
    private, shared = Contender(OWN, buffer=PRIVATE), Contender(OWN, buffer=SHARED)
    from_one, at_most = range(M, 64 * M + 1), range(64 * M, 64 * M + 1)
    yield _judge_speed(found, private, GLOO_ROW, LARGE, 4)
    yield _judge_speed(found, private, MPI_ROW, from_one, 1)
    yield _judge_speed(found, private, MPI_ROW, at_most, 2)
    yield _judge_speed(found, shared, GLOO_ROW, LARGE, 8)
    yield _judge_speed(found, shared, MPI_ROW, at_most, 4)
    yield _judge_bound(found, shared, 0.8)
    for own in (private, shared, Contender(PREPARED)):
        yield _judge_latency(found, own, 1.2)


def _judge_nodes(found: Findings) -> Iterable[Target | None]:
    """One rank on each node: latency, or, if a link was timed, how much of it is used."""
    if found.ranks != found.nodes:
        return
    own = Contender(OWN, buffer=PRIVATE)
    link = found.find_probe(LINK)
    if link is None:
        for each in (own, Contender(PREPARED)):
            yield _judge_latency(found, each, 1)
        return
    yield _judge_speed(found, own, GLOO_ROW, range(M, 4 * M + 1), 1.03)
    yield _judge_speed(found, own, GLOO_ROW, range(16 * M, 16 * M + 1), 0.98)
    bytes_of_all = 2 * (found.ranks - 1) / found.ranks

    def find_share(size: int) -> float | None:
        seconds = found.find_median(own, size)
        least = bytes_of_all * size * link.summary.median / link.bytes
        return least / seconds if seconds else None

    text = f"{own.label}: at least 0.98 of what the link carries"
    yield _make(found, text, range(M, 16 * M + 1), find_share, at_least=0.98)


def _judge_many_ranks(found: Findings, cores: int) -> Iterable[Target | None]:
    note = f" ({found.ranks} ranks, {cores} cores)"
    for buffer in (PRIVATE, SHARED):
        for other in (GLOO_ROW, MPI_ROW):
            own = Contender(OWN, buffer=buffer)
            yield _judge_speed(found, own, other, range(1 << 60), 1, note)


def _make(
    found: Findings,
    text: str,
    sizes: range,
    find_value: Callable[[int], Ratio | float | None],
    at_least: float | None = None,
    at_most: float | None = None,
) -> Target | None:
    """The target over those of the sizes at which something is known; None if there are none."""
    values = {size: find_value(size) for size in found.plan.bytes if size in sizes}
    known = {describe_size(size): value for size, value in values.items() if value is not None}
    return Target(text, known, at_least, at_most) if known else None


def _judge_speed(
    found: Findings, own: Contender, other: Contender, sizes: range, least: float, note: str = ""
) -> Target | None:
    text = f"{own.label}: at least {least:g} × {other.name}{note}"
    find_value = partial(found.find_speed, own, other, coefficient=found.find_coefficient())
    return _make(found, text, sizes, find_value, at_least=least)


def _judge_latency(found: Findings, own: Contender, most: float) -> Target | None:
    text = f"{own.label}: at most {most:g} of {MPI_ROW.name}'s time"
    find_value = partial(found.find_speed, MPI_ROW, own, coefficient=found.find_coefficient())
    return _make(found, text, SMALL, find_value, at_most=most)


def _judge_bound(found: Findings, own: Contender, least: float) -> Target | None:
    copy = found.find_probe(*COPIES)

    def find_share(size: int) -> float | None:
        seconds = found.find_median(own, size)
        return copy.summary.median / seconds if seconds and copy else None

    text = f"{own.label}: at least {least:g} of the memory bound"
    return _make(found, text, range(BOUND_BYTES, BOUND_BYTES + 1), find_share, at_least=least)


def _judge_executor(found: Findings) -> Iterable[Target | None]:
    own = Contender(PREPARED, algorithm="ring", transport="mpi")
    coefficient = found.find_coefficient()

    def find_pair(size: int) -> tuple[Cell, Cell] | None:
        """The quicker plain ring, and mpiddp's."""
        plains = (found.find(Contender(maker), size) for maker in (RING, PERSISTENT))
        plain = min(filter(None, plains), key=lambda cell: cell.summary.median, default=None)
        mine = found.find(own, size)
        return None if plain is None or mine is None else (plain, mine)

    def find_share(size: int) -> Ratio | None:
        pair = find_pair(size)
        if pair is None:
            return None
        plain, mine = pair
        return compare_rounds(plain.samples, mine.samples, coefficient)

    def find_more(size: int) -> float | None:
        pair = find_pair(size)
        return 1e6 * (pair[1].summary.median - pair[0].summary.median) if pair is not None else None

    where = f"on {found.ranks} ranks, {own.label}"
    text = f"{where}: at most 1.05 of the plain ring's time"
    yield _make(found, text, range(32 * K, 1 << 60), find_share, at_most=1.05)
    text = f"{where}: at most 1 µs more than the plain ring"
    yield _make(found, text, range(32 * K), find_more, at_most=1)
