"""How many CPUs this process may use: the kernel's mask, and the quota of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def find_cpus() -> frozenset[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # Not Linux, where schedules are studied, too.


def find_quota(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> float:
    """The cores' worth of time that this process's container or job has; no limit is inf.

    The smallest of the quotas of its control group and of those around it. A container sees its
    own group as the root, and perhaps the name that the group has outside, which leads nowhere.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    old = next((each for each in groups if "cpu" in each.split(",")), "cpu")
    folders = [
        *_list_folders(root, groups.get("", "/")),
        *_list_folders(root / old, groups.get(old, "/")),
    ]
    return min((_read_quota(folder) for folder in folders), default=math.inf)


def _list_folders(root: Path, group: str) -> list[Path]:
    """The folder of a control group, and those of the groups around it."""
    names = [name for name in group.split("/") if name not in ("", "..")]
    return [root.joinpath(*names[:count]) for count in range(len(names) + 1)]


def _read_quota(folder: Path) -> float:
    """A control group's own: cgroup v2 has it in one file, v1 in two."""
    try:
        if (unified := folder / "cpu.max").exists():
            share, period = unified.read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            share, period = ((folder / name).read_text() for name in names)
        found = float(share) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        # There is no such file, or it says "max".
        return math.inf
    # -1 is no limit in v1.
    return found if found > 0 else math.inf


def count_shared_cores(masks: Sequence[Collection[int]], quotas: Sequence[float]) -> float:
    """The cores that processes of one machine may use between them.

    They are taken to be in one container, whose quota each of them has found.
    """
    return min(len(set().union(*masks)), max(quotas, default=math.inf))


def count_cores() -> int:
    """Cores that this process may use, at least 1: hardware threads and quota considered.

    Open MPI counts slots in the same way, but for the quota.
    """
    cpus = find_cpus()
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        cores = len({Path(siblings.format(each)).read_text() for each in cpus})
    except OSError:
        cores = len(cpus)
    return max(1, math.floor(min(find_quota(), cores)))
