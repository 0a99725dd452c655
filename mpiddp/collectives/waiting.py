"""How a rank waits for another one: one policy for all ranks and all waits, barriers included.

Ranks that spin beside ranks that sleep keep the very ones from their cores that they wait for, so
the policy is agreed once. With a core for each rank spinning is quickest; with fewer, a rank that
waits gives its core away.
"""

from __future__ import annotations

import enum
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mpiddp.errors import ConfigurationError, PeerLostError

SPINS = 3000
"""Tests before a spinning rank begins to yield: some 1 ms, longer than peers usually differ."""
FIRST_SPINS, FIRST_YIELDS = 50, 20
"""Pauses before a wait is begun in earnest, which takes about as long as twenty tests."""
ROUNDS_PER_LOOK = 256
"""Tests between two looks at the clock."""
FIRST_PAUSE = 2e-5
LONGEST_PAUSE = 1e-3


class Policy(enum.Enum):
    """What a rank does between two tests of what it waits for."""

    SPIN = "spin"
    """Test again; yield only where it takes long."""
    YIELD = "yield"
    """Let another process have the core (sched_yield)."""
    SLEEP = "sleep"
    """Sleep, longer each time up to a millisecond."""


def choose_policy(wishes: Sequence[str], nodes: Iterable[tuple[int, float]]) -> Policy:
    """The policy of all ranks.

    Args:
        wishes: each rank's value of MPIDDP_WAIT, empty where it is not set.
        nodes: for each node its ranks, and the cores that these may use between them.

    Raises:
        ConfigurationError: a wish that is no policy, or ranks that wish for different ones.
    """
    possible = [policy.value for policy in Policy]
    for rank, wish in enumerate(wishes):
        if wish and wish not in possible:
            raise ConfigurationError(
                f"MPIDDP_WAIT on rank {rank}: expected {', '.join(possible)}, found {wish!r}"
            )
    if len(set(wishes)) > 1:
        odd = next(rank for rank, wish in enumerate(wishes) if wish != wishes[0])
        raise ConfigurationError(
            f"MPIDDP_WAIT must be the same on all ranks: rank 0 has {wishes[0]!r}, rank {odd} has "
            f"{wishes[odd]!r}"
        )
    if wishes[0]:
        return Policy(wishes[0])
    crowded = any(ranks > cores for ranks, cores in nodes)
    return Policy.YIELD if crowded else Policy.SPIN


def count_cores(affinities: Sequence[Sequence[int]], quotas: Sequence[float] = ()) -> float:
    """The cores that ranks of one node may use between them: at most their container's share."""
    return min(len(set().union(*affinities)), max(quotas, default=math.inf))


def find_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """The cores' worth of time that this process's container has (cgroup v2); no limit is inf."""
    try:
        share, period = file.read_text().split()
        return float(share) / float(period)
    except (OSError, ValueError):
        # There is no such file, or it says "max".
        return math.inf


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Waiter:
    """Waits as the policy says, and not for ever."""

    policy: Policy
    seconds: float
    """Of one wait, before the peer is taken to be lost."""

    @property
    def first_pauses(self) -> tuple[Callable[[], object], ...]:
        """What to do between the first tests of a word in memory, before ``wait`` is called.

        In a small call all ranks mostly come while these last.
        """
        pauses: dict[Policy, tuple[Callable[[], object], ...]] = {
            Policy.SPIN: FIRST_SPINS * (_do_nothing,),
            Policy.YIELD: FIRST_YIELDS * (os.sched_yield,),
        }
        return pauses.get(self.policy, ())

    def wait(self, test: Callable[[], object], describe: Callable[[], str]) -> None:
        """Return once ``test()`` is true.

        Raises PeerLostError after ``seconds``, with ``describe()``, which says for whom and where
        it waited.
        """
        end = time.monotonic() + self.seconds
        wait = self._sleep if self.policy is Policy.SLEEP else self._spin
        if not wait(test, end):
            raise PeerLostError(
                f"{describe()} for {self.seconds:g} s: it is gone, or it did not make the same "
                "call; MPIDDP_DEBUG=1 compares the calls, a longer timeout waits longer"
            )

    def _spin(self, test: Callable[[], object], end: float) -> bool:
        give_way: Callable[[], object] = os.sched_yield
        if threading.current_thread() is not threading.main_thread():
            # The program goes on beside this thread, so the interpreter's lock is given away, too,
            # which sched_yield does only from Python 3.12 on.
            give_way = partial(time.sleep, 0)
        elif self.policy is Policy.SPIN:
            for _ in range(SPINS):
                if test():
                    return True
        while time.monotonic() < end:
            for _ in range(ROUNDS_PER_LOOK):
                if test():
                    return True
                give_way()
        return bool(test())

    def _sleep(self, test: Callable[[], object], end: float) -> bool:
        pause = FIRST_PAUSE
        while time.monotonic() < end:
            if test():
                return True
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        # This rank may have been stopped meanwhile, while all others came.
        return bool(test())
