"""How much memory this process may still take: the machine's, and its control groups' limits.

A process that goes beyond the memory limit of a control group is killed, although the machine may
have memory left. Containers have such limits, and Slurm's jobs if ConstrainRAMSpace is set.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from mpiddp.files import unescape
from mpiddp.wording import describe_size

NO_LIMIT = 1 << 62
PROCESS = Path("/proc/self")
CHECKED_FROM = 1 << 20
"""Bytes. For less, reading the groups' limits would take longer than reserving memory."""
CACHES = ("inactive_file", "active_file")
"""In ``memory.stat``: copies of files on disk, which the kernel drops before it kills a process."""


@dataclass(frozen=True)
class ControlGroup:
    """A control group that counts its own memory and its children's."""

    folder: Path
    is_old: bool
    """Version 1."""

    def find_shortage(self, size: int) -> str:
        """Why a process in it cannot get ``size`` bytes more; empty if it can."""
        limit = self._read("memory.limit_in_bytes" if self.is_old else "memory.max")
        # Version 1 says that there is no limit by a very large one.
        if limit is None or limit >= NO_LIMIT:
            return ""
        used = self._read("memory.usage_in_bytes" if self.is_old else "memory.current")
        if used is None or used + size <= limit:
            return ""
        used -= self._count_caches()
        if used + size <= limit:
            return ""
        return (
            f"the control group {self.folder} allows {describe_size(limit)}, of which "
            f"{describe_size(used)} are in use"
        )

    def _read(self, name: str) -> int | None:
        """Bytes; None if there is no limit, or no such file, as in the topmost group."""
        try:
            return int((self.folder / name).read_text())
        except (OSError, ValueError):
            return None

    def _count_caches(self) -> int:
        try:
            lines = (self.folder / "memory.stat").read_text().splitlines()
        except OSError:
            return 0
        prefix = "total_" if self.is_old else ""
        names = [prefix + name for name in CACHES]
        rows = [line.partition(" ") for line in lines]
        return sum(int(value) for name, _, value in rows if name in names)


def find_shortage(size: int) -> str:
    """Why this process cannot get ``size`` bytes more, without swap; empty if it can."""
    available = psutil.virtual_memory().available
    if size > available:
        return f"the machine has {describe_size(available)} left"
    if size < CHECKED_FROM:
        return ""
    return next(filter(None, (group.find_shortage(size) for group in find_groups())), "")


@functools.cache
def find_groups(process: Path = PROCESS) -> tuple[ControlGroup, ...]:
    """The groups that count this process's memory, from its own up to the topmost visible one."""
    try:
        paths = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:
        return ()
    return tuple(group for mount in mounts for group in _follow(mount, paths))


def _follow(mount: str, paths: list[str]) -> Iterator[ControlGroup]:
    """The groups around a process under one mount; see proc(5), and cgroups(7) for ``paths``."""
    left, _, right = mount.partition(" - ")
    kind, _, options = right.split(" ", 2)
    is_old = kind == "cgroup" and "memory" in options.split(",")
    if not is_old and kind != "cgroup2":
        return
    root, point = map(unescape, left.split(" ")[3:5])
    for line in paths:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") if is_old else number == "0":
            # Inside a container the mount may begin where the container's group does.
            inner = path.removeprefix(root.rstrip("/")).lstrip("/")
            top, folder = Path(point), Path(point) / inner
            folder = folder if ".." not in folder.parts and folder.is_dir() else top
            for each in (folder, *folder.parents):
                yield ControlGroup(each, is_old)
                if each == top:
                    break
