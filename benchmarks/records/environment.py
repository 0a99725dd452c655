"""What a measurement depends on: the checkout, the machine, versions, the variables of its ranks.

Ranks get an environment without variables of an earlier launch, so that a benchmark inside a Slurm
allocation measures the same as one beside it.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import psutil

from mpiddp import environment
from mpiddp.launch.mpi.compatibility import library_name
from mpiddp.process.cpus import find_cpus

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "python -m benchmarks" if (ROOT / "setup.cfg").exists() else "mpiddp bench"
"""What a user types in a checkout, and elsewhere."""

THREADS = 1
"""OMP_NUM_THREADS of every contender: what torchrun sets where nothing is set."""

INHERITED = re.compile(
    r"(OMPI|OPAL|ORTE|PMIX|PRTE|PMI|HYDRA|HYDI|I_MPI|MPICH|MPIR|SLURM|SRUN|SBATCH|FLUX|PALS|JSM"
    r"|TORCHELASTIC|OMP|MKL|GOMP|KMP)_.*|MPI4PY_RC_.*|MPI_LOCAL.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
"""What launchers leave to their processes, settings of MPI, and of threads."""

FILES = (environment.TUNING, environment.NCCL_CONF_FILE)
"""Variables that name a file that ranks read, which run in another directory than this process."""

PACKAGES = ("mpiddp", "torch", "mpi4py", "numpy")

_LIBRARY_VERSION = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


class DescribedLauncher(Protocol):
    """Starts ranks, on this machine or on the nodes of a cluster."""

    @property
    def title(self) -> str:
        """Its name and version."""

    @property
    def nodes(self) -> int | None:
        """Of a cluster; None if all ranks are on this machine."""

    def rank_environment(self) -> dict[str, str]:
        """The variables of a rank."""

    def list_hosts(self) -> list[str]:
        """The names of the hosts of a cluster."""

    def place(self, ranks: int) -> dict[str, list[int]]:
        """The ranks on each host, by its name, if there are so many."""


def describe_environment(launcher: DescribedLauncher | None) -> dict[str, Any]:
    """Versions, processor, kernel and settings that a measurement depends on.

    They are this machine's, also where ranks run on the nodes of a cluster. No host name, and no
    value of a variable that was not set here.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "python": platform.python_version(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "commit": find_commit(),
        "launcher": launcher.title if launcher is not None else None,
        "nodes": launcher.nodes if launcher is not None else None,
        "mpi_library": find_mpi_library(launcher),
        "processor": find_processor(),
        "cores": psutil.cpu_count(logical=False),
        "hardware_threads": psutil.cpu_count(),
        "usable_hardware_threads": len(find_cpus()),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "load_average": list(os.getloadavg()),
        "threads_per_process": THREADS,
        "binding": "none",
    }


def find_version(package: str) -> str | None:
    """Installed version of ``package``; of mpiddp, the checkout's. None if it is not there."""
    if package == "mpiddp":
        import mpiddp

        return mpiddp.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_commit() -> str | None:
    """The checkout's commit, ``+changes`` behind it where files differ; None outside git."""
    # An installation may lie in an environment below somebody's repository.
    is_checkout = (ROOT / ".git").exists()
    ask = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    commit = _ask(ask) if is_checkout else None
    if commit is None:
        return None
    changed = _ask(["git", "-C", str(ROOT), "status", "--porcelain"])
    return commit + ("+changes" if changed else "")


def find_mpi_library(launcher: DescribedLauncher | None) -> str | None:
    """Name and version of the library that the ranks load, without initialising MPI here."""
    variables = launcher.rank_environment() if launcher is not None else clean_environment()
    text = _ask([sys.executable, "-c", _LIBRARY_VERSION], variables)
    return library_name(text) if text else None


def find_processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def describe_heading(environment: Mapping[str, Any]) -> str:
    nodes = environment["nodes"]
    cluster = f"{environment['launcher']}, {nodes} nodes, " if nodes else ""
    return (
        f"{cluster}{environment['mpi_library'] or environment['launcher']}, "
        f"torch {environment['packages']['torch']}, Python {environment['python']}, "
        f"{environment['processor']}, {environment['cores']} cores; "
        f"OMP_NUM_THREADS={environment['threads_per_process']}, processes unbound"
    )


def clean_environment(
    changes: Mapping[str, str] | None = None, *, kept: re.Pattern[str] | None = None
) -> dict[str, str]:
    """This process's environment without an earlier launch, with ``changes``.

    Names that ``kept`` matches stay, whatever they are. Thread counts are THREADS; the checkout
    can be imported; files are named by absolute paths.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if not INHERITED.fullmatch(name) or (kept is not None and kept.fullmatch(name))
    }
    files = {name: resolve(found[name]) for name in FILES if found.get(name)}
    fixed = {"PYTHONPATH": find_python_path(), "OMP_NUM_THREADS": str(THREADS)}
    return {**found, **files, **fixed, **(changes or {})}


def find_python_path() -> str:
    """PYTHONPATH of a process that imports the checkout, wherever it runs."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([str(ROOT), *map(resolve, given)])


def resolve(path: str) -> str:
    """The absolute form of a path that is relative to this process's directory."""
    return os.path.abspath(os.path.expanduser(path))


def _ask(command: list[str], environment: Mapping[str, str] | None = None) -> str | None:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
