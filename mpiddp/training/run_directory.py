"""``runs/<name>/``: who may write there, and what lies there when training starts.

config.toml      the resolved configuration
metrics.jsonl    one row per epoch and attempt
outcome.json     how the last attempt ended; written by the failure handler
logs/            one file per rank that had something to say; written by the failure handler
checkpoints/     what the run can go on from (`mpiddp.training.checkpoint`)
predictions.csv  of --evaluate-only, a row per sample
lock             who holds the run now
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.errors import SUCCESS, ConfigurationError
from mpiddp.launch.failure.outcome import outcome_path, read_outcome, write_whole
from mpiddp.training.config import Configuration, to_toml

CONFIGURATION = "config.toml"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
LOCK = "lock"
LONGEST_NAME = 199
"""Bytes of a name that is made from a Slurm job's. File systems take 255."""


@dataclass(frozen=True)
class RunDirectory:
    """A run that this process may write to, until ``close`` or its end."""

    path: Path
    attempt: int
    """Counted from 1."""
    _lock: int
    """File descriptor of the lock. Nothing else may open and close the file meanwhile: a POSIX
    lock goes with the first descriptor that its process closes."""

    def is_current(self) -> bool:
        """Whether no later attempt has taken the run over, as after a node was cut off."""
        return _read_holder(self._lock).get("attempt") == self.attempt

    def close(self) -> None:
        os.close(self._lock)


def find_path(configuration: Configuration) -> Path | None:
    """Where the run will be; None where only the time will tell. Nothing is made."""
    name, is_fixed = _choose_name(configuration)
    return configuration.runs_dir / name if is_fixed else None


def open_run(configuration: Configuration) -> RunDirectory:
    """Make the run's directory, or take over one whose last attempt did not succeed.

    Call it on rank 0 alone, when nothing else can refuse the configuration.

    Raises ConfigurationError where the directory cannot be written, is in use by another
    process, or holds a run that has finished; nothing is left behind or changed then.
    """
    name, is_fixed = _choose_name(configuration)
    try:
        path, is_new = _make_directory(configuration.runs_dir, name, is_fixed)
    except OSError as error:
        raise _unwritable(configuration.runs_dir / name, error) from None
    try:
        return _take(path, replace(configuration, name=path.name))
    except OSError as error:
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise _unwritable(path, error) from None


def forget_outcome(configuration: Configuration) -> Path | None:
    """Delete the outcome of an earlier attempt at this run, before the next one can fail.

    Call it on rank 0 alone, first of all. Returns the run's directory, for the failure handler to
    write into whatever comes next; None where the run is new, in use, or finished.
    """
    path = find_path(configuration)
    if path is None:
        return None
    try:
        lock = os.open(path / LOCK, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _refuse_finished(path)
        outcome_path(path).unlink(missing_ok=True)
    except (OSError, ConfigurationError):
        return None  # open_run refuses it, with the reason.
    finally:
        os.close(lock)
    return path


def _choose_name(configuration: Configuration) -> tuple[str, bool]:
    """Return the run's name, and whether it must be this one."""
    if configuration.name is not None:
        return configuration.name, True
    job = environment.job_name()
    if job is not None:
        name = "".join(c if c.isprintable() else "-" for c in job).encode()
        # The end holds the job's id; a character that is cut in two is left out.
        return name[-LONGEST_NAME:].decode(errors="ignore"), True
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S"), False


def _make_directory(parent: Path, name: str, is_fixed: bool) -> tuple[Path, bool]:
    """Return the directory, and whether it is new. A time stamp that is taken gets a suffix."""
    parent.mkdir(parents=True, exist_ok=True)
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            if is_fixed:
                return path, False
            number += 1
            path = parent / f"{name}-{number}"
        else:
            return path, True


def _take(path: Path, configuration: Configuration) -> RunDirectory:
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock_or_refuse(lock, path)
        _refuse_finished(path)
        attempt = _sign(lock)
        outcome_path(path).unlink(missing_ok=True)
        (path / LOGS).mkdir(exist_ok=True)
        write_whole(path / CONFIGURATION, to_toml(configuration))
    except BaseException:
        os.close(lock)
        raise
    return RunDirectory(path, attempt, lock)


def _lock_or_refuse(lock: int, path: Path) -> None:
    try:
        # A POSIX lock: it dies with its holder, and network file systems keep it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = _read_holder(lock)
        job = f"job {holder['job']}, " if holder.get("job") else ""
        where = f"{job}process {holder.get('process')} on {holder.get('host')}"
        raise ConfigurationError(
            f"name: the run {path} is in use by {where}: choose another --name"
        ) from None


def _sign(lock: int) -> int:
    """Write this process into the lock, as the holder of the next attempt; return the attempt."""
    last = _read_holder(lock).get("attempt")
    attempt = last + 1 if isinstance(last, int) else 1
    holder = {
        "job": environment.job_name(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "attempt": attempt,
    }
    text = f"{json.dumps(holder)}\n".encode()
    # In this order, a full disk leaves what stood there before, and thus the number of attempts.
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))
    return attempt


def is_finished(path: Path) -> bool:
    """Whether the last attempt at the run in ``path`` has succeeded."""
    outcome = read_outcome(path)
    return outcome is not None and outcome.get("code") == SUCCESS


def _refuse_finished(path: Path) -> None:
    if is_finished(path):
        raise ConfigurationError(
            f"name: the run {path} has finished and is not overwritten: choose another --name"
        )


def _read_holder(lock: int) -> dict[str, Any]:
    """Return what the last holder wrote; empty where there was none or it was cut short."""
    try:
        # What a longer line has left behind the first one is nothing.
        holder = json.loads(os.pread(lock, 4096, 0).partition(b"\n")[0])
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"runs_dir: cannot write the run directory {path}: {error.strerror}: "
        "choose another --runs-dir"
    )
