"""Large pages under private buffers that peers copy from and to, time and again (Linux 6.1).

The kernel copies between processes page by page. With pages of 4 KiB that is half of the time of a
copy, so a buffer that comes back gets pages of 2 MiB (madvise, MADV_COLLAPSE). Nothing else of it
changes: only such pages are replaced as lie in the buffer as a whole.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

COLLAPSE = 25
"""MADV_COLLAPSE, of <linux/mman.h>."""
PAGE = 2 << 20
"""Bytes of a large page on x86-64, to which this is confined with the rest of the node's memory."""
LEAST = 2 * PAGE
"""Bytes of a buffer that has one such page at least, wherever it lies, and mostly more."""
COMES_BACK = 3
"""The visit with which the pages are changed, which costs what it saves in some four calls."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _find_madvise() -> ctypes._NamedFuncPointer | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _find_madvise()


def is_welcome(setting: Path = SETTING) -> bool:
    """Whether this system's administrator lets programs have large pages."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False


def collapse(address: int, size: int) -> bool:
    """Have ``size`` bytes at ``address`` lie in large pages, as far as these lie in them.

    Returns whether they do. Where not all of them can (an older kernel, no memory in such pieces,
    memory that a device has pinned) the contents are as they were.
    """
    first = -(-address // PAGE) * PAGE
    length = (address + size - first) // PAGE * PAGE
    if _madvise is None or length <= 0:
        return False
    return bool(_madvise(first, length, COLLAPSE) == 0)


class LargePages:
    """Gives large pages to private buffers that are seen several times."""

    def __init__(self) -> None:
        self._is_welcome = is_welcome()
        self._visits: WeakKeyDictionary[torch.UntypedStorage, dict[int, int]] = WeakKeyDictionary()
        """Of each buffer in a piece of memory, by its address; at which there may be another piece
        the next time."""

    def visit(self, tensor: torch.Tensor) -> None:
        """This contiguous CPU tensor is about to be worked in."""
        size = tensor.numel() * tensor.element_size()
        if size < LEAST or not self._is_welcome:
            return
        address = tensor.data_ptr()
        visits = self._visits.setdefault(tensor.untyped_storage(), {})
        visits[address] = visits.get(address, 0) + 1
        if visits[address] == COMES_BACK:
            collapse(address, size)
