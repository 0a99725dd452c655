"""Sends and receives buffers over MPI, in parts of a suitable size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiddp.errors import PeerLostError
from mpiddp.launch.mpi.pauses import wait_until

if TYPE_CHECKING:
    from mpi4py import MPI

Array = np.ndarray[Any, Any]
LONGEST_PAUSE = 5e-4
"""Seconds between two looks for messages: the rank's own work needs the core, and the more the
longer nothing has come."""


class PendingMessage:
    """A buffer that is being sent or received; its owner must not touch it meanwhile."""

    def __init__(self, parts: Sequence[MPI.Request]) -> None:
        self._parts = parts
        self._done = 0
        self.is_empty = False
        """Whether an empty message has arrived."""

    def test(self, status: MPI.Status | None = None) -> bool:
        """Whether it is complete; with ``status``, of a receive, also whether it was empty.

        The parts of a message arrive in order, so one part at a time is tested.
        """
        while self._done < len(self._parts):
            if not self._parts[self._done].Test(status):
                return False
            self._done += 1
            if status is not None and self._done == 1 and status.Get_count() == 0:
                self.is_empty = True
                self.cancel()
        return True

    def cancel(self) -> None:
        for part in self._parts[self._done :]:
            part.Cancel()
            part.Wait()
        self._done = len(self._parts)


class ByteCounter:
    """Counts the bytes that the threads of this rank send to other ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._count += count

    def take(self) -> int:
        """Bytes since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count


@dataclass(frozen=True)
class Wire:
    """Sends messages between all ranks."""

    communicator: MPI.Intracomm
    """Used for nothing else."""
    names: tuple[str, ...]
    """Of all ranks, for messages to the user."""
    timeout: float
    """Seconds after which a rank that does not answer is lost."""
    longest: int
    """Bytes of a part; all ranks'."""
    counter: ByteCounter = field(default_factory=ByteCounter)

    def send(self, buffer: Array, rank: int, tag: int) -> PendingMessage:
        if rank != self.communicator.Get_rank():
            self.counter.add(buffer.nbytes)
        parts = _cut(buffer, self.longest)
        return PendingMessage([self.communicator.Isend(part, rank, tag) for part in parts])

    def receive(self, buffer: Array, rank: int, tag: int) -> PendingMessage:
        """Into a buffer as large as the one that is sent."""
        parts = _cut(buffer, self.longest)
        return PendingMessage([self.communicator.Irecv(part, rank, tag) for part in parts])

    def meet(self, is_due: Callable[[], bool], what: str) -> None:
        """Wait for all ranks, for any time until ``is_due()``, then for the time-out.

        Raises PeerLostError, which begins with ``what``.
        """
        request = self.communicator.Ibarrier()
        wait_until(lambda: request.Test() or is_due(), longest=LONGEST_PAUSE)
        if not wait_until(request.Test, self.timeout, LONGEST_PAUSE):
            raise PeerLostError(f"{what} within {self.timeout:g} s")

    def wait(self, message: PendingMessage, what: str, patience: float = 0.0) -> None:
        """Until it is complete, which may take ``patience`` seconds more than the others' time-out.

        Raises PeerLostError, which begins with ``what``.
        """
        seconds = self.timeout + patience
        if not wait_until(message.test, seconds, LONGEST_PAUSE):
            raise PeerLostError(f"{what} for {seconds:g} s")


def _cut(buffer: Array, longest: int) -> list[Array]:
    step = max(1, longest // buffer.itemsize)
    # An empty buffer is one part.
    return [buffer[start : start + step] for start in range(0, max(1, len(buffer)), step)]
