"""``outcome.json`` in a run directory: how the last attempt ended. Job scripts decide by it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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


def write_outcome(run_directory: Path, outcome: Outcome) -> None:
    """Write the outcome atomically. Raises OSError where it cannot be written."""
    write_whole(outcome_path(run_directory), json.dumps(asdict(outcome), indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file, in UTF-8, so that nobody ever sees half of it, whoever is killed meanwhile.

    Raises OSError where it cannot be written; what stood there before stays then.
    """
    # Processes of several hosts may write one file, and a name may be as long as names can be.
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def outcome_path(run_directory: Path) -> Path:
    """Where the outcome of a run stands."""
    return run_directory / "outcome.json"


def read_outcome(run_directory: Path) -> dict[str, Any] | None:
    """The outcome of a run: code, reason, rank, host, step, attempt; None if none was written."""
    try:
        outcome = json.loads(outcome_path(run_directory).read_text())
    except (OSError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) else None
