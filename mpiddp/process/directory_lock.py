"""A lock on a directory: one process holds it, and it ends with that process.

It is a POSIX lock (fcntl(2)), which network file systems keep, on a file whose first line says who
holds it. The lock of a node that was lost may linger there, up to 90 s with NFS. So an attempt
waits for the lock of an earlier attempt of its own job, which the front's --restarts or a requeue
of Slurm has replaced. Any other job is refused at once.

Nothing else may open and close the file meanwhile: a POSIX lock goes with the first descriptor that
its process closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.process.rank_process import find_start
from mpiddp.wording import print_message

LONGEST_WAIT = 120.0
"""Seconds that an attempt waits for an earlier one of its job."""
PERIOD = 0.5
"""Seconds between two tries."""
HELD = (BlockingIOError, PermissionError)
"""What fcntl(2) says if another process holds a lock."""
LONGEST_RECORD = 8192
"""Bytes."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, or held it last. What is not known is None, or 0."""

    job: str | None = None
    """Name and id of the Slurm job."""
    host: str | None = None
    process: int | None = None
    started: int | None = None
    """When the process started, in clock ticks since its host did: numbers of processes recur."""
    attempt: int = 0
    """How many have held the lock so far, this one included."""
    requeues: int = 0
    """How often Slurm had started the job again."""
    directory: str | None = None
    """The job directory of the front that started the process; it differs between fronts."""
    restarts: int = 0
    """How often that front had started its ranks again."""
    released: bool = False

    @classmethod
    def of_this_process(cls) -> Holder:
        return cls(
            job=environment.job_name(),
            host=socket.gethostname(),
            process=os.getpid(),
            started=find_start("self"),
            requeues=environment.read_count(environment.SLURM_RESTART_COUNT),
            directory=os.environ.get(environment.JOB_DIRECTORY) or None,
            restarts=environment.read_count(environment.TORCHELASTIC_RESTART_COUNT),
        )

    @classmethod
    def from_record(cls, record: Any) -> Holder:
        """Whatever ``record`` holds of a holder; what is of another type is left out."""
        if not isinstance(record, dict):
            return cls()
        kinds = {
            "job": str, "host": str, "process": int, "started": int, "attempt": int,
            "requeues": int, "directory": str, "restarts": int, "released": bool,
        }  # fmt: skip
        return cls(**{key: record[key] for key in kinds if type(record.get(key)) is kinds[key]})

    def follows(self, other: Holder) -> bool:
        """Whether it is a later attempt of the job that ``other`` is an attempt of."""
        if self.job != other.job:
            return False
        if self.job is not None and self.requeues != other.requeues:
            return self.requeues > other.requeues
        is_same = self.directory is not None and self.directory == other.directory
        return is_same and self.restarts > other.restarts

    def is_process_of(self, other: Holder) -> bool:
        return (self.host, self.process, self.started) == (other.host, other.process, other.started)

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        return f"{job}process {self.process} on {self.host}"


class DirectoryLock:
    """A lock that this process holds until `close`, or until it ends."""

    def __init__(self, path: Path, descriptor: int, holder: Holder) -> None:
        """Use `acquire`. Takes over the descriptor of the locked file."""
        self.path = path
        """The directory."""
        self._descriptor: int | None = descriptor
        self._holder = holder

    @classmethod
    def acquire(
        cls,
        path: Path,
        what: str,
        advice: str,
        *,
        check: Callable[[], object] = lambda: None,
        pause: Callable[[float], object] = time.sleep,
        longest: float = LONGEST_WAIT,
    ) -> Self:
        """Take the lock in the file ``path``, which is made if it does not exist.

        Args:
            path: the file; its parent is the directory that is locked.
            what: is locked, in the words of the error.
            advice: what to do about the error.
            check: called with the lock held, before anything is written; what it raises releases
                the lock.
            pause: called with seconds between two tries, and must take about as long. A caller
                whose other ranks wait for it can keep them informed here.
            longest: seconds to wait for an earlier attempt of the same job.

        Raises:
            ConfigurationError: another job or process holds the lock, or this very process does.
            OSError: the file cannot be written or locked.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            found = _lock(descriptor, path.parent, pause, longest)
            mine = Holder.of_this_process()
            if found is None:
                found = _read(descriptor)
                if found.is_process_of(mine) and not found.released:
                    # This descriptor stays open, or the lock would go with it.
                    descriptor = -1
                else:
                    check()
                    lock = cls(path.parent, descriptor, replace(mine, attempt=found.attempt + 1))
                    try:
                        _write(descriptor, lock._holder)
                    except OSError:
                        # What was written must not keep this process from trying again.
                        lock.abandon()
                        raise
                    return lock
            raise ConfigurationError(f"{what} is in use by {found}: {advice}")
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise

    @property
    def attempt(self) -> int:
        """How many have held the lock so far; counted from 1."""
        return self._holder.attempt

    def is_current(self) -> bool:
        """Whether no later holder has taken it over, as after a node was cut off."""
        return self._descriptor is not None and _read(self._descriptor).attempt == self.attempt

    def abandon(self) -> None:
        """Let this process take the lock again, as after an error; others still cannot."""
        # A forked child has the descriptor, but not the lock.
        if self._holder.process == os.getpid() and self.is_current():
            with contextlib.suppress(OSError):
                assert self._descriptor is not None
                _write(self._descriptor, replace(self._holder, released=True))

    def close(self) -> None:
        """Note that the lock is released, and release it; the second time nothing is done."""
        self.abandon()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(
    descriptor: int, directory: Path, pause: Callable[[float], object], longest: float
) -> Holder | None:
    """Lock the file; returns who holds it if it is not to be had."""
    mine, end = Holder.of_this_process(), None
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except HELD:
            found = _read(descriptor)
        if not mine.follows(found):
            return found
        if end is None:
            end = time.monotonic() + longest
            print_message(
                f"waiting up to {longest:g} s for the lock of {directory}, held by {found}, an "
                "earlier attempt of this job"
            )
        if time.monotonic() >= end:
            return found
        pause(PERIOD)


def _read(descriptor: int) -> Holder:
    """What the last holder wrote; nothing is known if there was none or it was cut short."""
    try:
        # What a longer line has left behind the first one is nothing.
        return Holder.from_record(
            json.loads(os.pread(descriptor, LONGEST_RECORD, 0).partition(b"\n")[0])
        )
    except (ValueError, RecursionError):
        return Holder()


def _write(descriptor: int, holder: Holder) -> None:
    text = f"{json.dumps(asdict(holder))}\n".encode()
    # In this order, a full disk leaves what stood there before, and thus the number of attempts.
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))
