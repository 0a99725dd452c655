"""A record's command, run once more for some of its cells."""

from __future__ import annotations

import importlib
import itertools
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.records import Cell, Record, read_record
from benchmarks.common.results import find_commit, find_processor
from benchmarks.launching.launchers import ROOT
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.options.fields import Field, list_fields

OUTPUTS = ("csv", "html", "json", "nccl_tests", "plot", "png", "targets")
"""Options of a command that say where results go and how they are shown."""

SHOWN_CHARACTERS = 4000


class CannotMeasureError(MpiddpError):
    """The command of a record cannot be run here; the message says why."""


def find_arguments(record: Record) -> list[str]:
    """The words behind the command's name, as they were typed. Raises CannotMeasureError."""
    words = shlex.split(str(record.environment.get("command", "")))
    if record.benchmark not in words:
        raise CannotMeasureError(f"{record.path} does not hold the command line of its run")
    return words[words.index(record.benchmark) + 1 :]


def check_place(record: Record) -> None:
    """Raise CannotMeasureError unless the record is of this program on a machine like this one."""
    here = {"processor": find_processor(), "commit": find_commit()}
    for name, found in here.items():
        recorded = record.environment.get(name)
        if recorded != found:
            raise CannotMeasureError(f"its {name} was {recorded}, here it is {found}")


def find_options(command: str) -> dict[str, Field]:
    """The options of a command by their flags."""
    from benchmarks.__main__ import find_module

    reader = importlib.import_module(find_module(command)).READER
    kinds = reader.groups.values()
    return {each.flag: each for kind in kinds for each in list_fields(kind)}


def restrict(
    words: Sequence[str], options: Mapping[str, Field], wanted: Mapping[str, Sequence[str]]
) -> list[str]:
    """The words without options of output, and with ``wanted`` values, by names of fields."""
    chosen = {
        name: values
        for name, values in wanted.items()
        if any(each.name == name and each.is_several for each in options.values())
    }
    dropped = {*OUTPUTS, *chosen}
    positional = [each.name for each in options.values() if each.argument.is_positional]
    kept: list[str] = []
    for field, chunk in _cut(words, options):
        name = field.name if field is not None else (positional or [""])[0]
        if name not in dropped:
            kept += chunk
    ahead: list[str] = []
    for name, values in chosen.items():
        if name in positional:
            ahead += values
        else:
            kept += ["--" + name.replace("_", "-"), *values]
    return [*ahead, *kept]


def _cut(
    words: Sequence[str], options: Mapping[str, Field]
) -> Iterator[tuple[Field | None, list[str]]]:
    """Each option with its values; positional words with None."""
    place = 0
    while place < len(words):
        name = words[place].partition("=")[0].replace("_", "-")
        field = options.get(name) if name.startswith("--") else None
        end = place + 1
        if field is not None and field.takes_value and "=" not in words[place]:
            values = itertools.takewhile(lambda word: not word.startswith("--"), words[end:])
            end += len(list(values)) if field.is_several else 1
        yield field, list(words[place:end])
        place = end


def find_wanted(cells: Iterable[Cell]) -> dict[str, list[str]]:
    """Values of options that the cells need, by names of fields."""
    found: dict[str, dict[str, None]] = {}

    def add(name: str, value: Any) -> None:
        if value is not None:
            found.setdefault(name, {})[str(value)] = None

    for cell in cells:
        add("ranks", cell.ranks)
        add("sizes", cell.at.get("bytes"))
        for name in ("type", "operator", "model"):
            add(f"{name}s", cell.at.get(name))
        add("algorithms", cell.details.get("algorithm"))
    return {name: list(values) for name, values in found.items()}


def measure_again(record: Record, cells: Sequence[Cell], folder: Path) -> Record:
    """Run the record's command for the places of ``cells``, with its files in ``folder``.

    Raises CannotMeasureError if it fails.
    """
    path = folder / "again.jsonl"
    arguments = restrict(find_arguments(record), find_options(record.benchmark), find_wanted(cells))
    words = ["-m", "benchmarks", record.benchmark, *arguments]
    print(f"measuring again: {shlex.join(['python', *words])}", flush=True)
    code, output = _run([sys.executable, *words, "--json", str(path)])
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
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            # It ends its ranks, which it would not do if it were killed.
            process.terminate()
            process.wait()
            raise
    return process.returncode, output
