"""All ranks stop at the same place when a signal has reached any of them.

Ranks pass the same places, such as the ends of steps, in the same order, and perhaps not at the
same time. In each of them a rank counts up and looks at a flag: that is all that it costs. A thread
of each rank looks for a signal, and in the store for another rank's. Then it raises the flag and
publishes how many places its rank has passed. The rank that is the last to publish decides: all
stop in the place after the highest of these numbers. A rank that sees the flag waits for the
decision, so that nobody passes that place meanwhile; and nobody has passed it before.
"""

from __future__ import annotations

import atexit
import math
import threading
from dataclasses import dataclass
from typing import Any

from mpiddp.errors import PeerLostError
from mpiddp.launch.preemption_signals import SIGNALS, PreemptionSignals
from mpiddp.launch.session import find_session

PERIOD = 0.25
"""Seconds between two looks for a signal."""
QUESTIONS = 1000
"""To the store in a second, from all ranks."""
SHORT_PERIOD = 0.01
"""Seconds between two looks for the decision."""
CALL, COUNT, DECISION = "call", "count", "decision"
"""Keys."""


@dataclass(frozen=True)
class Peers:
    """The ranks that stop together."""

    rank: int = 0
    size: int = 1
    store: Any = None
    """torch's, shared by all ranks; None for one rank."""
    timeout: float = 300.0
    """Seconds to wait for the others' answers."""


class Preemption:
    """One rank's part. All ranks make as many of them, in the same order."""

    def __init__(self, signals: PreemptionSignals, peers: Peers) -> None:
        self._signals = signals
        self._peers = peers
        self._passed = 0
        """Places."""
        self._is_called = False
        self._has_stopped = False
        """Whether this rank has stopped because of a signal."""
        self._stop: float | None = None
        """The place in which all stop, counted from 1."""
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._period = max(PERIOD, peers.size / QUESTIONS)
        self._thread: threading.Thread | None = None
        self.reason = ""
        """Which signal reached which rank."""
        signals.is_heeded = True
        if peers.size > 1:
            number = peers.store.add(f"preemption/instances/{peers.rank}", 1)
            self._prefix = f"preemption/{number}"
            self._thread = threading.Thread(
                target=self._watch, name="mpiddp-agreement", daemon=True
            )
            self._thread.start()

    def is_due(self) -> bool:
        """In a place that all ranks pass: whether to stop here. The same answer on all.

        Raises PeerLostError where a rank does not answer in time.
        """
        self._passed += 1
        if self._thread is None:
            found = self._signals.received
            self.reason = f"{found.name} reached it" if found is not None else ""
            self._has_stopped = found is not None
            return self._has_stopped
        # In this order, and the thread reads them in the opposite one: either it sees that this
        # place is reached, or this thread sees that it is called.
        if not self._is_called:
            return False
        if not self._decided.wait(self._peers.timeout):
            raise PeerLostError(
                f"{self.reason}, and within {self._peers.timeout:g} s not all ranks said in which "
                "step they are"
            )
        assert self._stop is not None
        self._has_stopped = self._passed >= self._stop
        return self._has_stopped

    @property
    def is_next(self) -> bool:
        """Whether all ranks stop in the next place; may be read in any thread."""
        if self._peers.size == 1:
            return self._signals.received is not None
        return self._stop is not None and self._passed + 1 >= self._stop

    def close(self) -> None:
        """This rank passes no more places. Others that are called do not wait for it.

        Where it stops because of a signal, those that come later have no effect: TERM must not end
        it while its checkpoint is being written.
        """
        self._signals.is_heeded = self._has_stopped
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closed.set()
        thread.join()
        if not self._is_called:
            self._publish(math.inf)

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def _watch(self) -> None:
        store = self._peers.store
        while not self._closed.wait(self._period):
            try:
                if self._signals.received is not None:
                    reason = f"{self._signals.received.name} reached rank {self._peers.rank}"
                    store.compare_set(self._key(CALL), "", reason)
                elif not store.check([self._key(CALL)]):
                    continue
                self.reason = store.get(self._key(CALL)).decode()
                break
            except Exception:  # Rank 0 may have been stopped for a while.
                continue
        else:
            return
        self._is_called = True
        self._publish(self._passed)
        while not self._closed.wait(max(SHORT_PERIOD, self._peers.size / QUESTIONS)):
            try:
                if store.check([self._key(DECISION)]):
                    self._stop = float(store.get(self._key(DECISION)))
                    self._decided.set()
                    return
            except Exception:
                continue

    def _publish(self, passed: float) -> None:
        """Say how many places this rank has passed; decide if it is the last to say so."""
        store, size = self._peers.store, self._peers.size
        store.set(self._key(self._peers.rank), str(passed))
        if store.add(self._key(COUNT), 1) == size:
            found = store.multi_get([self._key(rank) for rank in range(size)])
            store.set(self._key(DECISION), str(max(map(float, found)) + 1))


def begin_preemption(rank: int, size: int) -> Preemption:
    """Listen to the signals in a script, until its session is closed; collective.

    ``rank`` and ``size``: of torch.distributed's default group.
    """
    session = find_session()
    signals = session.signals if session is not None else None
    if signals is None:
        signals = PreemptionSignals()
    signals.listen(SIGNALS.values())
    store = session.store if session is not None else None
    if store is None and size > 1:
        # A script of torchrun's. There is no public way to the store that it has made.
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
    preemption = Preemption(signals, Peers(rank, size, store))
    if session is not None:
        session.at_close(preemption.close)
    else:
        atexit.register(preemption.close)
    return preemption
