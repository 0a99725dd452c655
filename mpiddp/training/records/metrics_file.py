"""``metrics.jsonl``: a row for each epoch and attempt, and for so many steps with log_every."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from mpiddp.files import explain_unwritable, read_whole, replaced
from mpiddp.process.job_directory import check_attempt
from mpiddp.training.records.history import MOST_BYTES, is_of_steps, parse_row
from mpiddp.training.records.metrics import Row, StepsRow

WRITE_SECONDS = 5.0
"""Between two writes of rows of steps: each waits for the disk."""


def read_last_row(path: Path) -> Row | None:
    """The last epoch's row of a finished run's ``metrics.jsonl``; None if there is none."""
    lines = read_whole(path, MOST_BYTES).splitlines() if path.exists() else []
    found = (line for line in reversed(lines) if not is_of_steps(parse_row(line) or {}))
    return next(map(Row.from_json, found), None)


class MetricsFile:
    """``metrics.jsonl``, one JSON object per line; attempts of a run follow one another.

    A row that the disk does not take is kept, and written before the next one. The file has whole
    rows at any time.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        """``step``: the last one whose rows of steps stay; others will be written again."""
        self._path = path
        self._last_write = time.monotonic()
        self._rows: list[str] = []
        """That are not written yet."""
        if path.exists():
            # A killed process may have left part of a row. One system call removes it, so that a
            # second kill cannot damage the complete rows.
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            with contextlib.suppress(OSError):  # A full disk: readers take the later of two rows.
                _remove_steps(path, step)

    def append(self, row: Row | StepsRow) -> str:
        """Write a row, after those that could not be written before; rows of steps may wait.

        Returns what kept the disk from taking it, empty if nothing did.
        """
        self._rows.append(row.to_json() + "\n")
        if isinstance(row, StepsRow) and time.monotonic() - self._last_write < WRITE_SECONDS:
            return ""
        return self.write()

    def write(self) -> str:
        """Write what has waited, as `append` does."""
        if not self._rows:
            return ""
        check_attempt()
        self._last_write = time.monotonic()
        try:
            _append_whole(self._path, "".join(self._rows).encode())
        except OSError as error:
            return f"{self._path} could not be written: {explain_unwritable(error, self._path)}"
        self._rows.clear()
        return ""


def _remove_steps(path: Path, step: int) -> None:
    """Leave out rows of steps after ``step``. Raises OSError; the file is as it was then."""
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [parse_row(line) or {} for line in lines]
    kept = [
        line
        for line, row in zip(lines, rows, strict=True)
        if not is_of_steps(row) or row["step"] <= step
    ]
    if len(kept) < len(lines):
        with replaced(path) as temporary:
            _append_whole(temporary, b"".join(kept))


def _append_whole(path: Path, data: bytes) -> None:
    """Append all of ``data``, or nothing. Raises OSError, also for what a write has put off."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
