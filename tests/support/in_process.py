"""Ranks as threads of one process, for tests and for looking on without a launch.

A message is copied when both its ends are there, as a rendezvous: a sender that has not found its
receiver has not sent, and whoever changes its buffer meanwhile changes what arrives.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from mpiddp.collectives.compiler.instructions import ProgramMessage, RankProgram
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.collectives.transport import Describe
from mpiddp.collectives.transport.operators import Action, View, copy
from mpiddp.collectives.transport.waiting import Waiter

TURN = 5e-4
"""Seconds, a tenth of Python's own. After each turn a thread waits until the system runs another,
which takes tens of milliseconds on a busy machine: turns of 10 µs made tests last for minutes."""


def run_threads(work: Callable[[int], None], ranks: Iterable[int]) -> None:
    """Do each rank's work in its own thread; the interpreter switches often between them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


class _Address(NamedTuple):
    source: int
    destination: int
    tag: int


class Office:
    """Where the messages of all ranks meet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[_Address, tuple[View, threading.Event, bool]] = {}

    def hand_in(self, address: _Address, view: View, done: threading.Event, sends: bool) -> None:
        """One end of a message; the second to come copies it."""
        with self._lock:
            other = self._waiting.pop(address, None)
            if other is None:
                self._waiting[address] = (view, done, sends)
                return
        place, event, _ = other
        target, source = (place, view) if sends else (view, place)
        copy(target, source)()
        event.set()
        done.set()


class InProcessMessages:
    """The messages of one program."""

    def __init__(
        self, office: Office, rank: int, messages: Sequence[ProgramMessage], views: Sequence[View],
        signature: int, waiter: Waiter, describe: Describe,
    ) -> None:  # fmt: skip
        self._office = office
        self._rank = rank
        self._messages = messages
        self._views = views
        self._signature = signature
        self._waiter = waiter
        self._describe = describe
        self._done = [threading.Event() for _ in messages]

    def start(self, numbers: Sequence[int]) -> Action:
        return partial(self._start, numbers)

    def _start(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            message = self._messages[number]
            self._done[number].clear()
            ends = (self._rank, message.peer) if message.sends else (message.peer, self._rank)
            address = _Address(*ends, self._signature + message.tag)
            self._office.hand_in(address, self._views[number], self._done[number], message.sends)

    def finish(self, number: int) -> Action:
        done = self._done[number].is_set
        describe = partial(self._describe, self._messages[number])

        def finish() -> None:
            if not done():
                self._waiter.wait(done, describe)

        return finish


class InProcessMessenger:
    """One rank's way into the office."""

    def __init__(
        self, office: Office, rank: int, waiter: Waiter, longest: int, flows: bool
    ) -> None:
        self._office = office
        self._rank = rank
        self._waiter = waiter
        self._longest = longest
        self._flows = flows

    def cut(self, itemsize: int) -> BufferCut:
        most = max(1, self._longest // itemsize)
        return BufferCut(cell=most, message=most, flows=self._flows)

    def bind(
        self, program: RankProgram, views: Sequence[View], signature: int, describe: Describe
    ) -> InProcessMessages:
        return InProcessMessages(
            self._office, self._rank, program.messages, views, signature, self._waiter, describe
        )

    def progress(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is held."""
