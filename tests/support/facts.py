"""What the ranks of a good session see, collected once for each launcher and number of ranks.

A real job costs seconds, so the tests of the world, the session and the environment look at
the same few jobs: every rank writes what it finds to a file, and ``collect`` reads them.
"""

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import launchers

PROGRAM = """
import dataclasses, json, os, subprocess, sys
from pathlib import Path

before = dict(os.environ)
import mpiddp
facts = {"early imports": [name for name in ("torch", "mpi4py") if name in sys.modules]}

def find_listening():
    import psutil
    connections = psutil.Process().net_connections("inet")
    return [list(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]

# Hydra leaves its own socket to the ranks.
inherited = find_listening()
with mpiddp.init(timeout=60, interface=sys.argv[1]) as session:
    import socket, torch
    import torch.distributed as distributed
    from torch._C._distributed_c10d import TCPStore
    from mpiddp.launch.launcher.launcher import find_launcher, has_manager_hint

    world = session.world
    rank, size = world.rank, world.size
    ones = torch.full((3,), float(rank + 1))
    distributed.all_reduce(ones)
    store = TCPStore(session.meeting.address, session.meeting.port, is_master=False)
    store.set(f"facts/{rank}", str(rank))
    distributed.barrier()
    facts |= {
        "world": dataclasses.asdict(world),
        "gethostname": socket.gethostname(),
        "backend": session.backend,
        "device": str(session.device),
        "threads": session.threads,
        "torch threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "any": [session.any(False), session.any(rank == size - 1), session.any(True)],
        "agree": session.agree({"a": (1, 2.5, None, "x")}, "this") == {"a": (1, 2.5, None, "x")},
        "broadcast": session.broadcast({"from": rank, "bytes": b"x"})["from"],
        "sum": ones.tolist(),
        "group": [distributed.get_rank(), distributed.get_world_size(), distributed.get_backend()],
        "comm": None if session.comm is None else [session.comm.rank, session.comm.size],
        "stored": [store.get(f"facts/{other}").decode() for other in range(size)],
        "master": [session.meeting.address, session.meeting.port],
        "job": session.meeting.job,
        "seconds": session.seconds,
        "launcher": getattr(find_launcher(), "key", None),
        "is managed": has_manager_hint(),
        "is_torchelastic_launched": distributed.is_torchelastic_launched(),
        "listening": [place for place in find_listening() if place not in inherited],
        "set": {name: value for name, value in os.environ.items() if before.get(name) != value},
        "removed": sorted(before.keys() - os.environ.keys()),
        "inherited": subprocess.run("env", capture_output=True, text=True).stdout.splitlines(),
        "before": before,
    }
    del store

session.close()  # A second time.
facts["open afterwards"] = distributed.is_initialized()
# The exception hook that torch.distributed installs.
facts["hook afterwards"] = sys.excepthook.__module__
facts["changed afterwards"] = {
    name: os.environ.get(name)
    for name in before.keys() | os.environ.keys()
    if os.environ.get(name) != before.get(name)
}
if "mpi4py" in sys.modules:
    from mpi4py import MPI
    facts["finalized"] = MPI.Is_finalized()
Path(f"{rank}.json").write_text(json.dumps(facts))
"""


def name_values(*rows: tuple[object, str]) -> dict[str, str]:
    """Values, each with the names of variables that hold it."""
    return {name: str(value) for value, names in rows for name in names.split()}


def torchrun_variables(rank: int, ranks: int, address: str) -> dict[str, str]:
    """What torchrun would set, on one node, but for what differs from job to job."""
    return name_values(
        (rank, "RANK LOCAL_RANK ROLE_RANK TORCHCOMM_RANK"),
        (ranks, "WORLD_SIZE LOCAL_WORLD_SIZE ROLE_WORLD_SIZE TORCHCOMM_SIZE"),
        (0, "GROUP_RANK TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"),
        (1, "GROUP_WORLD_SIZE"), ("default", "ROLE_NAME"), (address, "MASTER_ADDR"),
        (True, "TORCHELASTIC_USE_AGENT_STORE"),
    )  # fmt: skip


def rank_numbers(rank: int, ranks: int) -> dict[str, str]:
    """What other launchers would set on one node, by the names that scripts read most."""
    return name_values(
        (rank, "SLURM_PROCID OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK MV2_COMM_WORLD_RANK"),
        (rank, "SLURM_LOCALID OMPI_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_RANK"),
        (ranks, "SLURM_NTASKS OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE PMI_SIZE"),
        (0, "SLURM_NODEID"), (1, "SLURM_NNODES"),
    )  # fmt: skip


def messages(result: launchers.Result) -> list[str]:
    """Lines that mpiddp wrote to stderr; a launcher may put something of its own before them.

    On a busy machine torch's import may be slow enough for a note, which is left out.
    """
    return re.findall(r"mpiddp: (?!note: import torch took).*", result.stderr)


@cache
def collect(
    name: str, ranks: int, interface: str = "auto", variables: tuple[tuple[str, str], ...] = ()
) -> tuple[list[dict[str, Any]], launchers.Result]:
    """The facts of every rank, by rank, and the finished job."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-c", PROGRAM, interface]
        result = launchers.run(name, ranks, words, env=dict(variables), cwd=Path(folder))
        return read(Path(folder), result, ranks), result


def read(folder: Path, result: launchers.Result, ranks: int) -> list[dict[str, Any]]:
    """The facts of every rank of a good session, which wrote them into this directory."""
    result.expect(0)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
