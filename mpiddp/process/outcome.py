"""What a run directory tells of a failure: logs, and ``outcome.json``, which job scripts read."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpiddp.errors import SUCCESS
from mpiddp.files import write_whole
from mpiddp.process import job_directory
from mpiddp.process.background import BackgroundCall, LateError
from mpiddp.process.job_directory import read_outcome as read_outcome
from mpiddp.wording import read_message

FILES_SECONDS = 2.0
"""How long the run directory may take to accept a report."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. A run without one lost the rank that should have written it."""

    code: int
    """Exit code (`mpiddp.errors`)."""
    reason: str
    rank: int
    """The rank that wrote this."""
    host: str
    step: int | None
    """Step of training, None before the first."""
    attempt: int
    """Of the run, counted from 1."""
    lost_rank: int | None = None
    """The rank that was lost, or left early, if that ended the attempt."""
    lost_host: str | None = None
    """Its host, if the rank did not leave by itself."""
    node_fault: str | None = None
    """What is wrong with ``host``, if the error is the machine's and not the script's."""


def find_log(run_directory: Path | None, rank: int) -> Path | None:
    """The log for the reports of a rank whose output is not logged."""
    return None if run_directory is None else run_directory / "logs" / f"rank-{rank}.log"


def write_report(
    log: Path | None, text: str, directory: Path | None, outcome: Outcome | None
) -> str:
    """Append ``text`` to ``log``, and write ``outcome`` unless the run is done.

    The outcome is written to the run ``directory``, if there is one, and to the job's directory.
    A rank of an attempt that has been replaced writes nothing. Waits FILES_SECONDS for the file
    system. Returns what kept the outcome from being written, empty if nothing did.
    """

    def write() -> str:
        problem = ""
        if job_directory.is_superseded():
            return problem
        try:
            if outcome is not None:
                write_outcome(directory, outcome)
        except OSError as error:
            problem = f"{outcome_path(directory or Path())} could not be written: {error.strerror}"
        if log is None:
            return problem
        with contextlib.suppress(OSError):  # The console has it as well.
            log.parent.mkdir(exist_ok=True)
            # Names of files may hold bytes that are no text.
            with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        return problem

    try:
        return BackgroundCall(write).finish(FILES_SECONDS)
    except LateError:
        return f"{_name(directory)} did not take this report within {FILES_SECONDS:g} s"
    except BaseException as error:  # The job ends all the same.
        return f"{_name(directory)} did not take this report: {read_message(error)}"


def _name(directory: Path | None) -> str:
    return "the job's directory" if directory is None else str(directory)


def _is_done(directory: Path) -> bool:
    outcome = read_outcome(directory)
    return outcome is not None and outcome.get("code") == SUCCESS


def write_outcome(run_directory: Path | None, outcome: Outcome, *, ends_job: bool = True) -> None:
    """Write the outcome atomically: for the run, if there is one; if ``ends_job``, for the front.

    The outcome of a run that is done is not replaced. For the front the first outcome counts, or
    rank 0's: a node that is cut off believes that the others are lost. Raises OSError if the run's
    cannot be written.
    """
    row: dict[str, Any] = asdict(outcome)
    try:
        if run_directory is not None and not _is_done(run_directory):
            write_whole(outcome_path(run_directory), _format(row))
    finally:
        job = job_directory.find() if ends_job else None
        takes_precedence = outcome.rank == 0 and job is not None and not _is_done(job)
        if job is not None and (takes_precedence or read_outcome(job) is None):
            row["path"] = None if run_directory is None else str(outcome_path(run_directory))
            with contextlib.suppress(OSError):
                write_whole(outcome_path(job), _format(row))


def _format(row: dict[str, Any]) -> str:
    return json.dumps(row, indent=2) + "\n"


def outcome_path(run_directory: Path) -> Path:
    """Where the outcome of a run stands."""
    return run_directory / job_directory.OUTCOME
