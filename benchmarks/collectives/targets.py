"""What this project promises of its all-reduce, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from benchmarks.collectives.contenders import (
    BOUND_BYTES,
    GLOO,
    LINK_BYTES,
    MPI,
    OWN,
    PERSISTENT,
    PREPARED,
    PRIVATE,
    RING,
    SHARED,
    Contender,
)
from benchmarks.collectives.measurement import Group
from benchmarks.collectives.report import find, find_limits
from benchmarks.common.options import describe_size
from benchmarks.common.statistics import summarize
from benchmarks.common.targets import Target

K, M = 1 << 10, 1 << 20
SMALL = range(32 * K + 1)
"""Sizes for which latency is promised; from 256 KiB on it is speed."""
LARGE = range(256 * K, 64 * M + 1)


def judge(groups: Sequence[Group], cores: int | None) -> list[Target]:
    """The targets that these groups say something about.

    A speed is how many times faster it is than the other contender, the median over the rounds.
    """
    found: list[Target | None] = []
    for group in groups:
        if (group.nodes or 1) > 1:
            found += _judge_nodes(group)
            continue
        if group.ranks == 2:
            found += _judge_two_ranks(group)
        found += _judge_executor(group)
        if cores is not None and group.ranks > cores:
            found += _judge_many_ranks(group, cores)
    return [target for target in found if target is not None]


def _judge_two_ranks(group: Group) -> Iterable[Target | None]:
    private, shared = Contender(OWN, buffer=PRIVATE), Contender(OWN, buffer=SHARED)
    gloo, mpi = find(group, GLOO), find(group, MPI)
    from_one, at_most = range(M, 64 * M + 1), range(64 * M, 64 * M + 1)
    yield _judge_speed(group, private, gloo, LARGE, 4)
    yield _judge_speed(group, private, mpi, from_one, 1)
    yield _judge_speed(group, private, mpi, at_most, 2)
    yield _judge_speed(group, shared, gloo, LARGE, 8)
    yield _judge_speed(group, shared, mpi, at_most, 4)
    yield _judge_bound(group, shared, 0.8)
    for own in (private, shared, Contender(PREPARED)):
        yield _judge_latency(group, own, mpi, 1.2)


def _judge_nodes(group: Group) -> Iterable[Target | None]:
    """One rank on each node: latency, or, if a link was timed, how much of it is used."""
    if group.ranks != group.nodes:
        return
    own, gloo, mpi = Contender(OWN, buffer=PRIVATE), find(group, GLOO), find(group, MPI)
    link = find_limits(group).link
    if link is None:
        for each in (own, Contender(PREPARED)):
            yield _judge_latency(group, each, mpi, 1)
        return
    yield _judge_speed(group, own, gloo, range(M, 4 * M + 1), 1.03)
    yield _judge_speed(group, own, gloo, range(16 * M, 16 * M + 1), 0.98)
    bytes_of_all = 2 * (group.ranks - 1) / group.ranks

    def find_share(size: int) -> float | None:
        seconds = group.seconds(own, size)
        least = bytes_of_all * size * link.median / LINK_BYTES
        return least / summarize(seconds).median if seconds else None

    text = f"{own.label}: at least 0.98 of what the link carries"
    yield _make(group, text, range(M, 16 * M + 1), find_share, at_least=0.98)


def _judge_many_ranks(group: Group, cores: int) -> Iterable[Target | None]:
    note = f" ({group.ranks} ranks, {cores} cores)"
    for buffer in (PRIVATE, SHARED):
        for maker in (GLOO, MPI):
            own = Contender(OWN, buffer=buffer)
            yield _judge_speed(group, own, find(group, maker), range(1 << 60), 1, note)


def _make(
    group: Group,
    text: str,
    sizes: range,
    find_value: Callable[[int], float | None],
    at_least: float | None = None,
    at_most: float | None = None,
) -> Target | None:
    """The target over those of the sizes at which something is known; None if there are none."""
    values = {size: find_value(size) for size in group.plan.sizes if size in sizes}
    known = {describe_size(size): value for size, value in values.items() if value is not None}
    return Target(text, known, at_least, at_most) if known else None


def _judge_speed(
    group: Group, own: Contender, other: Contender, sizes: range, least: float, note: str = ""
) -> Target | None:
    text = f"{own.label}: at least {least:g} × {other.name}{note}"
    find_value = partial(group.find_median_speed, own, other)
    return _make(group, text, sizes, find_value, at_least=least)


def _judge_latency(group: Group, own: Contender, other: Contender, most: float) -> Target | None:
    text = f"{own.label}: at most {most:g} of {other.name}'s time"
    return _make(group, text, SMALL, partial(group.find_median_speed, other, own), at_most=most)


def _judge_bound(group: Group, own: Contender, least: float) -> Target | None:
    copy = find_limits(group).copy

    def find_share(size: int) -> float | None:
        seconds = group.seconds(own, size)
        return copy.median / summarize(seconds).median if seconds and copy else None

    text = f"{own.label}: at least {least:g} of the memory bound"
    return _make(group, text, range(BOUND_BYTES, BOUND_BYTES + 1), find_share, at_least=least)


def _judge_executor(group: Group) -> Iterable[Target | None]:
    own = Contender(PREPARED, algorithm="ring", transport="mpi")

    def find_plain(size: int) -> Contender | None:
        plain = [each for each in group.contenders if each.maker in (RING, PERSISTENT)]
        known = [each for each in plain if group.seconds(each, size)]
        return min(
            known, key=lambda each: summarize(group.seconds(each, size)).median, default=None
        )

    def find_share(size: int) -> float | None:
        plain = find_plain(size)
        return group.find_median_speed(plain, own, size) if plain is not None else None

    def find_more(size: int) -> float | None:
        plain, mine = find_plain(size), group.seconds(own, size)
        if plain is None or not mine:
            return None
        return 1e6 * (summarize(mine).median - summarize(group.seconds(plain, size)).median)

    where = f"on {group.ranks} ranks, {own.label}"
    yield _make(
        group,
        f"{where}: at most 1.05 of the plain ring's time",
        range(32 * K, 1 << 60),
        find_share,
        at_most=1.05,
    )
    text = f"{where}: at most 1 µs more than the plain ring"
    yield _make(group, text, range(32 * K), find_more, at_most=1)
