"""Nodes are examined before the ranks start: the doctor's checks, one start of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpiddp.files import read_whole
from mpiddp.front.attempt import Files
from mpiddp.front.job_end import Exit
from mpiddp.launch.launcher.hostnames import fold_hostnames, is_host
from mpiddp.launch.script.command_line import CommandLine
from mpiddp.launch.script.front_options import FrontOptions

STAGE_SECONDS = 10
"""Time limit of each of the doctor's stages: a node that hangs is found, too."""
SHOWN_LINES = 3
"""Of the ranks' errors, if there is no report."""
DIRECTORIES = ("run directory", "data directory")
"""Checks that do not matter to a script: it may write elsewhere."""


@dataclass(frozen=True)
class Examination:
    """What the doctor is asked to do, and where its answer will be."""

    report: Path
    files: Files
    """What its ranks print: shown only if no report comes."""

    @property
    def line(self) -> CommandLine:
        words = ("doctor", "--timeout", str(STAGE_SECONDS), "--output", str(self.report))
        return CommandLine((), (), None, words)

    def read_errors(self) -> str:
        """The end of what its ranks wrote to standard error."""
        try:
            lines = read_whole(Path(self.files.error)).decode(errors="replace").splitlines()
        except (OSError, ValueError):
            return ""
        return " ".join(lines[-SHOWN_LINES:])


@dataclass(frozen=True)
class Fault:
    """A check that failed."""

    hosts: tuple[str, ...]
    """Of the job's; empty if it is no single host's."""
    text: str

    def describe(self) -> str:
        """``node2 fails the preflight: GPUs: …``."""
        who = fold_hostnames(self.hosts) if self.hosts else "the job"
        return f"{who} fails the preflight: {self.text}"


def plan_examination(directory: Path) -> Examination:
    """``directory``: the job's."""
    files = Files(str(directory / "preflight.out"), str(directory / "preflight.err"))
    return Examination(directory / "preflight.json", files)


def widen(options: FrontOptions, ranks_of: Sequence[int]) -> FrontOptions:
    """The request for as many ranks per node as the job has, on all nodes, spares included."""
    return replace(options, ranks=None, nodes=None, ranks_per_node=max(ranks_of))


def read_faults(examination: Examination, hosts: Sequence[str], end: Exit) -> list[Fault]:
    """What the doctor found wrong; one fault of no host if it did not come to its end."""
    try:
        report = json.loads(read_whole(examination.report))
        rows = [row for row in report["findings"] if row["status"] == "fail"]
        is_complete = bool(report["complete"])
        found = [
            Fault(_choose(hosts, row["hosts"]), f"{row['check']}: {row['found']}")
            for row in rows
            if row["check"] not in DIRECTORIES
        ]
    except (OSError, ValueError, KeyError, TypeError):
        found, is_complete = [], False
    if found or is_complete:
        return found
    # A node that never came, or whose GPU hangs, ends the doctor as it would end the job.
    outcome = end.outcome or {}
    lost = outcome.get("lost_host") or (outcome.get("node_fault") and outcome.get("host"))
    said = outcome.get("reason") or examination.read_errors() or f"exit code {end.status}"
    return [Fault(_choose(hosts, [lost]) if lost else (), str(said))]


def _choose(hosts: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """The job's names for hosts that call themselves as ``named``; none if that is all of them."""
    chosen = tuple(host for host in hosts if any(is_host(host, name) for name in named))
    return chosen if len(chosen) < len(hosts) else ()
