"""The report: a line for each check as soon as it is known, and the same for machines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import mpiddp
from mpiddp import environment
from mpiddp.doctor.examiner.findings import FAIL, PASS, WARN, Finding, exit_code, summarise
from mpiddp.files import write_whole
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.wording import print_text

COLOURS = {PASS: "\033[32m", WARN: "\033[33m", FAIL: "\033[31m"}
RESET = "\033[0m"
NAME_WIDTH = 17
"""Width of the column of names: that of the longest."""


class FindingsReport:
    """Rank 0's report. Lines go to ``stream``, and all findings to ``path`` if there is one."""

    def __init__(self, stream: TextIO, path: Path | None = None, *, coloured: bool = False) -> None:
        self.findings: list[Finding] = []
        self._place: dict[str, Any] = {}
        """What the file says of the job."""
        self._stream = stream
        self._path = path
        self._coloured = coloured
        self._begin = time.monotonic()

    def note_place(self, ranks: int, hostnames: Iterable[str]) -> None:
        """Where the job runs: its ranks, and the nodes."""
        self._place = {"ranks": ranks, "nodes": list(hostnames)}

    def add(self, finding: Finding) -> None:
        """Print a finding, and write it to the file: an examination may be cut short.

        Raises OSError if the file cannot be written.
        """
        self.findings.append(finding)
        self._print(describe(finding, coloured=self._coloured))
        self._write(is_complete=False)

    def conclude(self) -> int:
        """Print the last line; returns the exit code. Raises OSError as `add` does."""
        seconds = time.monotonic() - self._begin
        self._print(f"mpiddp.doctor: {summarise(self.findings, seconds)}")
        self._write(is_complete=True)
        return exit_code(self.findings)

    def _print(self, line: str) -> None:
        print_text(line, stream=self._stream)

    def _write(self, *, is_complete: bool) -> None:
        if self._path is None:
            return
        content = {
            "mpiddp": mpiddp.__version__,
            "complete": is_complete,
            # Unknown until the end: an examination that is cut short has a different code.
            "exit_code": exit_code(self.findings) if is_complete else None,
            "seconds": round(time.monotonic() - self._begin, 3),
            **self._place,
            "findings": [asdict(finding) for finding in self.findings],
        }
        write_whole(self._path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def describe(finding: Finding, *, coloured: bool) -> str:
    """One line: status, name of the check, what was found and what to do.

    A table keeps its lines, indented.
    """
    status = finding.status
    if coloured and status in COLOURS:
        status = f"{COLOURS[status]}{status}{RESET}"
    text = finding.text.replace("\n", "\n      ")
    return f"{status}  {finding.check.ljust(NAME_WIDTH)}  {text}"


def wants_colour(
    stream: TextIO, launcher: Launcher | None, variables: Mapping[str, str] = os.environ
) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR is set (https://no-color.org).

    Under a launcher the stream may be a terminal that the launcher made, whatever becomes of what
    it forwards: then the launcher's own output decides, if it can be seen.
    """
    if variables.get(environment.NO_COLOR) or not stream.isatty():
        return False
    return launcher is None or _is_terminal(Path(f"/proc/{os.getppid()}/fd/1"))


def _is_terminal(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def open_report(path: Path | None, launcher: Launcher | None) -> FindingsReport:
    """The report of the process that reports for the job, on its standard output."""
    return FindingsReport(sys.stdout, path, coloured=wants_colour(sys.stdout, launcher))
