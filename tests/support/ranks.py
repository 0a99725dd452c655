"""Starts programs of ``tests/programs`` as jobs, and reads what each rank reports."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launchers


def read_reports(folder: Path, ranks: int) -> list[Any]:
    """What every rank has left, by rank."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def collect(
    launcher: launchers.Launcher,
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
) -> list[tuple[launchers.Result, float]]:
    """Run jobs at the same time; for each its result, and when it ended."""
    ended: dict[int, float] = {}
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                launchers.start(
                    launchers.table()[name], size, arguments, timeout=timeout, env=env, cwd=folder
                )
            )
            for name, size, arguments, env, folder in programs
        ]
        end = time.monotonic() + timeout
        while len(ended) < len(jobs) and time.monotonic() < end:
            for number, job in enumerate(jobs):
                if number not in ended and job.process.poll() is not None:
                    ended[number] = time.time()
            time.sleep(0.02)
        return [(job.wait(), ended.get(number, time.time())) for number, job in enumerate(jobs)]


def make_folders(parent: Path, names: Sequence[str]) -> list[Path]:
    """A working directory for each job."""
    folders = [parent / name.replace(" ", "-") for name in names]
    for folder in folders:
        folder.mkdir()
    return folders
