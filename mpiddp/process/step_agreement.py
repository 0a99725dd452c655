"""All ranks act after the same step on what one of them alone knows.

A signal has reached one rank; an interval of time is over on another's clock. Ranks pass the same
places, such as the ends of steps, in the same order, and perhaps not at the same time. In each
place a rank counts up and looks at a flag: that is all that it costs. A thread of each rank asks
for this rank's wishes, and looks in the store for another rank's. Then it raises the flag and
publishes how many places its rank has passed. The rank that is the last to publish decides: all act
in the place after the highest of these numbers. A rank that sees the flag waits for the decision,
so that nobody passes that place meanwhile; and nobody has passed it before. Then the next round
begins.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from mpiddp.errors import PeerLostError
from mpiddp.process.preemption_signals import PreemptionSignals

PERIOD = 0.25
"""Seconds between two looks for a wish."""
QUESTIONS = 1000
"""To the store in a second, from all ranks."""
SHORT_PERIOD = 0.01
"""Seconds between two looks for the decision."""
LONGEST_END = 10.0
"""Seconds to wait for a thread at the end of the program."""
CALL, COUNT, DECISION = "call", "count", "decision"
"""Keys."""
PREEMPTED = "preempted"
"""The wish to leave the cluster to another job."""

Wish: TypeAlias = Callable[[], str]
"""Why this rank wishes it now; empty if it does not. Asked in a thread, until it is granted."""
Due: TypeAlias = Mapping[str, str]
"""What all ranks do in this place, and why, by the wish's name."""

NOTHING: Due = {}


@dataclass(frozen=True)
class AgreeingRanks:
    """The ranks that act together."""

    rank: int = 0
    size: int = 1
    store: Any = None
    """torch's, shared by all ranks; None for one rank."""
    timeout: float = 300.0
    """Seconds to wait for the others' answers."""


class _Round:
    """From one decision to the next, on one rank."""

    def __init__(self) -> None:
        self.is_called = False
        self.due = NOTHING
        self.decided = threading.Event()
        self.place: float | None = None
        """In which all act, counted from 1."""
        self.over = threading.Event()
        """All has been done that was due."""


class StepAgreement:
    """One rank's part. All ranks make as many of them, in the same order."""

    def __init__(
        self,
        members: AgreeingRanks,
        wishes: Mapping[str, Wish] | None = None,
        signals: PreemptionSignals | None = None,
    ) -> None:
        """``wishes``: by name. They are asked every PERIOD seconds, on one rank in each place.

        ``signals``: those that preempt the job, which are the wish PREEMPTED. From now on TERM does
        not end this process at once.
        """
        self._members = members
        self._signals = signals
        self._wishes = dict(wishes or {})
        if signals is not None:
            signals.heed(True)
            self._wishes[PREEMPTED] = self._find_signal
        self._has_stopped = False
        """Whether all leave because of a signal."""
        self._passed = 0
        """Places."""
        self._number = 0
        """Of the round."""
        self._round = _Round()
        self._closed = threading.Event()
        self._period = max(PERIOD, members.size / QUESTIONS)
        self._thread: threading.Thread | None = None
        if members.size > 1:
            number = members.store.add(f"agreement/instances/{members.rank}", 1)
            self._prefix = f"agreement/{number}"
            self._thread = threading.Thread(
                target=self._watch, name="mpiddp-agreement", daemon=True
            )
            self._thread.start()
            # The interpreter cannot end while a thread is inside torch: that aborts the process.
            weakref.finalize(self, _end, self._closed, self._thread)

    def find_due(self) -> Due:
        """In a place that all ranks pass: what all do here. The same names on all.

        Raises PeerLostError if a rank does not answer in time.
        """
        self._passed += 1
        due = self._ask() if self._thread is None else self._find_decided()
        if PREEMPTED in due:
            self._has_stopped = True
        return due

    def is_preempted(self) -> bool:
        """Pass a place, as `find_due` does: whether all ranks leave because of a signal."""
        return self._has_stopped or PREEMPTED in self.find_due()

    def _find_decided(self) -> Due:
        now = self._round
        if now.place is not None and self._passed > now.place:
            # What was due in the place before has been done: wishes may be asked again.
            now.over.set()
            return NOTHING
        # In this order, and the thread reads them in the opposite one: either it sees that this
        # place is reached, or this thread sees that it is called.
        if not now.is_called:
            return NOTHING
        if not now.decided.wait(self._members.timeout):
            raise PeerLostError(
                f"{describe(now.due)}, and within {self._members.timeout:g} s not all ranks said "
                "in which step they are"
            )
        assert now.place is not None
        return now.due if self._passed >= now.place else NOTHING

    def _find_signal(self) -> str:
        assert self._signals is not None
        found = self._signals.received
        if found is None:
            return ""
        whom = "it" if self._members.size == 1 else f"rank {self._members.rank}"
        return f"{found.name} reached {whom}"

    def stop(self) -> None:
        """After an error: no wish is asked for, and signals end the process. Waits for nothing."""
        if self._signals is not None:
            self._signals.heed(False)
        self._closed.set()

    def close(self) -> None:
        """This rank passes no more places. Others that are called do not wait for it."""
        if self._signals is not None:
            # TERM must not end a process that leaves while its checkpoint is being written.
            self._signals.heed(self._has_stopped)
        if self._thread is None:
            return
        self._closed.set()
        self._thread.join()
        if not self._round.is_called:
            with contextlib.suppress(Exception):  # Who had the store may have left already.
                self._publish(math.inf)
        self._thread = None

    def _ask(self) -> Due:
        due: dict[str, str] = {}
        for name, wish in self._wishes.items():
            if why := wish():
                due[name] = why
        return due

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{self._number}/{name}"

    def _watch(self) -> None:
        while self._wait_for_call() and self._wait_for_decision():
            now = self._round
            while not now.over.wait(self._period):
                if self._closed.is_set():
                    return
            self._number += 1
            self._round = _Round()

    def _wait_for_call(self) -> bool:
        """Whether all ranks were called, by this one or another; False once it is closed."""
        store, now = self._members.store, self._round
        while not self._closed.wait(self._period):
            try:
                if wished := self._ask():
                    store.compare_set(self._key(CALL), "", json.dumps(wished))
                elif not store.check([self._key(CALL)]):
                    continue
                now.due = json.loads(store.get(self._key(CALL)))
            except Exception:  # Rank 0 may have been stopped for a while.
                continue
            now.is_called = True
            self._publish(self._passed)
            return True
        return False

    def _wait_for_decision(self) -> bool:
        """Whether there is one; False once it is closed."""
        store, now = self._members.store, self._round
        while not self._closed.wait(max(SHORT_PERIOD, self._members.size / QUESTIONS)):
            try:
                if store.check([self._key(DECISION)]):
                    now.place = float(store.get(self._key(DECISION)))
                    now.decided.set()
                    return True
            except Exception:  # As above.
                continue
        return False

    def _publish(self, passed: float) -> None:
        """Say how many places this rank has passed; decide if it is the last to say so."""
        store, size = self._members.store, self._members.size
        store.set(self._key(self._members.rank), str(passed))
        if store.add(self._key(COUNT), 1) == size:
            found = store.multi_get([self._key(rank) for rank in range(size)])
            store.set(self._key(DECISION), str(max(map(float, found)) + 1))


def _end(closed: threading.Event, thread: threading.Thread) -> None:
    """At the end of the program."""
    closed.set()
    thread.join(LONGEST_END)


def describe(due: Due) -> str:
    """Why, for a message."""
    return "; ".join(due.values())
