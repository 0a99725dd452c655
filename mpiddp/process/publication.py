"""Files that tell a job's user how to reach rank 0's companion."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from mpiddp.files import read_whole, replaced
from mpiddp.process import job_directory

ADDRESS_FILE = "lifeline.json"


class Publication:
    """The files of one job: in its directory, and beside its logs."""

    def __init__(self, place: str, token: str) -> None:
        """``place``: where the companion listens. ``token``: of clients."""
        self._place, self._token = place, token
        self._paths: list[Path] = []
        self._own_directory: Path | None = None
        """The job's directory, if it was made here."""

    def publish(self, logs: Path | None) -> None:
        """Write the files, as far as that is possible. ``logs``: the directory of logs."""
        directory = job_directory.find()
        if directory is None:
            directory = self._own_directory = job_directory.make_or_none()
        if job_directory.is_superseded():
            return
        for each in (directory, logs):
            if each is not None:
                with contextlib.suppress(OSError):
                    self._paths.append(publish(each, self._place, self._token))

    def withdraw(self) -> None:
        """Remove the files, and the directory if it was made here."""
        for path in self._paths:
            _withdraw(path, self._token)
        if self._own_directory is not None:
            job_directory.remove(self._own_directory)


def publish(directory: Path, place: str, token: str) -> Path:
    """Write a file, which this user alone can read. Raises OSError."""
    path = directory / ADDRESS_FILE
    with replaced(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"address": place, "token": token}, file)
    return path


def read_address(path: Path) -> tuple[str, str]:
    """The place and the token that `publish` has written. Raises OSError and ValueError."""
    try:
        found = json.loads(read_whole(path))
        place, token = found["address"], found["token"]
    except (LookupError, TypeError, RecursionError):
        place = token = None
    if not isinstance(place, str) or not isinstance(token, str):
        raise ValueError(f"{path} holds no address")
    return place, token


def _withdraw(path: Path, token: str) -> None:
    """Remove a file, unless another job has written there since."""
    with contextlib.suppress(OSError, ValueError):
        if read_address(path)[1] == token:
            path.unlink()
