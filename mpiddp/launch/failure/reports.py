"""The report of an error: in words, on the console, in the log, and in outcome.json.

What may hang or fail here (the error's own text, the console, files, a script's hook) is bounded in
time.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mpiddp import environment
from mpiddp.errors import DifferentCallError, PeerLostError, UnreachableError
from mpiddp.launch.failure.error_meaning import (
    describe_error,
    exit_code,
    has_own_hook,
    has_trace,
    visible_part,
)
from mpiddp.launch.failure.error_origin import find_node_fault, is_peer_loss
from mpiddp.launch.failure.peers import Peers
from mpiddp.launch.failure.termination import flush_output
from mpiddp.lifeline.stacks.hang_report import HangReport
from mpiddp.lifeline.stacks.positions import StackPosition
from mpiddp.lifeline.stacks.verdict import describe
from mpiddp.process.background import BackgroundCall, LateError
from mpiddp.process.outcome import Outcome, find_log, write_report
from mpiddp.process.streams.console import FORWARD_SECONDS, print_report
from mpiddp.process.streams.output import Redirection
from mpiddp.wording import read_message

READ_SECONDS = 5.0
"""How long it may take to put an error into words: its text may ask a GPU that hangs, and the lines
of a traceback a file system."""
HANGS = (PeerLostError, UnreachableError, DifferentCallError)
"""Errors that another rank may be the cause of."""
HOOK_SECONDS = 5.0
"""How long a script's own hook may take to show an error, while other ranks wait."""


@dataclass(frozen=True)
class Report:
    """An error in words."""

    error: BaseException
    text: str
    """For the console and the log."""
    outcome: Outcome


class RunProgress(Protocol):
    """How far a run is, as its trainer says; read in any thread."""

    attempt: int
    """Of the run, counted from 1."""
    step_under_way: int | None
    """The step that is being made, from 1; None between steps. While it is the same one, this rank
    makes no progress, whatever its main thread does."""

    @property
    def step(self) -> int | None:
        """Steps taken so far; None for none."""


@dataclass
class FixedProgress:
    """Progress that nothing moves on: of a process that trains nothing."""

    attempt: int = 1
    step_under_way: int | None = None
    step: int | None = None


