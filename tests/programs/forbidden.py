"""A program for the ranks of a job: calls where the kernel forbids what shared memory needs.

    mpirun -n 2 python tests/programs/forbidden.py
        copies|writes|descriptors|nothing|funneled|serialized

``copies``: nobody may copy from another process's memory. ``writes``: rank 1 may read, not write.
``descriptors``: nobody may look into /proc/PID of another one, as between different users.
``nothing``: what surrounds the ranks forbids enough. ``funneled``, ``serialized``: besides, MPI
lets one thread alone call it, or one at a time.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import pkgutil
import platform
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import mpi4py
import torch

import battery
import mpiddp
import mpiddp.collectives
from mistakes import hear
from mpiddp.sync.ddp_hook import Synchronization, attach
from mpiddp.sync.parameter_server.server import check_threads
from pairs import cover
from pool_rank import renew

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
"""BPF instructions: load a word, of which the first is the system call's number."""
READ, WRITE = 310, 311
"""process_vm_readv and process_vm_writev on x86-64."""
NOBODY = 65534


def control(option: int, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    words = [*arguments, *[0] * (4 - len(arguments))]
    plain = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in words]
    if library.prctl(option, *plain) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def forbid(*calls: int) -> None:
    """Let these system calls fail, for this process, for good."""
    lines = [(LOAD, 0, 0, 0)]
    for number, call in enumerate(calls):
        lines.append((JUMP_IF_EQUAL, len(calls) - number, 0, call))
    lines.append((RETURN, 0, 0, SECCOMP_RET_ALLOW))
    lines.append((RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = _Filter(len(lines), ctypes.cast(code, ctypes.c_void_p))
    control(PR_SET_NO_NEW_PRIVS, 1)
    control(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def hide() -> None:
    """Keep this process from the others' eyes: their user's, too."""
    if os.geteuid() == 0:
        # Root sees all.
        os.setresuid(NOBODY, NOBODY, NOBODY)
    control(PR_SET_DUMPABLE, 0)


def try_calls(rank: int, size: int) -> dict[str, object]:
    """What there is, and some of the battery's calls over it."""
    described = mpiddp.describe_collectives()
    choices = battery.list_sums(size, ("auto", *described["transports"]))
    choices |= {
        "what": (("all_reduce", "auto"), ("all_reduce", "ring"), ("reduce_scatter", "auto")),
        "reduction": ("default",),
        "fixed order": (False,),
    }
    rows = cover(choices, battery.is_possible)
    wrong = [fault for row in rows for fault in battery.make_call(row, rank, size)]
    said = hear(lambda: mpiddp.all_reduce(torch.ones(1), transport="shared-memory"))
    return {"describe": described, "wrong": wrong, "calls": len(rows), "said": said}


def import_all() -> None:
    """Import what calls need: a user without root's rights may not enter the checkout."""
    for module in pkgutil.walk_packages(mpiddp.collectives.__path__, "mpiddp.collectives."):
        importlib.import_module(module.name)


def try_unordered(session: mpiddp.Session) -> dict[str, object]:
    """The same on a processor that does not keep stores in order, as far as the ranks can see."""
    machine = platform.machine
    try:
        platform.machine = lambda: "aarch64"
        renew(session)
        return try_calls(session.world.rank, session.world.size)
    finally:
        platform.machine = machine
        renew(session)


def try_threads(session: mpiddp.Session) -> dict[str, object]:
    rank, size = session.world.rank, session.world.size
    tensors = [torch.full((count,), float(rank)) for count in (5, 100_000)]
    seen = []
    for tensor in tensors:
        future = mpiddp.all_reduce(tensor, transport="mpi", async_op=True)
        seen.append(future.done())
        future.then(lambda _: seen.append(threading.current_thread().name))
        assert future.wait() is tensor
        assert torch.equal(tensor, torch.full_like(tensor, sum(range(size))))
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(2, 2), gradient_as_bucket_view=True
    )
    hook = attach(Synchronization("ring", "mpi", overlap=True), model)
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    # Made ready before, and once more in a thread of its own.
    with ThreadPoolExecutor(1) as pool:
        call = partial(mpiddp.all_reduce, tensors[0], transport="mpi")
        heard = pool.submit(hear, call).result(), hear(check_threads)
    said = [each for each in heard if each != "nothing was said"]
    threads = sorted(thread.name for thread in threading.enumerate())
    return {"seen": seen, "said": said, "overlap": hook.overlap, "threads": threads}


def main() -> None:
    how = sys.argv[1]
    if how in ("funneled", "serialized"):
        mpi4py.rc.thread_level = how
        importlib.import_module("mpi4py.MPI")
    # On a busy machine some ranks import much later than others.
    with mpiddp.init(timeout=100) as session:
        rank, size = session.world.rank, session.world.size
        import_all()
        # Opened as long as this user may.
        with Path(f"{rank}.json").open("w") as report:
            if how == "copies":
                forbid(READ, WRITE)
            elif how == "writes" and rank == 1:
                forbid(WRITE)
            elif how == "descriptors":
                hide()
            found = try_calls(rank, size)
            if how in ("funneled", "serialized"):
                found["threads"] = try_threads(session)
            json.dump(found, report)


if __name__ == "__main__":
    main()
