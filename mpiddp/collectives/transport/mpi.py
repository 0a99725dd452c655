"""Messages over MPI: persistent requests on buffers, tested as the wait policy says."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mpiddp.collectives.compiler.instructions import ProgramMessage, RankProgram
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.collectives.transport import Describe
from mpiddp.collectives.transport.operators import Action, View
from mpiddp.collectives.transport.waiting import Waiter
from mpiddp.errors import ConfigurationError
from mpiddp.launch.mpi.mpi import find_thread_limit

if TYPE_CHECKING:
    from mpi4py import MPI

LONGEST_MESSAGE = 1 << 30
"""Bytes; MPI counts in 32 bits."""
NETWORK_MESSAGE = 60 << 10
"""Bytes of a message between nodes. With its header it stays within the eager limit of Open MPI's
TCP transport (64 KiB), beyond which each message needs a handshake. While one message is added, the
next one is on its way."""


def may_call() -> bool:
    """Whether this thread may ever call MPI."""
    from mpi4py import MPI

    return MPI.Query_thread() >= MPI.THREAD_SERIALIZED or MPI.Is_thread_main()


def check_thread() -> None:
    """Raise ConfigurationError in a thread that must never call MPI."""
    if not may_call():
        raise ConfigurationError(
            f"this thread may not call MPI, which has {find_thread_limit()} in this process: make "
            "calls over transport mpi in the thread that initialised MPI"
        )


class MpiMessages:
    def __init__(
        self, requests: Sequence[MPI.Prequest], messages: Sequence[ProgramMessage], waiter: Waiter,
        describe: Describe,
    ) -> None:  # fmt: skip
        self._requests = requests
        self._messages = messages
        self._waiter = waiter
        self._describe = describe
        self._is_open = not find_thread_limit()
        """Whether all threads may call MPI."""
        # mpi4py does not free persistent requests. At exit, MPI is gone already.
        self.free = weakref.finalize(self, _free, requests, os.getpid(), self._is_open)
        self.free.atexit = False

    def start(self, numbers: Sequence[int]) -> Action:
        requests = [self._requests[number] for number in numbers]
        start: Action = partial(type(requests[0]).Startall, requests)
        if len(numbers) == 1:
            start = requests[0].Start
        if self._is_open:
            return start

        def start_here() -> None:
            check_thread()
            start()

        return start_here

    def finish(self, number: int) -> Action:
        test, wait = self._requests[number].Test, self._waiter.wait
        describe = partial(self._describe, self._messages[number])
        pauses = self._waiter.first_pauses

        def finish() -> None:
            if test():
                return
            for pause in pauses:
                pause()
                if test():
                    return
            wait(test, describe)

        return finish


def _free(requests: Sequence[MPI.Prequest], process: int, is_open: bool) -> None:
    if os.getpid() != process:
        # In a forked child: they are its parent's.
        return
    if not is_open and threading.current_thread() is not threading.main_thread():
        # The garbage collector ran in this thread: the requests stay until MPI ends.
        return
    for request in requests:
        request.Free()


class MpiMessenger:
    """Messages over a communicator that it owns, and that is used for nothing else."""

    def __init__(
        self, communicator: MPI.Intracomm, waiter: Waiter, longest: int = LONGEST_MESSAGE
    ) -> None:
        """``longest``: bytes of a message; longer ones are sent in parts."""
        from mpi4py import MPI

        self._communicator = communicator
        self._waiter = waiter
        self._longest = min(longest, LONGEST_MESSAGE)
        self._byte = MPI.BYTE
        highest = communicator.Get_attr(MPI.TAG_UB)
        assert isinstance(highest, int)
        self._tags = highest + 1
        self._bound: weakref.WeakSet[MpiMessages] = weakref.WeakSet()

    def cut(self, itemsize: int) -> BufferCut:
        most = max(1, self._longest // itemsize)
        return BufferCut(cell=most, message=most, flows=True)

    def bind(
        self, program: RankProgram, views: Sequence[View], signature: int, describe: Describe
    ) -> MpiMessages:
        """Make persistent requests; tags tell calls apart."""
        check_thread()
        requests = []
        for message, view in zip(program.messages, views, strict=True):
            make = self._communicator.Send_init if message.sends else self._communicator.Recv_init
            tag = (signature + message.tag) % self._tags
            requests.append(make([view, view.nbytes, self._byte], message.peer, tag))
        bound = MpiMessages(requests, program.messages, self._waiter, describe)
        self._bound.add(bound)
        return bound

    def progress(self) -> None:
        """Any call lets MPI make progress. Nothing if this thread may not call it."""
        if self._communicator and may_call():
            self._communicator.Iprobe()

    def close(self) -> None:
        """Free all requests and the communicator. Collective.

        Not for a rank whose call failed: messages to it may still be under way.
        """
        for bound in list(self._bound):
            bound.free()
        self._communicator.Free()
