"""A program for the ranks of a job: calls where the kernel forbids what shared memory needs.

    mpirun -n 2 python tests/programs/forbidden.py writes|nothing|funneled

``writes``: rank 1 may read another process's memory, not write there. ``nothing``: what surrounds
the ranks forbids enough. ``funneled``: besides, MPI lets one thread alone call it.
"""

import ctypes
import errno
import importlib
import json
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
from mistakes import hear
from mpiddp.sync.ddp_hook import Synchronization, attach
from mpiddp.sync.parameter_server.server import check_threads
from pool_rank import renew

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
"""BPF instructions: load a word, of which the first is the system call's number."""
WRITE = 311
"""process_vm_writev on x86-64."""


def control(option: int, *arguments: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    words = [*arguments, *[0] * (4 - len(arguments))]
    plain = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in words]
    if library.prctl(option, *plain) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def forbid(call: int) -> None:
    """Let this system call fail, for this process, for good."""
    lines = [
        (LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 1, 0, call), (RETURN, 0, 0, SECCOMP_RET_ALLOW),
        (RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = _Filter(len(lines), ctypes.cast(code, ctypes.c_void_p))
    control(PR_SET_NO_NEW_PRIVS, 1)
    control(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def try_calls(session: mpiddp.Session) -> dict[str, object]:
    """What there is, and some of the battery's calls over it."""
    rank, size = session.world.rank, session.world.size
    described = mpiddp.describe_collectives()
    choices = battery.list_sums(size, ("auto", *described["transports"]))
    choices |= {
        "what": (
            *(("all_reduce", name) for name in ("auto", "ring", "direct", "two-level")),
            *(("reduce", name) for name in battery.ROOTED[:3]),
            ("reduce_scatter", "auto"),
        ),
        "reduction": ("default",),
        "fixed order": (False,),
    }
    rows = battery.cover(choices)
    wrong = [fault for row in rows for fault in battery.make_call(row, rank, size)]
    said = hear(lambda: mpiddp.all_reduce(torch.ones(1), transport="shared-memory"))
    return {"describe": described, "wrong": wrong, "calls": len(rows), "said": said}


def try_unordered(session: mpiddp.Session) -> dict[str, object]:
    """The same on a processor that does not keep stores in order, as far as the ranks can see."""
    machine = platform.machine
    try:
        platform.machine = lambda: "aarch64"
        renew(session)
        return try_calls(session)
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
    if how == "funneled":
        mpi4py.rc.thread_level = how
        importlib.import_module("mpi4py.MPI")
    # On a busy machine some ranks import much later than others.
    with mpiddp.init(timeout=100) as session:
        rank = session.world.rank
        if how == "writes" and rank == 1:
            forbid(WRITE)
        found = try_calls(session)
        if how == "funneled":
            found["threads"] = try_threads(session)
        Path(f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
