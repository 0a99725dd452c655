"""Whose a directory of checkpoints is: ``owner.json``, and the lock of the job that writes there.

The owner is who wrote the first checkpoint: a run, and what decides its result. Others do not write
there, and nobody deletes what another owner wrote. Each owner has a token, which its checkpoints'
manifests name.
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import decode, read_whole, write_whole
from mpiddp.process.directory_lock import DirectoryLock
from mpiddp.wording import print_message

FORMAT = 1
OWNER = "owner.json"
LOCK = "lock"
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What fcntl(2) says on a file system without locks."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """What ``owner.json`` says."""

    format: int = FORMAT
    run: str | None
    """Name of the run or script; None if it has none."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that decide the result."""
    token: str = ""
    """No other owner has this one."""
    job: str | None = None
    """Name and id of the Slurm job that came first."""
    host: str | None = None
    since: str | None = None
    """Local date and time."""

    @classmethod
    def make(cls, run: str | None, identity: Mapping[str, Any]) -> Owner:
        """This process, with a new token."""
        return cls(
            run=run,
            identity=decode(json.dumps(dict(identity)), dict[str, Any]),
            token=secrets.token_hex(8),
            job=environment.job_name(),
            host=socket.gethostname(),
            since=datetime.now().strftime("%Y-%m-%d %H:%M"),
        )

    def is_same(self, other: Owner) -> bool:
        """Whether the names of the runs are equal; without two names, whether all values are.

        Those of ``identity`` that both have are compared. A run that goes on under its name may
        have changed some.
        """
        if self.run is not None and other.run is not None:
            return self.run == other.run
        return not self._list_changed(other)

    def _list_changed(self, other: Owner) -> list[str]:
        shared = [name for name in self.identity if name in other.identity]
        return [name for name in shared if self.identity[name] != other.identity[name]]

    def describe(self, other: Owner | None = None) -> str:
        """``run 'a' (here 'b'; model 'mlp', here 'convnet'; job 17, since 2026-11-20 10:00)``.

        ``other``: what it differs from.
        """
        name = "a script without a name" if self.run is None else f"run {self.run!r}"
        parts = []
        if other is not None:
            if None not in (self.run, other.run) and self.run != other.run:
                parts.append(f"here {other.run!r}")
            changed = (
                f"{each} {self.identity[each]!r}, here {other.identity[each]!r}"
                for each in self._list_changed(other)
            )
            parts.append(", ".join(changed))
        job = f"job {self.job}" if self.job else f"on {self.host}" if self.host else ""
        since = f"since {self.since}" if self.since else ""
        parts.append(", ".join(each for each in (job, since) if each))
        details = "; ".join(each for each in parts if each)
        return f"{name} ({details})" if details else name


@dataclass(frozen=True)
class OwnerFormat:
    """What other releases' files say, too."""

    format: int


UNKNOWN = Owner(run=None)
"""Of checkpoints without an owner file that can be used."""


def read_owner(directory: Path) -> Owner | None:
    """Who owns it; UNKNOWN if only its checkpoints show that somebody does, None if nobody does.

    Raises OSError, and ConfigurationError if a later release wrote the file.
    """
    try:
        data = read_whole(directory / OWNER)
        found = decode(data, OwnerFormat)
        if found.format == FORMAT:
            return decode(data, Owner)
    except (FileNotFoundError, NotADirectoryError, ContentError):
        return UNKNOWN if holds_checkpoints(directory) else None
    raise ConfigurationError(
        f"checkpoints: {directory / OWNER} has format {found.format}, and this mpiddp reads format "
        f"{FORMAT}: use the release that wrote it, or another directory"
    )


def holds_checkpoints(directory: Path) -> bool:
    """Whether there is one, be it damaged. Raises OSError."""
    return bool(manifests.list_checkpoints(directory) or manifests.list_damaged(directory))


def write_owner(directory: Path, owner: Owner) -> None:
    """Raises OSError."""
    write_whole(directory / OWNER, json.dumps(asdict(owner), indent=1) + "\n")


def refuse_stranger(directory: Path, mine: Owner, advice: str) -> Owner | None:
    """The owner that is there, None if ``mine`` may become it.

    Raises ConfigurationError if it is another one, and has left a checkpoint, and OSError.
    ``advice``: end of the line, with {path} for the newest checkpoint there.
    """
    found = read_owner(directory)
    if found is None or (found is not UNKNOWN and found.is_same(mine)):
        return found
    if not holds_checkpoints(directory):
        return None
    who = "an unknown owner" if found is UNKNOWN else found.describe(mine)
    newest = next(iter(manifests.list_checkpoints(directory)), directory)
    raise ConfigurationError(
        f"checkpoints: {directory} belongs to {who}: {advice.replace('{path}', str(newest))}"
    )


def lock(directory: Path, mine: Owner, advice: str) -> DirectoryLock | None:
    """Lock the directory, unless it is a stranger's; None on a file system without locks.

    Raises ConfigurationError if another job holds the lock, or the directory is a stranger's, and
    OSError. Waits for an earlier attempt of the same job.
    """
    patience = manifests.Patience(0)
    try:
        return DirectoryLock.acquire(
            directory / LOCK,
            f"checkpoints: {directory}",
            "wait for its end, or choose another directory",
            check=lambda: patience.read(refuse_stranger, directory, mine, advice),
        )
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print_message(
            f"{directory} cannot be locked ({error.strerror}): make sure that no other job writes "
            "checkpoints there"
        )
        return None
