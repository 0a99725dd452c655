"""NCCL as torch has loaded it: its version, ranks that share a GPU, and its failures.

torch has two implementations of ``backend="nccl"``: ``ProcessGroupNCCL``, alone until 2.13 and
chosen later by ``TORCH_DIST_USE_NCCL2=0``, and ``ProcessGroupNCCL2``, the default from 2.15 on.
Both have a thread that finds a collective which is late, or an error, and ends the process with
SIGABRT: the older one after a pause of a minute, the newer one at once. What mpiddp needs of
either stands here.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from mpiddp import environment
from mpiddp.errors import PeerLostError
from mpiddp.torch_internals import find_backend, list_groups

LIBRARIES = ("libnccl.so.2", "librccl.so.1")
SHARING_VERSION = (2, 30)
"""The first that lets ranks share a GPU (NCCL's src/init.cc, ncclParamMultiRankGpuEnable)."""
QUEUE_SECONDS = 30.0
"""How much longer NCCL waits for a collective than the session's timeout. Both implementations
count from the moment in which the host has queued it; the GPU may have work left from before."""
POLL_SECONDS = 0.5
GRACE_SECONDS = 1.0
"""An exception of the program says more of what went wrong: it has this long to end the job."""
HOOK = 0x6D706964
"""Our number among the hooks of a group, which are known by numbers."""


def find_version() -> tuple[int, ...]:
    """Version of the loaded NCCL, such as ``(2, 30, 7)``; empty if torch has none.

    ``torch.cuda.nccl.version()`` is that of torch's build, though another library may be loaded.
    """
    import torch

    if not torch.distributed.is_nccl_available():
        return ()
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name, os.RTLD_NOW | os.RTLD_NOLOAD)
            code = ctypes.c_int()
            if library.ncclGetVersion(ctypes.byref(code)) == 0:
                return split_version(code.value)
        except (OSError, AttributeError):
            continue
    # Linked into torch itself. torch has no types for it.
    return tuple(torch.cuda.nccl.version()[:3])


def split_version(code: int) -> tuple[int, ...]:
    """``23007`` is 2.30.7, and ``2708`` was 2.7.8 (NCCL_VERSION in nccl.h)."""
    base = 10_000 if code >= 10_000 else 1000
    return code // base, code % base // 100, code % 100


def takes_shared_gpus() -> bool:
    """Whether this process's NCCL works with ranks that use one GPU, or slices (MIG) of one."""
    wanted = os.environ.get(environment.NCCL_MULTI_RANK) == "1"
    return wanted and find_version() >= SHARING_VERSION


class GroupWatch:
    """Calls ``fail`` when a group of NCCL's has failed, before torch ends the process.

    It watches every NCCL group of the process, also those that a program makes. If torch has
    hooks that it calls before it ends the process, they lead to ``fail``; otherwise the groups are
    asked, twice a second, whether they have failed.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        """The default group must exist."""
        self._fail = fail
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._watch, name="mpiddp-nccl", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more. The hooks stay: torch ends the process after them in any case."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            # What is found while the groups are being closed is no failure.
            if self._look() and not self._closed.wait(GRACE_SECONDS):
                self._fail(_describe_failure())
                return

    def _look(self) -> bool:
        """Hook the groups that are new; whether any group has failed."""
        for group in list_groups():
            try:
                backend = find_backend(group, "cuda")
            except RuntimeError:  # Not for GPUs.
                continue
            # By the group, since one that is made later may have the name of one that is gone.
            if group not in self._hooked:
                self._hooked.add(group)
                self._hook(backend)
            if _has_failed(backend):
                return True
        return False

    def _hook(self, backend: Any) -> None:
        try:
            backend.register_abort_hook(HOOK, self._give_up)
        except (AttributeError, RuntimeError):  # torch before 2.14; a backend without hooks.
            return

    def _give_up(self) -> None:
        """Runs in the thread of NCCL's that calls the hook."""
        time.sleep(GRACE_SECONDS)
        self._fail(_describe_failure())


def _describe_failure() -> PeerLostError:
    return PeerLostError(
        "NCCL gave up on a collective: it was late, or a peer is gone. torch's lines above name "
        "it; every rank must make the same calls; to wait longer, increase --timeout SECONDS"
    )


def _has_failed(backend: Any) -> bool:
    try:
        return str(backend.get_error().name) != "SUCCESS"
    except (AttributeError, RuntimeError):  # Not NCCL's.
        return False
