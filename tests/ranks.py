"""Programs that the ranks of a job run, and what each of them reports: a file for each rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import launchers

HERE = Path(__file__).resolve().parent


def write_report(folder: Path, session: Any, report: Any) -> None:
    """Called by a rank: leave what it found, as JSON."""
    (folder / f"{session.world.rank}.json").write_text(json.dumps(report))


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
    expect: int = 0,
) -> tuple[list[Any], launchers.Result]:
    """Run a program of this directory; every rank's report, and the finished job."""
    with tempfile.TemporaryDirectory() as folder:
        result = launchers.run(
            launcher,
            ranks,
            [HERE / program, *arguments],
            timeout=timeout,
            env=env,
            cwd=Path(folder),
        ).expect(expect)
        return read_reports(Path(folder), ranks), result
