"""A record's command, run once more for some of its cells."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records.environment import find_commit, find_processor, find_python_path
from benchmarks.records.schema import Cell, Record, read_record
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.wording import print_text

OUTPUT, FLAGS = "--output", ("--hosts", "--targets")
"""Options of a command that say where results go, and how they are shown: with a value, without."""
SHOWN_CHARACTERS = 4000


class CannotMeasureError(MpiddpError):
    """The command of a record cannot be run here; the message says why."""


def measure_again(record: Record, cells: Sequence[Cell]) -> Record:
    """Run the record's command once more for the places of ``cells``.

    Raises CannotMeasureError if it fails, or is not the record's on a machine like the record's.
    """
    for name, found in {"processor": find_processor(), "commit": find_commit()}.items():
        recorded = record.environment.get(name)
        if recorded != found:
            raise CannotMeasureError(f"its {name} was {recorded}, here it is {found}")
    arguments = restrict(find_arguments(record), record.options, find_wanted(cells))
    words = ["-m", "benchmarks", record.benchmark, *arguments]
    print_text(f"measuring again: {shlex.join(['python', *words])}")
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as folder:
        path = Path(folder, "again.jsonl")
        code, output = _run([sys.executable, *words, "--output", str(path)])
        if code != 0:
            raise CannotMeasureError(
                f"the command ended with exit code {code}:\n{output[-SHOWN_CHARACTERS:]}"
            )
        try:
            return read_record(path)
        except ConfigurationError as error:
            raise CannotMeasureError(str(error)) from None


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and standard output; the progress bar and errors are shown."""
    # Not from the checkout: relative names of files are those of this process's directory.
    variables = {**os.environ, "PYTHONPATH": find_python_path()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            # It ends its ranks, which it would not do if it were killed.
            process.terminate()
            process.wait()
            raise
    return process.returncode, output


def find_arguments(record: Record) -> list[str]:
    """The words behind the command's name, as they were typed. Raises CannotMeasureError."""
    words = shlex.split(str(record.environment.get("command", "")))
    if record.benchmark not in words:
        raise CannotMeasureError(f"{record.path} does not hold the command line of its run")
    return words[words.index(record.benchmark) + 1 :]


def restrict(
    words: Sequence[str], options: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]
) -> list[str]:
    """The words without options of output, and then fewer values of those that have several.

    ``options``: of the record, whose lists are those that have several; an empty one stands for a
    usual set of them. Of an option that is typed twice the last one counts.
    """
    kept, rest = [], iter(words)
    for word in rest:
        if word == OUTPUT:
            next(rest, None)
        elif not word.startswith(f"{OUTPUT}=") and word not in FLAGS:
            kept.append(word)
    for name, values in wanted.items():
        known = options.get(name)
        if isinstance(known, list) and (not known or len(values) < len(known)):
            kept += [f"--{name}", *values]
    return kept


def find_wanted(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Values of options that the cells need, by names of fields."""
    found: dict[str, dict[str, None]] = {}
    for cell in cells:
        at = cell.at
        values = {"ranks": cell.ranks, "sizes": at.get("bytes")}
        values |= {f"{name}s": at.get(name) for name in ("type", "operator", "model", "program")}
        values["algorithms"] = cell.details.get("algorithm")
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, {})[str(value)] = None
    return {name: list(values) for name, values in found.items()}
