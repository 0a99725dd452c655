"""Launch PyTorch distributed training with MPI, and look underneath.

    import mpiddp

    with mpiddp.init() as session:
        print(session.world.rank, session.device)

Names are loaded when they are first used: importing mpiddp imports neither torch nor mpi4py.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# python -m mpiddp…, or the installed command; sys.argv is that of python -m until the module runs.
_module = sys.orig_argv[-len(sys.argv)].removeprefix("-m") if sys.argv[:1] == ["-m"] else ""
if _module.partition(".")[0] == "mpiddp" or "".join(sys.argv[:1]).endswith("/bin/mpiddp"):
    from mpiddp.launch.failure import early

    early.heed()

if TYPE_CHECKING:
    import mpiddp.errors as errors
    import mpiddp.models as models  # noqa: F401
    import mpiddp.training as training
    from mpiddp.checkpoints.checkpointer import Checkpointer
    from mpiddp.collective_calls import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        describe_collectives,
        prepare_all_reduce,
        reduce,
        reduce_scatter,
        shared_empty,
    )
    from mpiddp.errors import MpiddpError
    from mpiddp.launch.mpi.world import World
    from mpiddp.launch.session import Session
    from mpiddp.remote.ranks import Ranks, ranks, run
    from mpiddp.sync.ddp_hook import register_comm_hook

__version__ = "0.1.0"

__all__ = [
    "Checkpointer",
    "MpiddpError",
    "Ranks",
    "Session",
    "World",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "describe_collectives",
    "errors",
    "init",
    "prepare_all_reduce",
    "ranks",
    "reduce",
    "reduce_scatter",
    "register_comm_hook",
    "run",
    "shared_empty",
    "training",
]

_HOMES = {
    "Checkpointer": "mpiddp.checkpoints.checkpointer",
    "MpiddpError": "mpiddp.errors",
    "Ranks": "mpiddp.remote.ranks",
    "Session": "mpiddp.launch.session",
    "World": "mpiddp.launch.mpi.world",
    "load_ipython_extension": "mpiddp.remote.ipython",
    "ranks": "mpiddp.remote.ranks",
    "register_comm_hook": "mpiddp.sync.ddp_hook",
    "run": "mpiddp.remote.ranks",
    **dict.fromkeys(
        (
            "all_gather",
            "all_reduce",
            "barrier",
            "broadcast",
            "describe_collectives",
            "prepare_all_reduce",
            "reduce",
            "reduce_scatter",
            "shared_empty",
        ),
        "mpiddp.collective_calls",
    ),
}
_MODULES = ("errors", "models", "training")


def init(
    backend: str = "auto",
    timeout: float = 300.0,
    interface: str = "auto",
    allow_shared_gpu: bool = False,
    lifeline_timeout: float = 30.0,
    bind: str = "auto",
    port_range: str = "auto",
    devices: str = "auto",
    tuning: str = "",
    collectives: str = "framework",
) -> Session:
    """Start this launch: MPI, device, store and torch.distributed's default group.

        with mpiddp.init(timeout=60) as session:
            model = DistributedDataParallel(net.to(session.device))

    Collective: every process of the launch calls it, once. The Session is a context manager, which
    closes everything at its end. An exception that leaves it, on any rank, ends the whole job.
    Without ``with``, uncaught exceptions end the job too, but not sys.exit(n): the other ranks then
    wait. The errors below are raised in an interactive Python, and end the job elsewhere.

    Args:
        backend: ``nccl``, ``xccl`` (Intel's GPUs), ``gloo``, ``mpi`` (if torch was built with it),
            or ``auto``: that of the GPUs when every rank has its own.
        timeout: seconds for each phase of start-up and for each collective; over NCCL, collectives
            have 30 seconds more, counted from the moment in which they are queued.
        interface: ``auto``, ``NAME``, ``HOST=NAME,…``, or NCCL's syntax (``^docker,lo``).
        allow_shared_gpu: let several ranks use one GPU, with Gloo, or with NCCL 2.30 or newer and
            NCCL_MULTI_RANK_GPU_ENABLE=1.
        lifeline_timeout: seconds after which a silent node is considered lost.
        bind: what ranks that no launcher has bound are bound to: ``cores`` of their own near their
            GPU, a node of ``numa``, ``none``, or ``auto``: cores, where each rank has at least two.
        port_range: ``LOW-HIGH``, the ports that mpiddp may listen on, two at least; ``auto``: those
            of the variable MPIDDP_PORT_RANGE where it is set, else any.
        devices: ``auto``: a rank takes a GPU where it sees one; ``cuda``, or Intel's ``xpu``: each
            must have one; ``cpu``; or numbers of visible GPUs (``"0,2"``), taken in turn.
        tuning: a file that ``python -m benchmarks tune`` wrote: it says what ``auto`` chooses for
            mpiddp's collectives; by default the one that MPIDDP_TUNING names, if it is set.
        collectives: who makes the calls of Gloo's groups on CPUs: ``framework`` or ``mpiddp``.

    Raises:
        ConfigurationError: NCCL without GPUs, an interface or a GPU that is not there.
        LaunchError: the processes cannot find each other, or would share a GPU.
        UnreachableError: a phase of start-up outlasted ``timeout``.
    """
    from mpiddp.launch.startup import open_session

    return open_session(
        backend=backend,
        timeout=timeout,
        interface=interface,
        allow_shared_gpu=allow_shared_gpu,
        lifeline_timeout=lifeline_timeout,
        bind=bind,
        port_range=port_range,
        devices=devices,
        tuning=tuning,
        collectives=collectives,
    )


def __dir__() -> list[str]:
    """The public names, for completion and ``help(mpiddp)``."""
    return [*__all__, "__version__"]


_OTHERS = {
    "get_rank": "mpiddp.init().world.rank",
    "get_world_size": "mpiddp.init().world.size",
    "init_process_group": "mpiddp.init(), or torch.distributed.init_process_group()",
    "rank": "mpiddp.init().world.rank",
    "size": "mpiddp.init().world.size",
    "synchronize": "mpiddp.barrier() to wait for all ranks, mpiddp.register_comm_hook() for DDP",
}
"""What torch's and other launchers' users look for, and what does it here."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mpiddp.{name}")
    if name not in _HOMES:
        homes = ("errors", "training") if name[:1].isupper() else ()
        found = [f": it is mpiddp.{each}.{name}" for each in homes
                 if name in importlib.import_module(f"mpiddp.{each}").__all__]  # fmt: skip
        found += [f": type {_OTHERS[name]}"] if name in _OTHERS else []
        raise AttributeError(f"module 'mpiddp' has no attribute {name!r}{''.join(found)}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found
