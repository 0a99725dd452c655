"""The front's options, from its command line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpiddp.errors import ConfigurationError
from mpiddp.front.layout import LayoutRequest
from mpiddp.front.plan import NONE, is_in_allocation
from mpiddp.launch.script.command_line import CommandLine


@dataclass(frozen=True)
class FrontOptions:
    """What the front was told."""

    request: LayoutRequest = field(default_factory=LayoutRequest)
    launcher: str = "auto"
    launcher_options: tuple[str, ...] = ()
    dry_run: bool = False
    restarts: int = 0
    restart_window: float = 0.0
    """Seconds; 0 for never."""
    min_nodes: int = 1
    requeue: bool = False
    job_log: str | None = None
    """Directory for the output of all ranks."""
    python: str | None = None
    """What runs each rank; None for this Python."""


def read_options(line: CommandLine) -> FrontOptions:
    """Raises ConfigurationError for a value that is out of range or given twice."""
    given: dict[str, str] = {}
    for name, value in line.front:
        if name in given and name != "--launcher-options":
            raise ConfigurationError(f"{name} is given twice")
        given[name] = f"{given[name]} {value}" if name in given else value
    restarts = _read_count("--restarts", given.get("--restarts", "0"), least=0)
    _check_restarts(given, restarts)
    ranks = given.get("-n", "auto")
    return FrontOptions(
        request=LayoutRequest(
            ranks=None if ranks == "auto" else _read_count("-n", ranks, "auto or a whole number"),
            nodes=_read_optional(given, "--nodes"),
            ranks_per_node=_read_optional(given, "--ranks-per-node"),
        ),
        launcher=given.get("--launcher", "auto"),
        launcher_options=split_words("--launcher-options", given.get("--launcher-options", "")),
        dry_run="--dry-run" in given,
        restarts=restarts,
        restart_window=_read_seconds("--restart-window", given.get("--restart-window", "0")),
        min_nodes=_read_optional(given, "--min-nodes") or 1,
        requeue="--requeue" in given,
        job_log=given.get("--job-log"),
        python=given.get("--python"),
    )


def _check_restarts(given: Mapping[str, str], restarts: int) -> None:
    """Raise ConfigurationError for an option about restarts that would have no effect."""
    if "--min-nodes" in given and given.get("--launcher") == NONE:
        raise ConfigurationError(
            "--min-nodes counts the nodes that have ranks, and with --launcher none the program "
            "chooses them: leave it out"
        )
    if "--min-nodes" in given and not is_in_allocation(os.environ):
        raise ConfigurationError(
            "--min-nodes counts the nodes of a Slurm job, and this shell is in none: leave it out"
        )
    for name in ("--restart-window", "--min-nodes"):
        if name in given and restarts == 0:
            raise ConfigurationError(
                f"{name} has no effect without restarts: add --restarts N, or leave it out"
            )


def _read_optional(given: Mapping[str, str], name: str) -> int | None:
    return _read_count(name, given[name]) if name in given else None


def _read_count(name: str, text: str, what: str = "a whole number", *, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise ConfigurationError(f"{name} expects {what} of at least {least}, found {text!r}")
    return int(text)


def _read_seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ConfigurationError(f"{name} expects seconds, at least 0, found {text!r}")
    return seconds


def split_words(name: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigurationError(f"{name} cannot be split into words ({error}): {text}") from None
