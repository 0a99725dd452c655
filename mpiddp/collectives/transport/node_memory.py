"""Lets the ranks of one node work in each other's memory.

Each rank has some words in a block that all ranks map: its progress in the present call, what the
call is, and where its buffer lies. Only the rank itself writes them. There is no lock and no system
call. This needs stores that become visible in their order, which x86-64 guarantees; other
processors are refused.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mpiddp.collectives.transport.operators import Action, MemorySpan, View, copy, map_memory
from mpiddp.collectives.transport.shared_memory import (
    SegmentAddress,
    SharedMemory,
    address_of,
    view_of,
)
from mpiddp.collectives.transport.single_copy import bind_copy
from mpiddp.collectives.transport.waiting import Waiter
from mpiddp.errors import ConfigurationError, DifferentCallError, PeerFailedError, PeerLostError
from mpiddp.process.rank_process import POLL_SECONDS, PeerProcess

WORDS = 32
"""Of 8 bytes, for each rank: one pair of cache lines for its progress, one for the rest, since
processors fetch lines in pairs."""
_HEADER, _VERSION, _KIND, _GIVEN_UP, _CORE = 16, 17, 18, 22, 23
"""Words of a rank: number and signature of its call; how often its buffer has changed; where the
buffer lies, in four words; how its call has failed, or 0; the core on which it waited last,
counted from 1, or 0."""
_LOST, _DIFFERS = 1, 2
"""Any failure, or another rank made a different call."""
NEXT_CALL = 1 << 24
"""A rank's progress is this times the number of its call, plus its stage in that call."""
MAILBOX = 64 << 10
"""Bytes of a mailbox, for small buffers; each rank has two."""
BLOCK = 256 << 10
"""Bytes that are added and passed on at once, while they are in cache."""

PRIVATE, SEGMENT = 0, 1
"""Where a buffer lies: in private memory, or in a segment that peers can map."""

_find_core: Callable[[], int] = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)
"""The core that this thread runs on, or -1. It is no system call. ctypes releases the interpreter's
lock meanwhile, so that other threads get it while this one looks."""


class Location(NamedTuple):
    """Where a rank's buffer lies, for the other ranks."""

    kind: int
    first: int
    """Address of private memory, number of a segment."""
    second: int = 0
    """Descriptor of a segment."""
    third: int = 0
    """Offset in it, in bytes."""


@dataclass(frozen=True)
class MappedMemory:
    """A peer's buffer in memory that this process has mapped."""

    span: MemorySpan

    def read(self, start: int, target: View, describe: Callable[[], str]) -> Action:
        """Fills ``target`` from element ``start`` on; errors begin with ``describe()``."""
        return copy(target, self.span.slice(start, start + len(target)))

    def write(self, start: int, source: View, describe: Callable[[], str]) -> Action:
        """Puts ``source`` at element ``start``."""
        return copy(self.span.slice(start, start + len(source)), source)

    def operand(self, start: int, count: int) -> View | None:
        """A view of the elements; None if they must be read first."""
        return self.span.operand(start, start + count)


@dataclass(frozen=True)
class PrivateMemory:
    """A peer's buffer in its private memory; the methods are those of ``MappedMemory``."""

    process: int
    address: int
    dtype: torch.dtype

    def read(self, start: int, target: View, describe: Callable[[], str]) -> Action:
        return bind_copy(self.process, target, self._find(start), describe)

    def write(self, start: int, source: View, describe: Callable[[], str]) -> Action:
        return bind_copy(self.process, source, self._find(start), describe, writes=True)

    def operand(self, start: int, count: int) -> View | None:
        return None

    def _find(self, start: int) -> int:
        return self.address + start * self.dtype.itemsize


PeerMemory = MappedMemory | PrivateMemory


def is_ordered() -> bool:
    """Whether this processor makes stores visible in order."""
    return platform.machine().lower() in ("x86_64", "amd64")


def block_size(ranks: int) -> int:
    """Bytes of the block that so many ranks share."""
    return ranks * (8 * WORDS + 2 * MAILBOX)


def _join(actions: Sequence[Action]) -> Action:
    """One action that does all of them."""
    if len(actions) == 1:
        return actions[0]

    def act() -> None:
        for action in actions:
            action()

    return act


