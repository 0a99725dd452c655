"""Algorithms that do not do what they promise, registered for a while."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from mpiddp.launch.session import current_session
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.schedule import Schedule, all_reduce


def double(n: int) -> Schedule:
    """Rank 1 is added twice."""
    everybody = range(1, n)
    steps = [[add(r, 0) for r in everybody], [add(1, 0)], [copy(0, r) for r in everybody]]
    return all_reduce(n, 1, steps)


def lopsided(n: int) -> Schedule:
    """All to rank 0 one by one, and back at once: an all-reduce that cannot be halved."""
    steps = [[add(rank, 0)] for rank in range(1, n)]
    return all_reduce(n, 1, [*steps, [copy(0, rank) for rank in range(1, n)]], owners=[0])


def drawn(n: int) -> Schedule:
    """The owners of the chunks are in another order on each second rank of the session."""
    owners = sorted(range(n), reverse=current_session().world.rank % 2 == 1)
    pairs = [(a, b, c) for c, b in enumerate(owners) for a in range(n) if a != b]
    there = [add(a, b, c) for a, b, c in pairs]
    return all_reduce(n, n, [there, [copy(b, a, c) for a, b, c in pairs]])


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """They can be named."""
    with mock.patch.object(registry, "_algorithms", dict(registry._algorithms)):
        for make in (double, lopsided, drawn):
            registry.register(make.__name__)(make)
        yield
