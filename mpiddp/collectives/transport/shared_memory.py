"""Memory that other processes of this node can map: anonymous files (memfd), within its limits.

They have no name, so nothing is left when a process is killed, and they do not count against the
size of /dev/shm, which containers keep small. Other processes open them through /proc/PID/fd, which
needs the same user, or the right to trace the process. Memory is reserved only if the limits leave
room for it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from mpiddp.collectives.transport.operators import map_memory
from mpiddp.errors import ConfigurationError
from mpiddp.process.memory_limits import find_shortage

NAME = "mpiddp"
"""Their name in /proc."""
PREFIXES = (f"/memfd:{NAME}", "/dev/shm/torch_")
"""Beginnings of segments' paths in /proc: mpiddp's own, and torch's shared memory."""
RESERVED_AT_ONCE = 16 << 20
"""Bytes. The limits are read before each part, since other ranks may reserve memory as well."""
MOST_FOREIGN = 64
"""Mappings of other ranks' segments that are kept. A freed segment has no pages, unless its owner
has forked since it was made: then they are freed with the mapping."""
SMALLEST_SEGMENT = 1 << 18
"""Bytes of the first segment for several tensors."""
SHARES = 8
"""A later one has one part in so many of all memory that is shared by then."""
ALIGNMENT = 128
"""Bytes: two cache lines, which processors fetch together."""


class SegmentAddress(NamedTuple):
    """Where memory lies in a segment."""

    number: int
    """Of the segment, among its owner's, from 1; no number is used twice."""
    descriptor: int
    """The owner's file descriptor."""
    offset: int
    """Bytes."""


class OwnSegment(NamedTuple):
    """Addresses, number and file descriptor of a segment of this process."""

    start: int
    end: int
    number: int
    descriptor: int


_start_of = attrgetter("start")
_all: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
_lock = threading.RLock()
"""Held while segments are made or dropped, and while a child is forked: the child finds it free."""


def _prepare_for_child() -> None:
    _lock.acquire()
    for shared_memory in list(_all):
        shared_memory.prepare_for_child()


os.register_at_fork(
    before=_prepare_for_child, after_in_parent=_lock.release, after_in_child=_lock.release
)


class _Segment(mmap.mmap):
    forget: Callable[[], object] = bool
    """Called once, before it is unmapped: another thread may be given its addresses at once."""

    def __del__(self) -> None:
        self.forget()


