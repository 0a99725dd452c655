"""What earlier jobs of this user have left on a node: processes, shared memory, directories."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from mpiddp import environment
from mpiddp.doctor.examiner.findings import Finding, passed, warned
from mpiddp.launch.launcher.leftovers import find
from mpiddp.process.descendants import has_variable
from mpiddp.process.rank_process import read_stat
from mpiddp.wording import describe_size

LEFTOVERS = "left behind"
STARTED = (environment.ATTEMPT_TOKEN, *environment.MANAGER_HINTS)
"""Variables of processes that belong to a job."""
BESIDE = ("mpiddp.lifeline", "mpiddp/process/")
"""In the command of what mpiddp starts beside ranks: it has no parent, and ends with them."""
REAPERS = ("init", "systemd")
"""What takes processes whose parents have gone, besides process 1."""
LAUNCHERS = re.compile(r"mpiddp|mpirun|mpiexec|hydra|(prte|orte)run|(prte|orte)d\b|srun")
"""In the command of process 1 of a container: its children are those of a job that runs."""
SHOWN = 4
"""Processes and files that a line names."""


@dataclass(frozen=True)
class Leftovers:
    """Of this user, on one node."""

    processes: tuple[int, ...] = ()
    """Those whose launcher has gone."""
    files: tuple[str, ...] = ()
    """Shared memory and directories of an MPI that nobody uses."""
    size: int = 0
    """Of the files, in bytes."""


def find_leftovers() -> Leftovers:
    """Look at this node."""
    files = tuple(sorted(find()))
    return Leftovers(tuple(sorted(_find_orphans())), files, sum(map(_measure, files)))


def _find_orphans() -> list[int]:
    found = []
    signs = [f"{name}=".encode() for name in STARTED]
    for name in filter(str.isdigit, os.listdir("/proc")):
        # It may end meanwhile; one that has ended has no variables.
        with contextlib.suppress(OSError, IndexError):
            if os.stat(f"/proc/{name}").st_uid != os.geteuid() or not has_variable(
                int(name), signs
            ):
                continue
            is_beside = any(word in _read_command(name) for word in BESIDE)
            if not is_beside and _has_lost_parent(int(read_stat(name)[1])):
                found.append(int(name))
    return found


def _has_lost_parent(parent: int) -> bool:
    if parent == 1:
        return not LAUNCHERS.search(_read_command("1"))
    return Path("/proc", str(parent), "comm").read_text().strip() in REAPERS


def _read_command(process: str) -> str:
    return Path("/proc", process, "cmdline").read_text(errors="replace")


def _measure(path: str) -> int:
    """Bytes of a file; 0 for a directory, whose files are small."""
    with contextlib.suppress(OSError):
        return os.lstat(path).st_blocks * 512 if os.path.isfile(path) else 0
    return 0


def judge_leftovers(found: Leftovers) -> Finding:
    processes, files = found.processes, found.files
    if not processes and not files:
        return passed(LEFTOVERS, "no processes, shared memory or directories of earlier jobs")
    parts, advice = [], []
    if processes:
        noun = "process" if len(processes) == 1 else "processes"
        parts.append(f"{len(processes)} {noun} whose launcher has gone")
        advice.append(f"kill {' '.join(map(str, processes[:SHOWN]))}")
    if files:
        noun = "file or directory" if len(files) == 1 else "files and directories"
        parts.append(f"{len(files)} {noun} of a killed MPI ({describe_size(found.size)})")
        advice.append(f"rm -r {shlex.join(files[:SHOWN])}")
    rest = any(len(each) > SHOWN for each in (processes, files))
    return warned(
        LEFTOVERS,
        " and ".join(parts),
        f"If nothing of yours needs them: {'; '.join(advice)}{', and so on' if rest else ''}",
    )
