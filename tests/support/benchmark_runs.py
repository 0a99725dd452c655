"""Runs ``python -m benchmarks`` as a user does, and looks at what it drew."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import launchers
from benchmarks.records.schema import Record, read_record

MOST_SECONDS = 580
"""Of a run; below the limit of a test (setup.cfg), so that its output is shown."""


def run_benchmark(*arguments: str, around: Sequence[str] = (), **changes: str) -> launchers.Result:
    """Its result, with ``changes`` of the environment; ``around`` is the command that runs it.

    Warnings are errors.
    """
    words = (*around, sys.executable, "-W", "error", "-m", "benchmarks", *arguments)
    return launchers.execute(*words, timeout=MOST_SECONDS, cwd=launchers.ROOT, env=changes)


def record_benchmark(path: Path, *arguments: str, **more: Any) -> tuple[str, Record]:
    """What a benchmark prints, and the record at ``path``. It must succeed, and warn of nothing."""
    answer = run_benchmark(*arguments, "--output", str(path), **more)
    assert (answer.returncode, answer.stderr) == (0, ""), answer.stderr
    return answer.stdout, read_record(path)


def check_drawing(path: Path, *words: str) -> str:
    """The text of an SVG drawing: words are drawn as outlines, and stand in comments beside."""
    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert [word for word in words if word not in text] == []
    return text
