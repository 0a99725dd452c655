"""``runs/<name>/``: who may write there, and what lies there when training starts.

config.toml      the resolved configuration
tuning.json      the tuning table, if --tuning or MPIDDP_TUNING names one
metrics.jsonl    one row per epoch and attempt, and per --log-every steps
outcome.json     how the last attempt ended; written by the failure handler
logs/            one file per rank that had something to say; written by the failure handler
checkpoints/     what the run can go on from (`mpiddp.checkpoints.storage.directory`)
predictions.csv  of --evaluate-only, a row per sample
lock             who holds the run now
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.checkpoints.storage.manifest import CONFIGURATION
from mpiddp.errors import SUCCESS, ConfigurationError
from mpiddp.files import explain_unwritable, write_whole
from mpiddp.process.directory_lock import DirectoryLock
from mpiddp.process.outcome import outcome_path, read_outcome
from mpiddp.training.options.config import Configuration, to_toml
from mpiddp.training.records.history import METRICS

LOGS = "logs"
LOCK = "lock"
LONGEST_NAME = 199
"""Bytes of a name that is made from a Slurm job's. File systems take 255."""


class RunDirectory(DirectoryLock):
    """A run that this process may write to, until ``close`` or its end."""


def find_path(configuration: Configuration) -> Path | None:
    """Where the run will be; None if only the time will tell. Nothing is made."""
    name, is_fixed = _choose_name(configuration)
    return configuration.runs_dir / name if is_fixed else None


def open_run(
    configuration: Configuration, pause: Callable[[float], object] = time.sleep
) -> RunDirectory:
    """Make the run's directory, or take over one whose last attempt did not succeed.

    Call it on rank 0 alone, when nothing else can refuse the configuration. It waits for an earlier
    attempt of the same job, and calls ``pause`` with seconds meanwhile (`DirectoryLock.acquire`).

    Raises ConfigurationError if the directory cannot be written, is in use, or holds a run that has
    finished; nothing is left behind or changed then.
    """
    name, is_fixed = _choose_name(configuration)
    try:
        path, is_new = _make_directory(configuration.runs_dir, name, is_fixed)
    except OSError as error:
        raise _unwritable(configuration.runs_dir / name, error) from None
    checkpoints = configuration.checkpoint_dir
    if checkpoints is not None:
        # Others look for it from other working directories.
        checkpoints = checkpoints.absolute()
    written = replace(configuration, name=path.name, checkpoint_dir=checkpoints)
    try:
        return _take(path, written, pause)
    except OSError as error:
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise _unwritable(path, error) from None


def forget_outcome(configuration: Configuration) -> Path | None:
    """Delete the outcome of an earlier attempt at this run, before the next one can fail.

    Call it on rank 0 alone, first of all. Returns the run's directory, for the failure handler to
    write into whatever comes next; None if the run is new, in use, or finished.
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
        refuse_finished(path)
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


def _take(
    path: Path, configuration: Configuration, pause: Callable[[float], object]
) -> RunDirectory:
    run = RunDirectory.acquire(
        path / LOCK,
        f"name: the run {path}",
        "choose another --name",
        check=lambda: refuse_finished(path),
        pause=pause,
    )
    try:
        outcome_path(path).unlink(missing_ok=True)
        (path / LOGS).mkdir(exist_ok=True)
        write_whole(path / CONFIGURATION, to_toml(configuration))
    except BaseException:
        run.close()
        raise
    return run


def find_success(path: Path) -> dict[str, Any] | None:
    """The outcome of the last attempt at the run in ``path``, if it has succeeded."""
    outcome = read_outcome(path)
    return outcome if outcome is not None and outcome.get("code") == SUCCESS else None


def refuse_finished(path: Path) -> None:
    """Raise ConfigurationError if the run in ``path`` has succeeded."""
    if find_success(path) is not None:
        more = f"; to train on from it: --resume {path}, with another --name and more --epochs"
        raise ConfigurationError(
            f"name: the run {path} has finished and is not overwritten: choose another --name"
            f"{more if (path / METRICS).exists() else ''}"
        )


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"runs_dir: cannot write the run directory {path}: {explain_unwritable(error, path)}: "
        "choose another --runs-dir"
    )
