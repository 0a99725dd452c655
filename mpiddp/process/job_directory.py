"""A private directory of one running job, in which its processes find each other.

attempt          the token of the attempt that runs now (`restarts`)
outcome.json     how that attempt ended, written by a rank that failed
lock             held by the process that made the directory, as long as it lives

It lies below ``$XDG_STATE_HOME/mpiddp/jobs`` (``~/.local/state/…``), which the nodes of a cluster
share if they share the home; if that cannot be written, in the temporary directory. Only its
owner can read it. The process that made it removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.errors import PeerLostError
from mpiddp.files import read_whole, replaced
from mpiddp.process.directory_lock import HELD

LOCK = "lock"
ATTEMPT = "attempt"
OUTCOME = "outcome.json"
KINDS = {
    "code": int, "reason": str, "rank": int, "host": str, "step": int, "attempt": int,
    "lost_rank": int, "lost_host": str, "node_fault": str, "path": str,
}  # fmt: skip
"""What an outcome may hold; None stands for whatever is of another type."""


def choose_name() -> str:
    """The Slurm job's id, ARRAY_TASK in an array; else ``HOST-PROCESS``."""
    return environment.job_identity() or f"{os.uname().nodename}-{os.getpid()}"


def make_state_directory(name: str) -> Path:
    """A private directory for what outlasts a job, beside those of running jobs. Raises OSError."""
    try:
        return make_private(_state_directory().with_name(name))
    except OSError:
        return make_private(_temporary_directory().with_name(name))


def remove_old(directory: Path, days: int) -> None:
    """Remove the files that nobody has written to for so long, as far as that is possible."""
    since = time.time() - 24 * 3600 * days
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_file() and path.stat().st_mtime < since:
                path.unlink(missing_ok=True)


def make(name: str) -> Path:
    """Make an empty directory that is this process's, until it ends.

    It is called ``NAME``, or ``NAME-2`` and so on while another process has that one. Those that
    processes of this host have left behind are removed. Raises OSError if none can be made.
    """
    try:
        return _make_in(_state_directory(), name)
    except OSError:
        return _make_in(_temporary_directory(), name)


def _make_in(place: Path, name: str) -> Path:
    parent = make_private(place)
    _remove_all_abandoned(parent)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        path.mkdir(mode=0o700, exist_ok=True)
        if is_private(path) and _take(path):
            return path
        number += 1


def _remove_all_abandoned(parent: Path) -> None:
    """Remove the directories of processes of this host that have gone, by their names."""
    for path in parent.glob(f"{glob.escape(os.uname().nodename)}-*"):
        process = path.name.removeprefix(f"{os.uname().nodename}-").partition("-")[0]
        has_gone = process.isdecimal() and not Path("/proc", process).exists()
        if has_gone:
            remove_abandoned(path)


def make_or_none() -> Path | None:
    """A directory for this process's job; None if none can be made."""
    try:
        return make(choose_name())
    except OSError:
        return None


def remove(path: Path) -> None:
    """Remove a directory that this process has made, as far as it can be."""
    with contextlib.suppress(OSError):
        for each in path.iterdir():
            _remove_entry(each)
        path.rmdir()


def remove_abandoned(path: Path) -> None:
    """Remove a directory whose maker has gone, unless another job of its name has it now."""
    if is_private(path) and not _is_running(path):
        remove(path)


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove(path)
    else:
        path.unlink(missing_ok=True)


def find() -> Path | None:
    """The directory of the job that this process belongs to, or None.

    None also if it does not exist on this node: not all nodes may share it.
    """
    text = os.environ.get(environment.JOB_DIRECTORY)
    path = Path(text) if text else None
    return path if path is not None and is_private(path) else None


def list_running() -> list[Path]:
    """The directories of this user's jobs that are running, as far as this machine sees them."""
    found = []
    for find_parent in (_state_directory, _temporary_directory):
        with contextlib.suppress(OSError):
            found += [path for path in sorted(find_parent().iterdir()) if _is_running(path)]
    return found


def begin_attempt(path: Path, token: str) -> None:
    """Say which attempt runs from now on; what the one before has left is removed."""
    with replaced(path / ATTEMPT) as temporary:
        temporary.write_text(token)
    for each in path.iterdir():
        if each.name not in (LOCK, ATTEMPT):
            _remove_entry(each)


def read_outcome(path: Path) -> dict[str, Any] | None:
    """The outcome in a directory: code, reason, rank, host, …; None if none was written."""
    try:
        # The standard library's alone: the front reads it, too.
        found = json.loads(read_whole(path / OUTCOME))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    values = {name: found[name] for name in KINDS if type(found.get(name)) is KINDS[name]}
    return dict.fromkeys(KINDS) | values if values.get("code") in range(256) else None


def is_superseded() -> bool:
    """Whether this process belongs to an attempt that has been replaced by a later one.

    It must write nothing more then. False if the directory cannot be seen from here.
    """
    token, path = os.environ.get(environment.ATTEMPT_TOKEN), find()
    if not token or path is None:
        return False
    try:
        return (path / ATTEMPT).read_text() != token
    except OSError:
        return False


def check_attempt() -> None:
    """Raise PeerLostError in a process whose attempt has been replaced by a later one."""
    if is_superseded():
        raise PeerLostError(
            "the job was restarted without this rank, which could not be reached: it writes "
            "nothing more, and ends"
        )


def _state_directory() -> Path:
    state = os.environ.get(environment.STATE_HOME)
    # As the XDG specification says: a path that is not absolute is ignored.
    if not state or not os.path.isabs(state):
        try:
            state = str(Path.home() / ".local" / "state")
        except RuntimeError as error:  # A user without a name and without HOME.
            raise OSError(str(error)) from None
    return Path(state, "mpiddp", "jobs")


def _temporary_directory() -> Path:
    import tempfile  # Takes long to import, and is seldom needed.

    return Path(tempfile.gettempdir(), f"mpiddp-{os.getuid()}", "jobs")


def make_private(path: Path) -> Path:
    """Make a directory and its parent, for this user alone.

    Raises OSError if others can write to them, or they cannot be made.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (path.parent, path):
        each.mkdir(mode=0o700, exist_ok=True)
        if not is_private(each):
            raise PermissionError(f"others can write to {each}, or own it")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written")
    return path


def is_private(path: Path) -> bool:
    """Whether this is a directory of this user's, to which nobody else can write."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not stat.S_IMODE(found.st_mode) & 0o022
    )


def _take(path: Path) -> bool:
    """Take the lock, and remove what a process that has gone has left; False if one is there.

    Raises OSError if files cannot be locked.
    """
    # The lock lasts as long as this process: the descriptor is never closed.
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who had it may have ended just now, and removed the directory.
        is_there = os.path.samestat(os.fstat(lock), os.stat(path / LOCK))
    except (*HELD, FileNotFoundError):
        is_there = False
    except OSError:
        os.close(lock)
        raise
    if not is_there:
        os.close(lock)
        return False
    for each in path.iterdir():
        if each.name != LOCK:
            _remove_entry(each)
    return True


def _is_running(path: Path) -> bool:
    """Whether another process holds the lock."""
    if not is_private(path):
        return False
    try:
        lock = (path / LOCK).open("r+")
    except OSError:
        return False
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except HELD:
            return True
        except OSError:
            return False
    return False
