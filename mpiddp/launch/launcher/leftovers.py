"""Removes what an MPI leaves behind on this machine when it is killed.

Open MPI's and MPICH's ranks keep shared memory in files, mpirun keeps a session directory. After a
SIGKILL nobody removes them. A process has such a file open or mapped as long as it needs it, and
the kernel knows: it grants a lease for writing (fcntl(2)) only if no other process has the file
open or mapped, in whatever container that lives. What it does not grant for is left alone, and so
is what is young, another user's, or not known well enough.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial

from mpiddp import environment

MEMORY = "/dev/shm"
SEGMENTS = ("sm_segment.", "vader_segment.", "mpich_shm_", "ucx_shm_posix_")
"""Beginnings of names: of Open MPI 5, Open MPI 4, MPICH, and UCX below any of them."""
SESSION = re.compile(r"(?:ompi|prte|prted|prtrn)\.(\d+)")
"""Open MPI 5's directory, with the process of its mpirun."""
OLD_SESSION = re.compile(r"pid\.(\d+)")
"""Open MPI 4's, in ``ompi.HOST.USER``."""
HELD = "hwloc.sm"
"""The file of a session directory that mpirun has open as long as it lives."""
YOUNG_SECONDS = 60.0
"""A starting job may be about to open what is younger."""
Check = Callable[[str, Callable[[int], bool]], bool]
"""Whether a path is of a kind, and may go."""


def remove(since: float | None = None) -> None:
    """Remove them, as far as they can be removed; errors are passed over.

    ``since``: when a job began that has ended, by time.time(): what is younger may go, too.
    """
    for path in find(since):
        if os.path.isdir(path):
            _remove_session(path)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def find(since: float | None = None) -> Iterator[str]:
    """The paths of memory that nobody uses, and of directories whose mpirun has gone."""
    is_ours = partial(_is_ours, since=since)
    for name in _list(MEMORY):
        path = f"{MEMORY}/{name}"
        if name.startswith(SEGMENTS) and is_ours(path, stat.S_ISREG) and _is_unused(path):
            yield path
    yield from _find_sessions(is_ours)


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _find_sessions(is_ours: Check) -> Iterator[str]:
    """Session directories of this host and user whose mpirun has gone."""
    names = environment.TEMPORARY_DIRECTORIES
    place = next((os.environ[name] for name in names if os.environ.get(name)), "/tmp")
    host = os.uname().nodename
    old = {f"ompi.{name}.{os.geteuid()}" for name in (host, host.partition(".")[0])}
    for name in _list(place):
        if SESSION.fullmatch(name) and os.path.exists(f"{place}/{name}/pmix.{host}.tool"):
            yield from _find_dead(place, [name], SESSION, is_ours)
        elif name in old:
            yield from _find_dead(f"{place}/{name}", _list(f"{place}/{name}"), OLD_SESSION, is_ours)


def _find_dead(
    place: str, names: list[str], pattern: re.Pattern[str], is_ours: Check
) -> Iterator[str]:
    for name in names:
        found = pattern.fullmatch(name)
        path = f"{place}/{name}"
        is_dead = found is not None and not os.path.exists(f"/proc/{found[1]}")
        if is_dead and is_ours(path, stat.S_ISDIR) and os.path.exists(f"{path}/{HELD}"):
            yield path


def _remove_session(path: str) -> None:
    """Remove a directory if none of its files is in use."""
    tree = list(os.walk(path, topdown=False))
    files = [f"{folder}/{name}" for folder, _, names in tree for name in names]
    with contextlib.suppress(OSError):
        if all(_is_unused(each) for each in files if stat.S_ISREG(os.lstat(each).st_mode)):
            for each in files:
                os.unlink(each)
            for folder, _, _ in tree:
                os.rmdir(folder)


def _is_ours(path: str, is_kind: Callable[[int], bool], since: float | None) -> bool:
    """Whether it is of this kind, belongs to this user, and is not young, or as young as that."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    is_old = time.time() - found.st_mtime > YOUNG_SECONDS
    is_left = is_old or (since is not None and found.st_mtime >= since)
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and is_left


def _is_unused(path: str) -> bool:
    """Whether no other process has a file open or mapped."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Who opens it just now waits for the end of the lease, and the kernel says so with a
        # signal: by default one that would end this process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