class SharedMemory:
    """The segments of this process, and its mappings of the others'."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.own: tuple[OwnSegment, ...] = ()
        """By address; replaced as a whole, since other threads may read it."""
        self._last_inherited = 0
        """Number of the last segment that a forked child may be using."""
        self._common: Callable[[], mmap.mmap | None] = lambda: None
        """The segment that has room for tensors, as long as one of its tensors lives."""
        self._taken = 0
        """Bytes of it that are, or were, used."""
        self._foreign: OrderedDict[tuple[int, int], mmap.mmap] = OrderedDict()
        _all.add(self)

    def allocate(self, size: int, *, is_common: bool = False) -> mmap.mmap:
        """``size`` bytes of zeros; freed with the last reference to the returned object.

        With ``is_common`` the kernel frees them once no process maps them. That also holds at the
        end of this process, and for what a forked child has inherited.

        Raises ConfigurationError if there is no memory left.
        """
        length = max(size, 1)
        try:
            descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
            try:
                _reserve(descriptor, length)
                memory = _Segment(descriptor, length)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise ConfigurationError(
                f"{size} bytes of shared memory cannot be had: {error.strerror}"
            ) from None
        address = address_of(memory)
        own = OwnSegment(address, address + length, next(self._numbers), descriptor)
        self._change(lambda before: sorted((*before, own)))
        # Not at the end of the program, when threads, other handlers of its end and late peers
        # may still work there: who touches a page that was cut off dies of SIGBUS.
        forget = weakref.finalize(memory, self._forget, own, is_common, os.getpid())
        memory.forget = forget
        forget.atexit = False
        return memory

    def _forget(self, own: OwnSegment, is_common: bool, process: int) -> None:
        if os.getpid() != process:
            # In a forked child: the memory is its parent's.
            return
        self._drop(own)
        if not is_common and own.number > self._last_inherited:
            # Others may still map it, but do not use it: free its pages now.
            os.ftruncate(own.descriptor, 0)
        os.close(own.descriptor)

    def prepare_for_child(self) -> None:
        """Before a fork: the child gets references to all present segments.

        Neither process takes tensors from the other's.
        """
        self._common = lambda: None
        self._last_inherited = max((own.number for own in self.own), default=0)

    def _change(self, make: Callable[[tuple[OwnSegment, ...]], list[OwnSegment]]) -> None:
        with _lock:
            while True:
                before = self.own
                after = tuple(make(before))
                # The garbage collector may have freed a segment meanwhile, in this very thread.
                if self.own is before:
                    self.own = after
                    return

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros, in a segment that is freed with the last of its tensors."""
        if min(shape, default=0) < 0:
            raise ConfigurationError(f"expected lengths >= 0, found {tuple(shape)}")
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._take(count * dtype.itemsize), dtype=dtype).view(shape)

    def _take(self, size: int) -> mmap.mmap | memoryview:
        """``size`` bytes of zeros, never used before.

        A segment costs two descriptors, and one in each process that maps it: so small tensors
        share one, and their number grows with the logarithm of the memory. Raises
        ConfigurationError.
        """
        share = max(SMALLEST_SEGMENT, sum(end - start for start, end, *_ in self.own) // SHARES)
        if 2 * size > share:
            return self.allocate(size)
        with _lock:
            common = self._common()
            if common is None or len(common) - self._taken < size:
                try:
                    common = self.allocate(share)
                except ConfigurationError:  # There may be memory for this tensor alone.
                    return self.allocate(size)
                self._common, self._taken = weakref.ref(common), 0
            begin = self._taken
            self._taken += math.ceil(size / ALIGNMENT) * ALIGNMENT
            return memoryview(common)[begin : begin + size]

    def adopt(self, tensor: torch.Tensor) -> None:
        """Register memory that torch has made shared (``share_memory_``).

        It stays the property of the tensor's storage, which keeps its file open.
        """
        storage = tensor.untyped_storage()
        # As torch.multiprocessing does to send a tensor to another process.
        descriptor, size = storage._share_fd_cpu_()
        start = storage.data_ptr()
        own = OwnSegment(start, start + size, next(self._numbers), descriptor)
        self._change(lambda before: sorted((*before, own)))
        weakref.finalize(storage, self._drop, own).atexit = False

    def _drop(self, own: OwnSegment) -> None:
        self._change(lambda before: [each for each in before if each is not own])

    def find(self, address: int, size: int) -> SegmentAddress | None:
        """The place of ``size`` bytes at ``address``; None if they are not in one segment."""
        own = self.own
        index = bisect_right(own, address, key=_start_of) - 1
        if index < 0 or address + size > own[index].end:
            return None
        found = own[index]
        return SegmentAddress(found.number, found.descriptor, address - found.start)

    def map_foreign(self, process: int, place: SegmentAddress) -> mmap.mmap:
        """Map another process's segment. Raises OSError if that is forbidden."""
        key = (process, place.number)
        memory = self._foreign.get(key)
        if memory is None:
            memory = map_descriptor(process, place.descriptor)
            self._foreign[key] = memory
            if len(self._foreign) > MOST_FOREIGN:
                self._foreign.popitem(last=False)
        else:
            self._foreign.move_to_end(key)
        return memory


def _reserve(descriptor: int, size: int) -> None:
    """Allocate a file's pages now: a missing page later kills the process with SIGBUS.

    Raises ConfigurationError if memory runs short, OSError if the kernel refuses.
    """
    for start in range(0, size, RESERVED_AT_ONCE):
        if shortage := find_shortage(size - start):
            raise ConfigurationError(
                f"{size} bytes of shared memory are more than is free: {shortage}"
            )
        os.posix_fallocate(descriptor, start, min(RESERVED_AT_ONCE, size - start))


def map_descriptor(process: int, descriptor: int, size: int = 0, ending: bytes = b"") -> mmap.mmap:
    """Map a segment that another process has open, all of it, for reading and writing.

    Raises OSError if that is forbidden, ValueError if it is no segment of ``size`` bytes with
    this ending: in another namespace the process number may mean another process.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    if not os.readlink(path).startswith(PREFIXES):
        raise ValueError(f"{path} is no segment")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        length = os.fstat(opened).st_size
        if length == 0 or (size and length != size):
            raise ValueError(f"{path} has {length} bytes")
        memory = mmap.mmap(opened, 0)
    finally:
        os.close(opened)
    if ending and memory[-len(ending) :] != ending:
        raise ValueError(f"{path} is another job's")
    return memory


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def view_of(memory: mmap.mmap, offset: int, count: int, dtype: torch.dtype) -> Any:
    """Elements from ``offset`` bytes on, as a NumPy array. The mapping must outlive it."""
    return map_memory(address_of(memory) + offset, count, dtype)
