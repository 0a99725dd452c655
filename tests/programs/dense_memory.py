"""A rank that starts with memory where whatever lies behind a small object is dense.

MPICH publishes its network address with what lies behind it (see mpiddp/launch/mpi/slurm_pmi.py).
"""

import ctypes
import importlib
import json
from pathlib import Path

import mpiddp
from mpiddp.launch.launcher import launcher
from mpiddp.launch.mpi import mpi

BEHIND = 4200
"""In bytes: a little more than MPICH publishes."""
COPIES = 300


def fill_memory() -> None:
    """Leave holes for objects of 120 to 700 bytes, and something dense behind each of them."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    holes = []
    for size in range(120, 700, 16):
        for _ in range(COPIES):
            hole, behind = library.malloc(size), library.malloc(BEHIND)
            ctypes.memset(hole, 0x64, size)
            ctypes.memset(behind, 0x64, BEHIND)
            holes.append(hole)
    for hole in holes:
        library.free(hole)


def main() -> None:
    # What init would import later would change what lies where.
    importlib.import_module("torch")
    mpi.load(launcher.find_launcher())
    fill_memory()
    with mpiddp.init(timeout=60) as session:
        found = session.comm.allgather(session.world.hostname)
        Path(f"{session.world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
