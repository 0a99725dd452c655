"""JSON records of measurements, with what they were measured on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.targets import Target, describe_targets
from benchmarks.launching.launchers import ROOT, THREADS, Mpirun, clean_environment
from benchmarks.launching.srun import Srun
from mpiddp.files import write_whole
from mpiddp.launch.mpi.compatibility import library_name

SCHEMA = 2
"""Version of the records' form; a change that breaks readers raises it."""

PACKAGES = ("mpiddp", "torch", "mpi4py", "numpy")

_LIBRARY_VERSION = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


def describe_environment(launcher: Mpirun | Srun | None) -> dict[str, Any]:
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
        "nodes": launcher.nodes if isinstance(launcher, Srun) else None,
        "mpi_library": find_mpi_library(launcher),
        "processor": find_processor(),
        "cores": psutil.cpu_count(logical=False),
        "hardware_threads": psutil.cpu_count(),
        "usable_hardware_threads": len(os.sched_getaffinity(0)),
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


def find_mpi_library(launcher: Mpirun | Srun | None) -> str | None:
    """Name and version of the library that the ranks load, without initialising MPI here."""
    if isinstance(launcher, Srun):
        environment = launcher.environment()
    else:
        environment = clean_environment(launcher.variables(1) if launcher is not None else {})
    text = _ask([sys.executable, "-c", _LIBRARY_VERSION], environment)
    return library_name(text) if text else None


def find_processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def begin(launcher: Mpirun | Srun, more: str = "") -> tuple[dict[str, Any], str]:
    """Print the heading of a measurement; returns the environment and the heading."""
    environment = describe_environment(launcher)
    heading = describe_heading(environment)
    print(f"{heading}; load {os.getloadavg()[0]:.1f}\n{more}", flush=True)
    return environment, heading


def describe_heading(environment: Mapping[str, Any]) -> str:
    nodes = environment["nodes"]
    cluster = f"{environment['launcher']}, {nodes} nodes, " if nodes else ""
    return (
        f"{cluster}{environment['mpi_library'] or environment['launcher']}, "
        f"torch {environment['packages']['torch']}, Python {environment['python']}, "
        f"{environment['processor']}, {environment['cores']} cores; "
        f"OMP_NUM_THREADS={environment['threads_per_process']}, processes unbound"
    )


def write_measurement(
    path: Path | None,
    benchmark: str,
    environment: Mapping[str, Any],
    targets: Sequence[Target] | None,
    **content: Any,
) -> None:
    """Write the record of a measurement, if ``path`` is given; ``targets`` None: not asked for."""
    if path is None:
        return
    judged = {} if targets is None else {"targets": describe_targets(targets)}
    load = list(os.getloadavg())
    record = {"environment": environment, "load_average_after": load, **content, **judged}
    write_record(path, benchmark, record)


def write_record(path: Path, benchmark: str, content: Mapping[str, Any]) -> None:
    record = {"benchmark": benchmark, "schema": SCHEMA, **content}
    write_whole(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _ask(command: list[str], environment: Mapping[str, str] | None = None) -> str | None:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
