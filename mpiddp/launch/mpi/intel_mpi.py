"""What Intel MPI needs beside itself, looked for before MPI_Init, which would abort without it.

Between hosts it uses libfabric, which its wheel does not bring: without it MPI_Init says "Other MPI
error". Under ``srun --mpi=pmix`` it loads ``libpmix.so``, a name that distributions give to those
alone who compile; without it every process is alone. Under ``srun --mpi=pmi2`` it numbers the nodes
by Slurm's variables, wrongly if their numbers of ranks differ, and then fails to allocate shared
memory; so it is told to ask the ranks. (Each was run, with Intel MPI 2021.19.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import LaunchError
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi.compatibility import is_intel

FABRIC = "libfabric.so.1"
PMIX = ("libpmix.so", "libpmix.so.2")
"""What Intel MPI looks for, and what is there without the files for compiling."""


def find_settings(version: str, library: Path | None, launcher: Launcher | None) -> dict[str, str]:
    """Variables for MPI_Init; none for other libraries, and none that somebody has set.

    Args:
        version: of the MPI library, as MPI_Get_library_version says it.
        library: its file.
        launcher: that started this process.

    Raises LaunchError if a library is missing.
    """
    if launcher is None or not is_intel(version):
        return {}
    if not launcher.is_on_one_host:
        beside = [str(library.parent / FABRIC)] if library is not None else []
        if _find_loadable([*beside, FABRIC]) is None:
            raise LaunchError(
                f"Intel MPI needs {FABRIC} between hosts, and there is none: load your MPI's "
                "module, or pip install libfabric, or apt-get install libfabric1"
            )
    found = {}
    if launcher.key == "slurm" and "pmix" in launcher.process_managers:
        name = os.environ.get(environment.INTEL_PMI) or _find_loadable(PMIX)
        if name is None:
            raise LaunchError(
                f"Intel MPI needs {PMIX[0]} under srun --mpi=pmix, and there is none: take "
                f"--mpi=pmi2, or name it by {environment.INTEL_PMI}"
            )
        found[environment.INTEL_PMI] = name
    elif launcher.key == "slurm":
        found[environment.INTEL_NODE_MAP] = "pmi_alltoall"
    return {name: value for name, value in found.items() if not os.environ.get(name)}


def _find_loadable(names: Iterable[str]) -> str | None:
    """The first of these libraries that this process can load."""
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    return None
