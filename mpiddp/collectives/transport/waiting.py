"""How a rank waits for another rank: one policy for all ranks and all waits, barriers included.

A wait polls for a while, and then sleeps. With a core for each rank, ranks spin while they poll. In
shared memory they poll for longer than the kernel lets another process run: a rank that slept
beside a busy process would come back on the core of the rank that it waits for, and stay there. A
rank yields its core if another rank waits on the same one. With fewer cores than ranks they always
yield. All ranks use one policy: a rank that spins can keep a core from the one that it
waits for.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.mpi.pauses import wait_until

FIRST_SPINS, FIRST_YIELDS = 50, 20
"""Pauses before ``Waiter.wait`` is called, which takes about as long as twenty tests."""
POLL, LONG_POLL = 1e-4, 1e-2
"""Seconds before a wait sleeps; the longer time is for ranks that spin and know each other's
cores. A process may run for some 4 ms while another one waits for its core."""
LONGEST_PAUSE = 1e-3
"""Seconds of a sleep."""


class Policy(enum.Enum):
    """What a rank does between two tests of what it waits for."""

    SPIN = "spin"
    """Test again, unless another rank is on this core; sleep if it takes long."""
    YIELD = "yield"
    """Let another process have the core (sched_yield), and sleep if it takes long."""
    SLEEP = "sleep"
    """Sleep at once."""


def choose_policy(wishes: Sequence[str], nodes: Iterable[tuple[int, float]]) -> Policy:
    """The policy of all ranks.

    Args:
        wishes: each rank's value of MPIDDP_WAIT, empty if it is not set.
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


def _do_nothing() -> None:
    pass


@dataclass
class Waiter:
    """Waits as the policy says, with a timeout."""

    policy: Policy
    seconds: float
    """Of one wait, after which the peer is considered lost."""

    def set_seconds(self, seconds: float) -> None:
        """For waits that begin from now on."""
        self.seconds = seconds

    @property
    def first_pauses(self) -> tuple[Callable[[], object], ...]:
        """What to do between the first tests of a word in memory, before ``wait`` is called.

        In a small call all ranks mostly come while these last.
        """
        if self.policy is Policy.SLEEP:
            return ()
        spins = self.policy is Policy.SPIN
        return FIRST_SPINS * (_do_nothing,) if spins else FIRST_YIELDS * (os.sched_yield,)

    def wait(
        self,
        test: Callable[[], object],
        describe: Callable[[], str],
        spare_core: Callable[[], object] | None = None,
    ) -> None:
        """Return once ``test()`` is true.

        Raises PeerLostError after ``seconds``, not counting those during which this process was
        stopped, with ``describe()``, which says for whom and where it waited.

        Args:
            spare_core: yields the core if another rank needs it; None if that is unknown.
        """
        look, pause = self._choose_polling(spare_core)
        polls_until = time.monotonic() + min(look, self.seconds)
        while time.monotonic() < polls_until:
            if test():
                return
            pause()
        if not wait_until(test, self.seconds, LONGEST_PAUSE):
            raise PeerLostError(
                f"{describe()} for {self.seconds:g} s: it is gone, or it did not make the same "
                "call; MPIDDP_DEBUG=1 compares the calls; to wait longer, increase --timeout"
            )

    def _choose_polling(
        self, spare_core: Callable[[], object] | None
    ) -> tuple[float, Callable[[], object]]:
        """For how many seconds to poll, and what to do between two tests."""
        if self.policy is Policy.SLEEP:
            return 0.0, _do_nothing
        if threading.current_thread() is not threading.main_thread():
            # The program goes on beside this thread: it needs the interpreter's lock, which
            # sched_yield releases only from Python 3.12 on.
            return POLL, partial(time.sleep, 0)
        if self.policy is Policy.YIELD:
            return POLL, os.sched_yield
        return (POLL, _do_nothing) if spare_core is None else (LONG_POLL, spare_core)
