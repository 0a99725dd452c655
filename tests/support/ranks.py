"""Starts programs of ``tests/programs`` as jobs, and reads what each rank reports."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launchers


def read_reports(folder: Path, ranks: int) -> list[Any]:
    """What every rank has left, by rank."""
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


def run_together(
    programs: Sequence[tuple[str, int, Sequence[Any], dict[str, str], Path]], timeout: float
) -> list[launchers.Result]:
    """Run jobs at the same time."""
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                launchers.start(name, size, arguments, timeout=timeout, env=env, cwd=folder)
            )
            for name, size, arguments, env, folder in programs
        ]
        return [job.wait() for job in jobs]


def make_folders(parent: Path, names: Sequence[str]) -> list[Path]:
    """A working directory for each job."""
    folders = [parent / name.replace(" ", "-") for name in names]
    for folder in folders:
        folder.mkdir()
    return folders
