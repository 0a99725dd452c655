"""Runs ``python -m benchmarks`` as a user does."""

from __future__ import annotations

import subprocess
import sys

import launchers


def run_benchmark(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Its result, with ``changes`` of the environment. Warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "benchmarks", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=launchers.ROOT,
        env=launchers.clean_environment(changes),
        check=False,
    )
