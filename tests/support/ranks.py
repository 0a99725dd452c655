"""Starts programs of ``tests/programs`` as jobs, and reads what each rank reports."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launchers


def read_reports(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def collect(
    launcher: launchers.Launcher | str,
    ranks: int,
    program: str,
    *arguments: str,
    timeout: float = 90,
    env: Mapping[str, str | None] | None = None,
    wrap: Sequence[str] = (),
) -> list[Any]:
    """Run a program of ``tests/programs``; every rank's report.

    ``wrap``: a command that each rank's program is an argument of.
    """
    first, *rest = [*wrap, sys.executable, str(launchers.PROGRAMS / program), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        launchers.run(
            launcher, ranks, rest, timeout=timeout, env=env, cwd=Path(folder), python=first
        ).expect(0)
        return read_reports(Path(folder), ranks)
