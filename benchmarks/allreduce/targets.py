"""What this project promises of its all-reduce, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.allreduce.contenders import (
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
from benchmarks.allreduce.report import find, find_limits, find_speed, summarize
from benchmarks.allreduce.visits import Group
from benchmarks.common.options import describe_size

K, M = 1 << 10, 1 << 20
SMALL_BYTES = 32 * K
"""Up to here latency is promised, from 256 KiB on speed."""
LARGE = range(256 * K, 64 * M + 1)


@dataclass(frozen=True)
class Value:
    """One size."""

    bytes: int
    found: float
    met: bool


@dataclass(frozen=True)
class Target:
    """A promise, and what was measured at each size that it holds for."""

    text: str
    values: tuple[Value, ...]

    @property
    def met(self) -> bool:
        """Whether it is kept at every size."""
        return all(value.met for value in self.values)

    def __str__(self) -> str:
        # One value alone is what the last word is about.
        marks = len(self.values) > 1
        shown = [
            f"{describe_size(value.bytes)} {value.found:.2f}"
            f"{' (missed)' if marks and not value.met else ''}"
            for value in self.values
        ]
        return f"{self.text}: {', '.join(shown)}: {'met' if self.met else 'missed'}"


def judge(groups: Sequence[Group], cores: int | None) -> list[Target]:
    """The targets that these groups say something about.

    A speed is how many times as quick as the other one, the median over the rounds.
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
    """One rank on each node: latency, or, where a link was timed, the use that is made of it."""
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

    def ask(size: int) -> tuple[float, bool] | None:
        seconds = group.seconds(own, size)
        if not seconds:
            return None
        least = bytes_of_all * size * link.median / LINK_BYTES
        share = least / summarize(seconds).median
        return share, share >= 0.98

    sizes = (size for size in group.plan.sizes if M <= size <= 16 * M)
    yield _make(f"{own.label}: at least 0.98 of what the link carries", sizes, ask)


def _judge_many_ranks(group: Group, cores: int) -> Iterable[Target | None]:
    note = f" ({group.ranks} ranks, {cores} cores)"
    for buffer in (PRIVATE, SHARED):
        for maker in (GLOO, MPI):
            own = Contender(OWN, buffer=buffer)
            yield _judge_speed(group, own, find(group, maker), range(1 << 60), 1, note)


def _make(
    text: str, sizes: Iterable[int], ask: Callable[[int], tuple[float, bool] | None]
) -> Target | None:
    """The target over those sizes at which it can be judged; None if there are none."""
    answers = ((size, ask(size)) for size in sizes)
    values = tuple(Value(size, *answer) for size, answer in answers if answer is not None)
    return Target(text, values) if values else None


def _judge_speed(
    group: Group, own: Contender, other: Contender, sizes: range, least: float, note: str = ""
) -> Target | None:
    def ask(size: int) -> tuple[float, bool] | None:
        speed = find_speed(group, own, other, size)
        return (speed.median, speed.median >= least) if speed else None

    text = f"{own.label}: at least {least:g} × {other.name}{note}"
    return _make(text, filter(sizes.__contains__, group.plan.sizes), ask)


def _judge_latency(group: Group, own: Contender, other: Contender, most: float) -> Target | None:
    def ask(size: int) -> tuple[float, bool] | None:
        speed = find_speed(group, own, other, size)
        return (1 / speed.median, 1 / speed.median <= most) if speed else None

    text = f"{own.label}: at most {most:g} of {other.name}'s time"
    return _make(text, (size for size in group.plan.sizes if size <= SMALL_BYTES), ask)


def _judge_bound(group: Group, own: Contender, least: float) -> Target | None:
    copy = find_limits(group).copy

    def ask(size: int) -> tuple[float, bool] | None:
        seconds = group.seconds(own, size)
        if not seconds or copy is None:
            return None
        share = copy.median / summarize(seconds).median
        return share, share >= least

    text = f"{own.label}: at least {least:g} of the memory bound"
    return _make(text, (size for size in group.plan.sizes if size == BOUND_BYTES), ask)


def _judge_executor(group: Group) -> Iterable[Target | None]:
    own = Contender(PREPARED, algorithm="ring", transport="mpi")

    def find_plain(size: int) -> Contender | None:
        """The quicker of the plain rings."""
        plain = [each for each in group.contenders if each.maker in (RING, PERSISTENT)]
        known = [each for each in plain if group.seconds(each, size)]
        return min(
            known, key=lambda each: summarize(group.seconds(each, size)).median, default=None
        )

    def ask_share(size: int) -> tuple[float, bool] | None:
        plain = find_plain(size)
        speed = find_speed(group, own, plain, size) if plain is not None else None
        return (1 / speed.median, 1 / speed.median <= 1.05) if speed else None

    def ask_more(size: int) -> tuple[float, bool] | None:
        plain, mine = find_plain(size), group.seconds(own, size)
        if plain is None or not mine:
            return None
        more = 1e6 * (summarize(mine).median - summarize(group.seconds(plain, size)).median)
        return more, more <= 1

    sizes, where = group.plan.sizes, f"on {group.ranks} ranks, {own.label}"
    yield _make(
        f"{where}: at most 1.05 of the plain ring's time",
        (size for size in sizes if size >= SMALL_BYTES),
        ask_share,
    )
    yield _make(
        f"{where}: at most 1 µs more than the plain ring",
        (size for size in sizes if size < SMALL_BYTES),
        ask_more,
    )