class NodeMemory:
    """One rank's view of the memory that the ranks of its node share."""

    def __init__(
        self,
        rank: int,
        processes: Mapping[int, int],
        block: mmap.mmap,
        waiter: Waiter,
        shared_memory: SharedMemory,
        can_copy: bool,
    ) -> None:
        """
        Args:
            processes: of this node's ranks, by number, in the same order on all of them.
            block: ``block_size`` bytes, zeros at first, mapped by all.
            can_copy: whether these ranks can read and write each other's private memory.
        """
        self.rank = rank
        self.ranks = tuple(processes)
        self._processes = processes
        self._peers = [PeerProcess(process) for process in processes.values()]
        self.waiter = waiter
        self._pauses = waiter.first_pauses
        self.shared_memory = shared_memory
        self.can_copy = can_copy
        self._progress: list[Callable[[], None]] = []
        self.base = 0
        """This rank's progress at stage 0 of its present call."""
        self._mapped = block
        self._block = memoryview(block)
        self.words = self._block[: 8 * WORDS * len(processes)].cast("q")
        self.places = {each: WORDS * index for index, each in enumerate(processes)}
        """Index of each rank's first word."""
        self._cores = self.words[_CORE::WORDS]
        self._mailboxes = 8 * WORDS * len(processes)
        """Where they begin in the block."""
        self._own = self.places[rank]
        self._told: Location | None = None
        self.parity = 0
        """Which of its two mailboxes this rank used last."""

    def help_in_waits(self, progress: Callable[[], None]) -> None:
        """Call ``progress`` in all waits from now on, also in calls that send no messages.

        A message of an earlier call may still be under way: MPI may have said that it is sent, and
        yet need this rank's calls to deliver it. A rank that waits for it comes to no other call.
        """
        self._progress.append(progress)

    def enter(self, signature: int, location: Location | None) -> None:
        """Begin a call: from now on the peers may work in this rank's buffer.

        ``signature``: 24 bits that differ between different calls. ``location`` is None if no
        rank needs it.
        """
        words, own = self.words, self._own
        self.base += NEXT_CALL
        words[own + _HEADER] = self.base | signature
        if location is not None and location != self._told:
            self._told = location
            words[own + _VERSION] += 1
            for word, value in enumerate(location, own + _KIND):
                words[word] = value
        words[own] = self.base

    def versions(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Numbers that change when the buffers of these ranks, which have entered, change."""
        words, places = self.words, self.places
        return tuple([words[places[rank] + _VERSION] for rank in ranks])

    def location(self, rank: int) -> Location:
        """Where the buffer of a rank lies, once the rank has entered."""
        first = self.places[rank] + _KIND
        return Location(*self.words[first : first + len(Location._fields)])

    def find_memory(
        self, rank: int, location: Location, count: int, dtype: torch.dtype
    ) -> PeerMemory:
        """The buffer of ``rank``, which is at that location.

        Raises PeerLostError if it is gone, ConfigurationError if it cannot be mapped.
        """
        process = self._processes[rank]
        if location.kind == PRIVATE:
            return PrivateMemory(process, location.first, dtype)
        place = SegmentAddress(location.first, location.second, location.third)
        try:
            memory = self.shared_memory.map_foreign(process, place)
        except (FileNotFoundError, ProcessLookupError):
            raise PeerLostError(
                f"rank {rank}'s tensor cannot be mapped: its process is gone, or has let go of it"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"rank {rank}'s tensor cannot be mapped: {error}") from None
        view = view_of(memory, place.offset, count, dtype)
        return MappedMemory(MemorySpan(view, dtype, memory))

    def mailbox(self, rank: int, parity: int, count: int, dtype: torch.dtype) -> MemorySpan:
        """A mailbox of a rank; only that rank writes it."""
        address = address_of(self._mapped) + self._find_mailbox(rank, parity)
        return MemorySpan(map_memory(address, count, dtype), dtype)

    def _find_mailbox(self, rank: int, parity: int) -> int:
        """Where it begins in the block."""
        return self._mailboxes + (2 * self.ranks.index(rank) + parity) * MAILBOX

    def publish(self, stage: int) -> Action:
        """Publishes that this rank has reached a stage of the present call."""
        words, own = self.words, self._own

        def publish() -> None:
            words[own] = self.base + stage

        return publish

    def wait(self, rank: int, stage: int, describe: Callable[[], str]) -> Action:
        """Waits for a stage of another rank."""
        words, place, await_rank = self.words, self.places[rank], self._await

        def wait() -> None:
            target = self.base + stage
            if words[place] < target:
                await_rank(place, target, describe)

        return wait

    def _await(self, place: int, target: int, describe: Callable[[], str]) -> None:
        words = self.words
        for pause in self._pauses:
            pause()
            if words[place] >= target:
                return
        process = self._peers[place // WORDS]
        due = time.monotonic() + POLL_SECONDS

        def test() -> bool:
            nonlocal due
            for progress in self._progress:
                progress()
            if self.has_reached(place, target, describe):
                return True
            if time.monotonic() > due:
                due = time.monotonic() + POLL_SECONDS
                # It may have come here, and then ended.
                if process.has_ended() and not self.has_reached(place, target, describe):
                    raise PeerLostError(f"{describe()}, whose process is gone")
            return False

        # With messages there may be other nodes, and these may be containers on the same cores.
        self.waiter.wait(test, describe, None if self._progress else self._spare_core)

    def _spare_core(self) -> None:
        """Yield this core if another rank of the node waits on it too, or did when it last waited.

        It may be the rank that this one waits for, which needs the core. Other processes get
        nothing: from Linux 6.12 on, who yields to a busy one has its next turn after some 4 ms.
        """
        core, place = 1 + _find_core(), self._own + _CORE
        if self.words[place] != core:
            self.words[place] = core
        if core and self._cores.tolist().count(core) > 1:
            os.sched_yield()

    def meet(
        self,
        ranks: Iterable[int],
        signature: int,
        describe: Callable[[int], str],
        word: int = _HEADER,
    ) -> None:
        """Wait until these ranks have entered the present call, and check that it is the same.

        ``word``: the one that has the signature. Raises ConfigurationError for another call.
        """
        words, base = self.words, self.base
        for rank in ranks:
            place = self.places[rank]
            if words[place] < base:
                self._await(place, base, partial(describe, rank))
            found = words[place + word]
            # A rank that has left the call may have begun the next one.
            if found != base | signature and found - base < NEXT_CALL:
                raise DifferentCallError(
                    f"rank {rank} makes another collective call than rank {self.rank}, or with "
                    "another count, type or algorithm: MPIDDP_DEBUG=1 shows both"
                )

    def has_reached(self, place: int, target: int, describe: Callable[[], str]) -> bool:
        """Whether the rank has reached ``target``. Raises PeerFailedError if its call failed."""
        # Read first: between two looks it may reach the target, and fail in its next call.
        failure = self.words[place + _GIVEN_UP]
        if self.words[place] >= target:
            return True
        if failure == _DIFFERS:
            raise DifferentCallError(
                f"{describe()}, who found that not all ranks make the same collective call: "
                "MPIDDP_DEBUG=1 shows them"
            )
        if failure:
            raise PeerFailedError(f"{describe()}, whose own call failed: its message says why")
        return False

    def give_up(self, error: BaseException) -> None:
        """Tell all others that this rank's call has failed, and what kind of failure it was."""
        differs = isinstance(error, DifferentCallError)
        self.words[self._own + _GIVEN_UP] = _DIFFERS if differs else _LOST

    def exchange(
        self,
        signature: int,
        buffer: memoryview,
        add: tuple[Sequence[Action], Sequence[Action]],
        describe: Callable[[int], str],
    ) -> Callable[..., None]:
        """A whole call: fill one of two mailboxes, enter, meet all ranks, add their mailboxes.

        It repeats ``enter`` and ``meet`` in one function, since on small buffers calls of Python
        functions would be half of the time. The signature is part of the progress: such calls have
        no stages. The returned function ignores its argument.

        ``buffer``: bytes of the rank's own buffer.
        """
        words, own, pauses = self.words, self._own, self._pauses
        others = tuple(place for place in self.places.values() if place != own)
        begins = (self._find_mailbox(self.rank, parity) for parity in (0, 1))
        boxes = tuple(slice(begin, begin + len(buffer)) for begin in begins)
        sums = tuple(_join(actions) for actions in add)

        def exchange(_: object = None) -> None:
            parity = self.parity = 1 - self.parity
            # Of all that copies bytes in Python this starts soonest.
            self._mapped[boxes[parity]] = buffer
            self.base = base = self.base + NEXT_CALL
            words[own] = here = base + signature
            for place in others:
                if words[place] == here:
                    continue
                for pause in pauses:
                    pause()
                    if words[place] >= base:
                        break
                if words[place] != here:
                    self.meet(self.ranks, signature, describe, word=0)
                    break
            sums[parity]()

        return exchange

    def close(self) -> None:
        self._cores.release()
        self.words.release()
        self._block.release()
        # Calls that a program has prepared keep this object.
        del self._mapped
