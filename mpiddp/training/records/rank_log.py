"""``logs/rank-<r>.log`` in the run's directory: what each rank did, with the time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path


class RankLog:
    """Appends lines. Reports of failures come into the same file (`mpiddp.process.outcome`)."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        """``warn`` is told once of a file that cannot be written; its lines are lost then."""
        self._path, self._warn = path, warn
        self._is_good = True

    def write(self, text: str) -> None:
        if not self._is_good:
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(timespec='milliseconds')} {text}\n")
        except OSError as error:
            self._is_good = False
            self._warn(f"{self._path} could not be written: {error.strerror}")
