"""What a measurement begins and ends with: its machine, its heading, its files."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.options import RunOptions
from benchmarks.common.records import RecordWriter, open_record
from benchmarks.common.tables import write_tables
from benchmarks.common.targets import Target
from benchmarks.launching.launchers import ROOT, THREADS, clean_environment
from benchmarks.launching.srun import Launcher, Srun, list_nodes, place_ranks
from mpiddp.launch.mpi.compatibility import library_name
from mpiddp.options.outputs import RECORD, find_one
from mpiddp.process.cpus import find_cpus
from mpiddp.wording import print_text

PACKAGES = ("mpiddp", "torch", "mpi4py", "numpy")

_LIBRARY_VERSION = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)


def describe_environment(launcher: Launcher | None) -> dict[str, Any]:
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


def find_mpi_library(launcher: Launcher | None) -> str | None:
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


@dataclass(frozen=True)
class Output:
    """Where a measurement goes: `open_output` makes one."""

    record: RecordWriter
    """Its cells, as they are finished."""
    environment: Mapping[str, Any]
    heading: str
    """The environment in a line, as printed."""

    def show(self, *parts: str, targets: Sequence[Target] = ()) -> None:
        """Print what is not empty of the parts and of the targets, which the record gets, too."""
        if targets:
            described = [{**asdict(target), "met": target.met} for target in targets]
            self.record.write("targets", targets=described)
        verdicts = "\n".join(f"target: {target}" for target in targets)
        text = "\n\n".join(filter(None, [*parts, verdicts]))
        if text:
            print_text(text)


@contextmanager
def open_output(
    benchmark: str,
    options: RunOptions[Any],
    launcher: Launcher,
    more: str = "",
    places: Mapping[str, tuple[Launcher, int]] | None = None,
) -> Iterator[Output]:
    """Print the heading and open the record; at the end, also by an error, write the tables.

    ``places``: who starts how many ranks, by name (default: the launcher the plan's numbers).
    """
    environment = describe_environment(launcher)
    heading = describe_heading(environment)
    print_text(f"{heading}; load {os.getloadavg()[0]:.1f}\n{more}")
    hidden = [] if options.hosts else find_hosts(launcher)
    if options.hosts:
        ranks = options.plan.ranks
        counts = (ranks,) if isinstance(ranks, int) else ranks
        places = places or {str(count): (launcher, count) for count in counts}
        environment["hosts"] = {name: find_places(*place) for name, place in places.items()}
    plan = describe_plan(options.plan)
    path = find_one(options.output, RECORD)
    with open_record(path, benchmark, environment, plan, hidden) as record:
        try:
            yield Output(record, environment, heading)
        finally:
            write_tables(record.cells, options.output)


@contextmanager
def open_model(benchmark: str, options: Any) -> Iterator[RecordWriter]:
    """The record of a command that starts no ranks, if its option ``output`` names one."""
    path = find_one(options.output, RECORD)
    environment = describe_environment(None) if path is not None else {}
    with open_record(path, benchmark, environment, describe_plan(options)) as record:
        yield record


def describe_plan(plan: Any) -> dict[str, Any]:
    """The fields of a dataclass, as JSON can hold them."""
    return {each.name: _describe_value(getattr(plan, each.name)) for each in fields(plan)}


def _describe_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_describe_value, value))
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def find_hosts(launcher: Launcher) -> list[str]:
    """The names of all hosts that an error may name."""
    own = socket.gethostname()
    others = list_nodes(launcher) if isinstance(launcher, Srun) else []
    return sorted({own, own.partition(".")[0], *others} - {"localhost"})


def find_places(launcher: Launcher, ranks: int) -> dict[str, list[int]]:
    """The ranks on each host, by its name."""
    if isinstance(launcher, Srun):
        return place_ranks(launcher, ranks)
    return {socket.gethostname(): list(range(ranks))}


def describe_heading(environment: Mapping[str, Any]) -> str:
    nodes = environment["nodes"]
    cluster = f"{environment['launcher']}, {nodes} nodes, " if nodes else ""
    return (
        f"{cluster}{environment['mpi_library'] or environment['launcher']}, "
        f"torch {environment['packages']['torch']}, Python {environment['python']}, "
        f"{environment['processor']}, {environment['cores']} cores; "
        f"OMP_NUM_THREADS={environment['threads_per_process']}, processes unbound"
    )


def _ask(command: list[str], environment: Mapping[str, str] | None = None) -> str | None:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
