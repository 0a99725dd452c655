"""Reading and writing another process's private memory in one copy (process_vm_readv, Linux).

Also known as cross-memory attach (CMA). The kernel copies between the two processes' pages, so no
third buffer is needed; it is allowed where one process may trace the other.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any, NoReturn

from mpiddp.collectives.operators import Action
from mpiddp.errors import ConfigurationError, PeerLostError


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_Call = Callable[..., int]


def _find(name: str) -> _Call | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return None
    vector = ctypes.POINTER(_Vector)
    number = ctypes.c_ulong
    function.argtypes = (ctypes.c_int, vector, number, vector, number, number)
    function.restype = ctypes.c_ssize_t
    found: _Call = function
    return found


_read = _find("process_vm_readv")
_write = _find("process_vm_writev")


def _bind(call: _Call, process: int, own: Any, address: int, describe: Callable[[], str]) -> Action:
    """Copies ``own.nbytes`` bytes between the array ``own`` and the other process."""
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


def bind_read(process: int, own: Any, address: int, describe: Callable[[], str]) -> Action:
    """Fills the array ``own`` from ``address`` of the other process.

    ``describe()`` says who that is and what this rank does, for errors: PeerLostError where the
    process is gone, ConfigurationError where its memory cannot be copied.
    """
    assert _read is not None
    return _bind(_read, process, own, address, describe)


def bind_write(process: int, own: Any, address: int, describe: Callable[[], str]) -> Action:
    """Writes the array ``own`` to ``address`` of the other process; see ``bind_read``."""
    assert _write is not None
    return _bind(_write, process, own, address, describe)


def can_copy(process: int, address: int, expected: bytes) -> bool:
    """Whether the other process's memory can be read, and is what it is said to be."""
    if _read is None or _write is None:
        return False
    buffer = ctypes.create_string_buffer(len(expected))
    here = _Vector(ctypes.addressof(buffer), len(expected))
    there = _Vector(address, len(expected))
    if _read(process, here, 1, there, 1, 0) != len(expected) or buffer.raw != expected:
        return False
    # Writing may be forbidden by itself; the same bytes change nothing.
    return _write(process, here, 1, there, 1, 0) == len(expected)
