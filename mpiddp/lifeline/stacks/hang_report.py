"""One report of where all ranks are, after a hang or a crash: a few lines, and all of it in a file.

The file is ``report.txt`` in the directory of logs, or else of the training; a job that has neither
has one in the user's own directory of state, ``~/.local/state/mpiddp/reports/JOB.txt``.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.lifeline.stacks import nccl_status
from mpiddp.lifeline.stacks.positions import StackPosition
from mpiddp.lifeline.stacks.verdict import describe
from mpiddp.process import job_directory
from mpiddp.process.background import BackgroundCall, LateError

FILE = "report.txt"
RECORDS = "-flight-rank-"
"""After the report's name, in those of torch's own records of NCCL's collectives; the rank's number
follows."""
KEPT_DAYS = 30
"""Reports of jobs without directories; older ones are removed."""
FILE_SECONDS = 1.0
"""How long the file system may take."""


@dataclass(frozen=True)
class HangReport:
    """Where the ranks of a job were."""

    positions: Sequence[StackPosition]
    ras: str = ""
    """The address at which NCCL answers; empty if it is not asked."""
    records: str = ""
    """The beginning of the files that torch writes if NCCL times out; empty for none."""

    def write(self, reason: str, directory: Path | None) -> Path | None:
        """Append the whole report, after ``reason``, to a file. Returns which.

        ``directory``: of logs, or of a training. None if no file system takes it in FILE_SECONDS.
        """
        nccl = nccl_status.ask(self.ras) if self.ras else ""
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        table = f"All ranks, the innermost frames first:\n{describe(self.positions, is_full=True)}"
        text = f"{when}\n{reason}\n{table}{nccl}{self._describe_records()}\n"
        with contextlib.suppress(LateError, OSError):
            return BackgroundCall(lambda: _append(text, directory)).finish(FILE_SECONDS)
        return None

    def _describe_records(self) -> str:
        """Where torch's own records are, if it writes any."""
        if not self.records:
            return ""
        path = Path(self.records)
        command = f"torchfrtrace {shlex.quote(str(path.parent))} --prefix {shlex.quote(path.name)}"
        return f"If a collective of NCCL times out, torch writes {path}N. To read them: {command}\n"


def choose_file(directory: Path | None) -> Path:
    """Where the report of this process's job belongs; the directory is made if it is the state's.

    Raises OSError.
    """
    if directory is not None:
        return directory / FILE
    job = job_directory.find()
    parent = job_directory.make_state_directory("reports")
    return parent / f"{job.name if job is not None else job_directory.choose_name()}.txt"


def choose_records(directory: Path | None) -> str:
    """The beginning of the files of torch's records, beside the report. Raises OSError."""
    path = choose_file(directory).absolute()
    return str(path.with_name(path.stem + RECORDS))


def _append(text: str, directory: Path | None) -> Path | None:
    if job_directory.is_superseded():
        return None
    path = choose_file(directory)
    if directory is None:
        job_directory.remove_old(path.parent, KEPT_DAYS)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return path
