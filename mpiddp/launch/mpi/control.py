"""Small collective calls of all ranks of a launch, beside the user's own messages."""

from __future__ import annotations

import array
import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class ControlChannel:
    """Calls over a separate communicator; without MPI the process is alone in them."""

    def __init__(self, world: World, communicator: MPI.Intracomm | None, timeout: float) -> None:
        """``timeout``: seconds of each call. The channel frees ``communicator``."""
        self.world = world
        self._own = communicator
        self._timeout = timeout
        self._begun = self._ended = 0

    @property
    def timeout(self) -> float:
        """Seconds for each collective."""
        return self._timeout

    def agree(self, value: T, what: str = "value") -> T:
        """Return ``value`` if all ranks hold the same one. Collective.

        ``value`` is made of None, bool, int, float, str, bytes, dataclasses of these, and
        tuples, lists and dicts of these; they are compared by their ``repr``.

        Raises:
            ConfigurationError: on every rank, saying which ranks differ from rank 0.
        """
        if self._own is None:
            return value
        digest = hashlib.sha256(repr(value).encode()).digest()
        first = self.broadcast(digest)
        if not self.any(digest != first):
            return value
        # Only now, when all have answered, is it worth asking everyone.
        rows = self._own.allgather((digest, repr(value)[:120]))
        odd = [rank for rank, row in enumerate(rows) if row[0] != first]
        names = ", ".join(map(str, odd[:8])) + (", …" if len(odd) > 8 else "")
        raise ConfigurationError(
            f"{what} must be the same on all ranks, but it differs from rank 0's on rank {names}: "
            f"rank 0 has {rows[0][1]}, rank {odd[0]} has {rows[odd[0]][1]}"
        )

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank. Collective.

        Raises:
            PeerLostError: not all ranks came within the session's timeout.
        """
        return find_first(self, [flag])[0] is not None

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value``, on every rank; any object that pickle takes. Collective.

        Raises:
            PeerLostError: rank 0 did not come within the session's timeout.
        """
        return self._exchange("broadcast", lambda own: own.bcast(value), value)

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank; any objects that pickle takes. Collective.

        Raises:
            PeerLostError: not all ranks came within the session's timeout.
        """
        return self._exchange("gather", lambda own: own.allgather(value), [value])

    def duplicate(self) -> MPI.Intracomm | None:
        """A communicator over all ranks for the caller alone, who frees it; None without MPI.

        Collective.

        Raises:
            PeerLostError: not all ranks came within the session's timeout.
        """
        if self._own is None:
            return None
        communicator, request = self._own.Idup()
        self._wait(request, "duplicate")
        return communicator

    def meet(self) -> None:
        """Wait for all ranks, however long they work. Collective."""
        if self._own is None:
            return
        try:
            mpi.wait(self._own.Ibarrier())
        except RuntimeError as error:
            raise _mismatch("the end of this rank's session") from error

    def _exchange(self, what: str, call: Callable[[mpi.SleepingCommunicator], T], alone: T) -> T:
        """What ``call`` returns; ``alone`` without MPI."""
        if self._own is None:
            return alone
        own = mpi.SleepingCommunicator(self._own, lambda request: self._wait(request, what))
        try:
            return call(own)
        except (EOFError, pickle.UnpicklingError) as error:
            raise _mismatch(f"session.{what}()") from error

    def _wait(self, request: MPI.Request, what: str) -> None:
        self._begun += 1
        try:
            came = mpi.wait(request, self._timeout)
        except RuntimeError as error:
            raise _mismatch(f"session.{what}()") from error
        if not came:
            raise PeerLostError(
                f"session.{what}() waited {self._timeout:g} s for the other ranks: every rank "
                "must call it; to wait longer, increase --timeout SECONDS"
            )
        self._ended += 1


# Not methods, since a session has all methods of a channel.


def find_first(channel: ControlChannel, flags: Sequence[bool]) -> list[int | None]:
    """For each flag, the lowest rank on which it is true, or None. Collective."""
    if channel._own is None:
        return [0 if flag else None for flag in flags]
    from mpi4py import MPI

    none = channel.world.size
    mine = array.array("q", [channel.world.rank if flag else none for flag in flags])
    first = array.array("q", mine)
    channel._wait(
        channel._own.Iallreduce([mine, MPI.INT64_T], [first, MPI.INT64_T], op=MPI.MIN), "any"
    )
    return [rank if rank < none else None for rank in first]


def count_exchanges(channel: ControlChannel) -> tuple[int, int]:
    """How many exchanges this rank has begun, and how many have come to their end.

    Alike on all ranks. After one that was interrupted, or came to no end, later ones do not match.
    """
    return channel._begun, channel._ended


def hand_over(channel: ControlChannel) -> MPI.Intracomm | None:
    """The communicator, for another channel, which frees it; none is left here."""
    own, channel._own = channel._own, None
    return own


def free(channel: ControlChannel) -> None:
    """Give the communicator back. Collective."""
    communicator = hand_over(channel)
    if communicator is not None:
        communicator.Free()


def _mismatch(what: str) -> PeerLostError:
    """In place of mpi4py's own error for calls that do not match."""
    return PeerLostError(
        f"{what} was matched with a different call on another rank: all ranks must make the same "
        "calls, and leave the session together"
    )
