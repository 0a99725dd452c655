"""Reading and writing another process's private memory in one copy (process_vm_readv, Linux).

Also known as cross-memory attach (CMA). The kernel copies between the two processes' pages, so no
third buffer is needed; it is allowed if one process may trace the other.

The kernel copies page by page. With pages of 4 KiB that is half of the time of a copy, so a private
buffer that is used several times gets pages of 2 MiB (madvise with MADV_COLLAPSE, Linux 6.1). Only
pages that lie completely inside the buffer are replaced.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch

from mpiddp.collectives.transport.operators import Action
from mpiddp.errors import ConfigurationError, PeerLostError

COLLAPSE = 25
"""MADV_COLLAPSE, of <linux/mman.h>."""
PAGE = 2 << 20
"""Bytes of a large page on x86-64."""
LEAST = 2 * PAGE
"""Bytes of a buffer that contains at least one large page at any address."""
COMES_BACK = 3
"""The visit at which pages are replaced, which costs as much as it saves in some four calls."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find(name: str, result: type, *arguments: type) -> Callable[..., int] | None:
    """A function of the C library; None if it has none of this name."""
    function: ctypes._NamedFuncPointer | None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype, function.argtypes = result, arguments
    return function


_vectors = (ctypes.POINTER(_Vector), ctypes.c_ulong)
_arguments = (ctypes.c_ssize_t, ctypes.c_int, *_vectors, *_vectors, ctypes.c_ulong)
_read = _find("process_vm_readv", *_arguments)
_write = _find("process_vm_writev", *_arguments)
_madvise = _find("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def bind_copy(
    process: int, own: Any, address: int, describe: Callable[[], str], *, writes: bool = False
) -> Action:
    """Fills the array ``own`` from ``address`` of the other process; ``writes``: the other way.

    Errors begin with ``describe()``: PeerLostError if the process is gone, ConfigurationError
    if its memory cannot be copied.
    """
    call = _write if writes else _read
    assert call is not None
    size = own.nbytes
    # A reference of ctypes keeps alive what it refers to.
    local = ctypes.byref(_Vector(own.ctypes.data, size))
    remote = ctypes.byref(_Vector(address, size))

    def copy() -> None:
        moved = call(process, local, 1, remote, 1, 0)
        if moved == size:
            return
        # Signals and the borders of mappings may cut a copy short.
        done = max(moved, 0)
        while moved > 0 and done < size:
            rest = size - done
            moved = call(
                process,
                _Vector(own.ctypes.data + done, rest), 1,
                _Vector(address + done, rest), 1, 0,
            )  # fmt: skip
            done += max(moved, 0)
        if done < size:
            _fail(ctypes.get_errno(), describe)

    return copy


def _fail(number: int, describe: Callable[[], str]) -> NoReturn:
    if number == errno.ESRCH:
        raise PeerLostError(f"{describe()}, whose process is gone")
    raise ConfigurationError(
        f"{describe()}, whose buffer cannot be copied from this process "
        f"({os.strerror(number)}): use mpiddp.shared_empty, or transport mpi"
    )


def can_copy(process: int, address: int, expected: bytes) -> bool:
    """Whether the other process's memory can be read and written, and holds ``expected``."""
    if _read is None or _write is None:
        return False
    buffer = ctypes.create_string_buffer(len(expected))
    here = _Vector(ctypes.addressof(buffer), len(expected))
    there = _Vector(address, len(expected))
    if _read(process, here, 1, there, 1, 0) != len(expected) or buffer.raw != expected:
        return False
    # Writing may be forbidden by itself; the same bytes change nothing.
    return _write(process, here, 1, there, 1, 0) == len(expected)


# ---- large pages --------------------------------------------------------------------------


def is_welcome(setting: Path = SETTING) -> bool:
    """Whether the administrator allows large pages."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def collapse(address: int, size: int) -> bool:
    """Put ``size`` bytes at ``address`` into large pages, if they contain whole ones.

    Returns whether that was possible. The contents do not change. It is not possible with an older
    kernel, without free large pages, and if a device has pinned the memory.
    """
    first = -(-address // PAGE) * PAGE
    length = (address + size - first) // PAGE * PAGE
    if _madvise is None or length <= 0:
        return False
    return bool(_madvise(first, length, COLLAPSE) == 0)


class LargePages:
    """Gives large pages to private buffers that are used several times."""

    def __init__(self) -> None:
        self._is_welcome = is_welcome()
        self._visits: WeakKeyDictionary[torch.UntypedStorage, dict[int, int]] = WeakKeyDictionary()
        """For each storage, the visits of each address in it."""

    def visit(self, tensor: torch.Tensor) -> None:
        """Count a use of this contiguous CPU tensor."""
        size = tensor.numel() * tensor.element_size()
        if size < LEAST or not self._is_welcome:
            return
        address = tensor.data_ptr()
        visits = self._visits.setdefault(tensor.untyped_storage(), {})
        visits[address] = visits.get(address, 0) + 1
        if visits[address] == COMES_BACK:
            collapse(address, size)
