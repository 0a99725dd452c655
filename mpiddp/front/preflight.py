"""Nodes are examined before the ranks start: the doctor's checks, one start of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpiddp import environment
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.files import read_whole
from mpiddp.front.attempt import Files, Launch, RankStart
from mpiddp.front.job_end import Exit
from mpiddp.front.job_layout import JobLayout
from mpiddp.front.launch_plan import LaunchPlan
from mpiddp.front.rank_command import make_rank_command
from mpiddp.launch.launcher.hostnames import fold_hostnames, is_host
from mpiddp.launch.script.command_line import CommandLine, read_front
from mpiddp.launch.script.front_options import FrontOptions
from mpiddp.wording import count_noun

SHOWN_LINES = 3
"""Of the ranks' errors, if there is no report."""
DIRECTORIES = ("run directory", "data directory")
"""Checks that do not matter to a script: it may write elsewhere."""


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


def widen(options: FrontOptions, ranks_of: Sequence[int]) -> FrontOptions:
    """The request for as many ranks per node as the job has, on all nodes, spares included."""
    return replace(options, ranks=None, nodes=None, ranks_per_node=max(ranks_of))


def list_hosts(layout: JobLayout | None) -> tuple[str, ...]:
    """All hosts of a job, spares included; without a layout this one."""
    return (os.uname().nodename,) if layout is None else (*layout.hosts, *layout.spares)


def find_faults(
    plan: LaunchPlan,
    line: CommandLine,
    hosts: Sequence[str],
    launch: Launch,
    directory: Path | None,
) -> list[Fault] | Exit:
    """Start the doctor on ``hosts``, by ``plan``. Returns what it found wrong; its end if a signal
    came meanwhile.

    ``line``: the job's, whose ranks may have a time limit. ``directory``: the job's. Raises
    ConfigurationError if it has none.
    """
    if directory is None:
        raise ConfigurationError(
            "--preflight writes what it finds to a directory of its own, and none could be made: "
            f"set {environment.STATE_HOME} to a directory that can be written"
        )
    report = directory / "preflight.json"
    # Shown only if no report comes.
    files = Files(str(directory / "preflight.out"), str(directory / "preflight.err"))
    limit = line.find_rank_option("--timeout")
    words = ("doctor", "--output", str(report), *(("--timeout", limit) if limit else ()))
    doctor = make_rank_command(CommandLine((), (), None, words), read_front(line))
    end = RankStart(plan, doctor, files).run(launch, directory, {})
    is_asked = end.signal is not None or end.preemption is not None
    return end if is_asked else _read_faults(report, files, hosts, end)


def _read_faults(report: Path, files: Files, hosts: Sequence[str], end: Exit) -> list[Fault]:
    """What the doctor has written; one fault of no host if it did not come to its end."""
    try:
        content = json.loads(read_whole(report))
        rows = [row for row in content["findings"] if row["status"] == "fail"]
        is_complete = bool(content["complete"])
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
    said = outcome.get("reason") or _read_errors(files) or f"exit code {end.status}"
    return [Fault(_choose(hosts, [lost]) if lost else (), str(said))]


def _read_errors(files: Files) -> str:
    """The end of what the doctor's ranks wrote to standard error."""
    try:
        lines = read_whole(Path(files.error)).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return ""
    return " ".join(lines[-SHOWN_LINES:])


def find_bad_hosts(
    faults: Sequence[Fault], hosts: Sequence[str], layout: JobLayout | None, options: FrontOptions
) -> tuple[tuple[str, ...], str]:
    """The hosts to leave out, and how many passed, ``3 of 4 nodes``.

    Raises LaunchError if the job cannot start without them.
    """
    if faults and (layout is None or not all(fault.hosts for fault in faults)):
        raise LaunchError("the preflight failed, see above: nothing was started")
    named = {host for fault in faults for host in fault.hosts}
    bad = tuple(host for host in hosts if host in named)
    passed = f"{len(hosts) - len(bad)} of {count_noun(len(hosts), 'node')}"
    fewest = options.min_nodes or (len(layout.hosts) if layout is not None else 1)
    if bad and len(hosts) - len(bad) < fewest:
        raise LaunchError(
            f"{passed} passed the preflight, and {fewest} are needed: ask for more as spares, or "
            "give --min-nodes"
        )
    return bad, passed


def _choose(hosts: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """The job's names for hosts that call themselves as ``named``; none if that is all of them."""
    chosen = tuple(host for host in hosts if any(is_host(host, name) for name in named))
    return chosen if len(chosen) < len(hosts) else ()
