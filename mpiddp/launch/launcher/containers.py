"""What a container puts between this rank and the launcher's daemon, which has started it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mpiddp import environment
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.process.descendants import has_variable
from mpiddp.process.rank_process import read_stat

USER, PROCESSES = "user", "pid"
"""Namespaces, as in /proc/self/ns."""
USER_MAP = Path("/proc/self/uid_map")


def find_own_namespaces(launcher: Launcher) -> frozenset[str]:
    """The namespaces of this process in which the daemon is not: USER, PROCESSES, both or none.

    Behind PROCESSES other ranks are processes of the same numbers, or of none.
    """
    daemon = _find_daemon(launcher)
    namespaces = set() if daemon else {PROCESSES}
    if _read_users() not in ([], [(0, 0, 2**32 - 1)]) and not _shares_users(daemon):
        namespaces.add(USER)
    return frozenset(namespaces)


def find_outer_user(user: int) -> int:
    """A user's number outside of this process's user namespace."""
    for inside, outside, count in _read_users():
        if inside <= user < inside + count:
            return outside + user - inside
    return user


def _find_daemon(launcher: Launcher) -> int:
    """The nearest process above that is not this rank; 0 if it cannot be seen from here."""
    names = {row.rank for row in environment.LAUNCHERS if row.key == launcher.key}
    marks = [f"{name}={launcher.rank}\0".encode() for name in names]
    process = os.getppid()
    with contextlib.suppress(OSError):
        while process and has_variable(process, marks):
            process = int(read_stat(process)[1])
    return process


def _shares_users(process: int) -> bool:
    """Whether a process is in this one's user namespace."""
    folder = Path("/proc", str(process))
    with contextlib.suppress(OSError):
        try:
            return (folder / "ns/user").samefile("/proc/self/ns/user")
        except PermissionError:
            # Slurm's daemon, which is root's. All of a node may be a container: as seen from here
            # the map of another namespace differs.
            return (folder / "uid_map").read_bytes() == USER_MAP.read_bytes()
    return False


def _read_users() -> list[tuple[int, ...]]:
    """Rows of a first number inside, the one outside that it stands for, and how many follow."""
    with contextlib.suppress(OSError, ValueError):
        return [tuple(map(int, line.split())) for line in USER_MAP.read_text().splitlines()]
    return []
