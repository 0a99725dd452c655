"""Runs ``python -m benchmarks`` as a user does."""

from __future__ import annotations

import sys

import launchers


def run_benchmark(*arguments: str, **changes: str) -> launchers.Result:
    """Its result, with ``changes`` of the environment. Warnings are errors."""
    words = (sys.executable, "-W", "error", "-m", "benchmarks", *arguments)
    return launchers.execute(*words, timeout=170, cwd=launchers.ROOT, env=changes)
