"""``outcome.json`` in a run directory: how the last attempt ended. Job scripts decide by it."""

from __future__ import annotations

import json
import os
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


def write_outcome(run_directory: Path, outcome: Outcome) -> None:
    """Write the outcome atomically. Raises OSError where it cannot be written."""
    path = outcome_path(run_directory)
    temporary = path.with_name(f".{path.name}.{outcome.rank}")
    temporary.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    os.replace(temporary, path)


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