class FailureReports:
    """One process's reports."""

    def __init__(self, peers: Peers, hidden_files: tuple[str, ...]) -> None:
        """``hidden_files``: source files whose frames are left out at the top of a traceback."""
        self.peers = peers
        self._meeting = threading.RLock()
        self.output = Redirection()
        self.run_directory: Path | None = None
        self.entered_runs: set[Path] = set()
        """The directories of all runs of this job so far."""
        self.run: RunProgress = FixedProgress()
        """Of the last run that was entered."""
        self.runs_script = False
        self.note = ""
        """A line that follows each report."""
        self._hidden_files = hidden_files

    def meet(self, **found: Any) -> None:
        """Start-up has found out more of the other ranks: fields of `Peers`."""
        with self._meeting:
            self.peers = replace(self.peers, **found)

    @property
    def directory(self) -> Path | None:
        """Where the whole report of a hang belongs: that of logs, else of the run."""
        return self.output.log.parent if self.output.log is not None else self.run_directory

    @property
    def step(self) -> int | None:
        """Step of training, for messages and outcome.json."""
        return self.run.step

    def note_step(self, step: int | None) -> None:
        """Tell this node's companion, which outlives this process, how many steps are taken."""
        if self.peers.lifeline is not None:
            self.peers.lifeline.progress.note_step(step)

    def redirect(self, output: Redirection) -> None:
        """This process prints there from here on."""
        self.output = output

    def begin_script(self) -> None:
        """A script runs in this process: its exceptions and exit codes are left unchanged."""
        self.runs_script = True

    def foresee_run(self, directory: Path | None) -> None:
        """Have the outcome written to ``directory`` if start-up fails."""
        self.run_directory = directory

    def enter_run(self, directory: Path, run: RunProgress) -> None:
        """Reports are written to ``directory`` from here on, and say how far the run is."""
        self.run_directory, self.run = directory, run
        self.entered_runs.add(directory)
        if self.peers.lifeline is not None:
            self.peers.lifeline.note_run(directory, run.attempt)

    def describe(self, error: BaseException) -> str:
        """The report of ``error``: one line for mistakes of the user's, else a traceback."""
        return self._describe(error, self.step)

    def _describe(self, error: BaseException, step: int | None) -> str:
        return describe_error(
            error,
            self.peers.describe_place(step),
            is_shared=self.peers.is_shared,
            lost_peer=self._is_peer_loss(error),
            hidden_files=self._hidden_files,
        )

    def _is_peer_loss(self, error: BaseException) -> bool:
        return not self.runs_script and self.peers.is_shared and is_peer_loss(error)

    def compose_report(self, error: BaseException) -> Report:
        """Put ``error`` into words; its type alone if its text fails or does not come."""
        step = self.step  # The trainer may go on meanwhile.

        def compose() -> Report:
            lost = self._is_peer_loss(error)
            code = PeerLostError.exit_code if lost else exit_code(error)
            reason = f"{type(error).__name__}: {read_message(error)}".rstrip(": ")
            text = self._describe(error, step)
            fault = None if lost else find_node_fault(error)
            if fault is not None:
                text += _describe_node_fault(self.peers.hostname, fault)
            outcome = replace(self.make_outcome(code, reason, step), node_fault=fault)
            return Report(error, text, outcome)

        try:
            return BackgroundCall(compose).finish(READ_SECONDS)
        except LateError:
            problem = f"its message could not be read within {READ_SECONDS:g} s"
        except BaseException as another:  # The report must come out.
            problem = f"its message could not be read ({type(another).__name__})"
        reason = f"{type(error).__name__}: {problem}"
        text = f"mpiddp: {self.peers.describe_place(step)}{reason}\n"
        return Report(error, text, self.make_outcome(exit_code(error), reason, step))

    def report(self, report: Report, *, told: bool = False) -> None:
        """Print and write a report; ``told``: it has been printed already."""
        # The console first: files may be on a system that has stopped answering.
        positions, table = self._find_positions(report)
        text = report.text + self.note + table
        report = replace(report, text=text)
        self._print("" if told else self._show(report))
        self.write_files(report, is_reporter=True)
        self._write_whole(positions, text)
        if self.peers.is_shared:
            time.sleep(FORWARD_SECONDS)

    def _find_positions(self, report: Report) -> tuple[list[StackPosition], str]:
        """Where each rank is, and the same in words, if another may have kept this one waiting."""
        lifeline, error = self.peers.lifeline, report.error
        is_hang = isinstance(error, HANGS) or is_peer_loss(error)
        with contextlib.suppress(Exception):  # The report does without.
            found = lifeline.gather_stacks() if lifeline is not None and is_hang else []
            return found, describe(found)
        return [], ""

    def _write_whole(self, positions: Sequence[StackPosition], text: str) -> None:
        """Write the whole report of where all ranks are, and say where it is."""
        if positions:
            names = (environment.NCCL_RAS_ADDRESS, environment.FLIGHT_RECORDS[0])
            nccl = (os.environ.get(name, "") for name in names)
            path = HangReport(positions, *nccl).write(text, self.directory)
            if path is not None:
                self._print(f"  the whole report: {path}\n")

    def _show(self, report: Report) -> str:
        """Let a script's own hook show the error; returns what is still to be printed."""
        error = report.error
        if not (self.runs_script and has_trace(error) and has_own_hook()):
            return report.text
        trace = visible_part(error.__traceback__, self._hidden_files)
        context = contextvars.copy_context()

        def show() -> None:
            with contextlib.suppress(OSError):
                flush_output()
            context.run(sys.excepthook, type(error), error, trace)

        try:
            if self.peers.is_shared:
                BackgroundCall(show).finish(HOOK_SECONDS)
            else:
                show()  # A debugger may talk to its user there.
        except LateError:
            problem = f"did not return within {HOOK_SECONDS:g} s"
        except BaseException as another:  # The report must come out.
            problem = f"raised {type(another).__name__}: {read_message(another)}"
        else:
            # The hook's own text is in the log, if this rank is not on the console.
            self.output.write_console(report.text)
            return ""
        return f"{report.text}mpiddp: the script's sys.excepthook {problem}\n"

    def _print(self, text: str) -> None:
        print_report(text, self.output.write_console)

    def write_files(self, report: Report, *, is_reporter: bool) -> None:
        """Write log and outcome, the latter if ``is_reporter``, as far as there are files."""
        log = self.output.log
        if log is None:
            log = find_log(self.run_directory, self.peers.rank)
        elif is_reporter:
            log = None  # Standard error leads there, and has it.
        outcome = report.outcome if is_reporter else None
        problem = write_report(log, report.text, self.run_directory, outcome)
        if problem and is_reporter:
            self._print(f"mpiddp: {problem}\n")

    def make_outcome(self, code: int, reason: str, step: int | None) -> Outcome:
        peers = self.peers
        return Outcome(code, reason, peers.rank, peers.hostname, step, self.run.attempt)


def _describe_node_fault(hostname: str, fault: str) -> str:
    return (
        f"mpiddp: this looks like a fault of {hostname}, not of the script: {fault}. Tell its "
        "administrators; with --restarts a job of several nodes goes on without it\n"
    )
