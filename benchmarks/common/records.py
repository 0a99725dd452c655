"""Records of measurements: JSON lines, one schema for all commands, written as they come.

The first line (``kind`` "run") tells the schema's version, the command and the environment. Then
each cell that was measured has a line, and each one that was refused. The last line ("end") is
missing if the command was killed; whatever was measured before is there.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common.statistics import Interval, Summary, summarize
from mpiddp.errors import ConfigurationError
from mpiddp.wording import print_message

SCHEMA = 3
"""Version of the records' form; a change that breaks readers raises it."""

Coordinate = int | float | str
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One quantity of one contender, measured round by round."""

    quantity: str
    """What was measured, such as ``all-reduce`` or ``training step``."""
    contender: str
    """Whose it is, as in the tables."""
    ranks: int
    nodes: int = 1
    at: Mapping[str, Coordinate] = field(default_factory=dict)
    """Where else it was measured: ``bytes``, ``type``, ``model``, ``part`` and the like. Bytes are
    those of the largest buffer of a rank, as in nccl-tests."""
    unit: str = "s"
    samples: tuple[float, ...]
    """A value a round, in order of rounds; where a round has several iterations, their median."""
    summary: Summary
    """Of all iterations of all rounds."""
    by_rank: tuple[Summary, ...] = ()
    """Of each rank's own times; empty if they are not told apart."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the command knows beside: ``ran`` (the algorithm that ran), ``algbw``, ``busbw``
    (GB/s), ``wrong`` (elements), ``stopped`` (``interval`` or ``budget``), …"""

    @property
    def key(self) -> tuple[Coordinate, ...]:
        """Unique among the cells of a record; equal for the same measurement in two records."""
        places = [word for name in sorted(self.at) for word in (name, self.at[name])]
        return (self.quantity, self.contender, self.ranks, self.nodes, *places)

    @property
    def bytes(self) -> int:
        """Of a cell that has a size."""
        return int(self.at["bytes"])

    @property
    def ran(self) -> tuple[str, str]:
        """The algorithm that ran, and over which transport; each empty if that is not known."""
        name, _, transport = str(self.details.get("ran") or "").partition(" over ")
        return name, transport


def group_by(items: Iterable[Item], find_key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items with the same key, in their order; groups in the order of their first items."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(find_key(item), []).append(item)
    return groups


def make_cell(samples: Sequence[float], **place: Any) -> Cell:
    """A cell with one value a round; ``place``: its other fields."""
    return Cell(samples=tuple(samples), summary=summarize(samples), **place)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a file of records holds."""

    path: Path
    benchmark: str
    environment: Mapping[str, Any]
    options: Mapping[str, Any]
    cells: tuple[Cell, ...]
    others: tuple[Mapping[str, Any], ...]
    """The lines of other kinds, in order."""
    is_complete: bool
    """Whether the command came to its end."""


class RecordWriter:
    """Writes a record line by line; `open_record` makes one.

    ``hidden``: names of hosts, which are left out of reasons.
    """

    def __init__(
        self, file: io.FileIO | None, hidden: Sequence[str] = (), name: object = ""
    ) -> None:
        self._file, self._name = file, name
        self._end = 0
        """Bytes of the lines that are whole."""
        self.error: OSError | None = None
        """Why lines are missing from the file's end, if they are."""
        self._hidden = hidden
        self.cells: list[Cell] = []
        """All that were added."""

    def write(self, kind: str, **content: Any) -> None:
        """A line of any kind."""
        if self._file is None or self.error is not None:
            return
        line = json.dumps({"kind": kind, **content}, ensure_ascii=False, default=str) + "\n"
        rest = memoryview(line.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # What is measured from now on is shown, at least; no reader takes half a line.
            self.error = error
            with suppress(OSError):
                self._file.truncate(self._end)
            print_message(f"note: no more is written to {self._name}: {error.strerror}")
        else:
            self._end += len(line.encode())

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        self.write("cell", **asdict(cell))

    def keep(self, quantity: str, contender: str, value: float, **at: Coordinate) -> None:
        """One sample of a cell that takes long: a killed command leaves at least those."""
        self.write("sample", quantity=quantity, contender=contender, at=at, value=value)

    def refuse(self, quantity: str, contender: str, reason: str, **at: Coordinate) -> None:
        """A contender that cannot run there, and why."""
        self._explain("refusal", quantity, contender, reason, at)

    def fail(self, quantity: str, contender: str, reason: str, **at: Coordinate) -> None:
        """A run that failed and counts for nothing, or a wrong result."""
        self._explain("failure", quantity, contender, reason, at)

    def _explain(
        self, kind: str, quantity: str, contender: str, reason: str, at: Mapping[str, Coordinate]
    ) -> None:
        reason = hide(reason, self._hidden)
        self.write(kind, quantity=quantity, contender=contender, at=at, reason=reason)


def hide(text: str, names: Sequence[str]) -> str:
    """The text with ``HOST`` in place of each of the names of hosts."""
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])(?:{words})(?![\w-])", "HOST", text) if words else text


@contextmanager
def open_record(
    path: Path | None,
    benchmark: str,
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    hidden: Sequence[str] = (),
) -> Iterator[RecordWriter]:
    """A record with its first line; nothing is written without a path.

    Its last line says whether the body came to its end. Raises ConfigurationError if the file
    cannot be written.
    """
    if path is None:
        yield RecordWriter(None, hidden)
        return
    try:
        file = _open_alone(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        writer = RecordWriter(file, hidden, path)
        writer.write(
            "run",
            schema=SCHEMA,
            benchmark=benchmark,
            environment=dict(environment),
            options=dict(options),
        )
        is_complete = False
        try:
            yield writer
            is_complete = True
        finally:
            writer.write("end", is_complete=is_complete, load_average=list(os.getloadavg()))
    if writer.error is not None:
        raise ConfigurationError(
            f"{path} lacks what was measured last: {writer.error.strerror}"
        ) from None


def _open_alone(path: Path) -> io.FileIO:
    """An empty file. Raises OSError, and leaves it as it is, if another command writes it."""
    file = io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise OSError(error.errno, "another command writes it") from None
    except OSError:
        # Not every file system has locks.
        pass
    # Nor is a device, or a pipe, cut.
    with suppress(OSError):
        file.truncate(0)
    return file


def read_record(path: Path) -> Record:
    """Read a file of records. Raises ConfigurationError, with the line, if it is none."""
    lines = list(_read_lines(path))
    if lines[0]["kind"] != "run":
        raise ConfigurationError(
            f"{path} is no record of a benchmark: expected a first line of kind 'run', as "
            "--json FILE writes it"
        )
    head = lines[0]
    if head.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"{path} has schema {head.get('schema')!r}, expected {SCHEMA}: measure again with this "
            "version of mpiddp"
        )
    try:
        return Record(
            path=path,
            benchmark=head["benchmark"],
            environment=head["environment"],
            options=head["options"],
            cells=tuple(_read_cell(line, path) for line in lines if line["kind"] == "cell"),
            others=tuple(line for line in lines[1:] if line["kind"] != "cell"),
            is_complete=lines[-1]["kind"] == "end" and lines[-1]["is_complete"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} lacks what a record must have: {error!r}") from None


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is no record of a benchmark: it is no text") from None
    # Not splitlines, which also breaks at separators that JSON allows in strings.
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict) or "kind" not in content:
            is_last = number == len(lines) > 1
            advice = ": if it was cut off, delete this last line, and the others are read"
            raise ConfigurationError(
                f"{path}, line {number}: expected a JSON object with 'kind', found {line[:40]!r}"
                + advice * is_last
            )
        yield content


def _read_cell(line: Mapping[str, Any], path: Path) -> Cell:
    fields = {name: value for name, value in line.items() if name != "kind"}
    cell = Cell(
        **{
            **fields,
            "samples": tuple(fields["samples"]),
            "summary": _read_summary(fields["summary"]),
            "by_rank": tuple(map(_read_summary, fields["by_rank"])),
        }
    )
    _check_cell(cell, path)
    return cell


def _check_cell(cell: Cell, path: Path) -> None:
    """Raise ConfigurationError unless the values are of the kind that every record has."""
    counts = _are(int, cell.ranks, cell.nodes) and cell.ranks >= cell.nodes >= 1
    samples = cell.samples and _are(int | float, *cell.samples) and all(map(isfinite, cell.samples))
    places = _are(Mapping, cell.at) and _are(int | float | str, *cell.at.values())
    for what, fits in (
        ("texts as quantity and contender", _are(str, cell.quantity, cell.contender, cell.unit)),
        ("ranks, and nodes that have some of them", counts),
        ("samples that are finite numbers", samples),
        ("places as texts or numbers", places),
        ("details by name", isinstance(cell.details, Mapping)),
    ):
        if not fits:
            shown = f"{cell.quantity!s:.40} of {cell.contender!s:.40}"
            raise ConfigurationError(f"{path} has a cell ({shown}) without {what}: measure again")


def _are(kind: Any, *values: object) -> bool:
    return all(isinstance(value, kind) for value in values)


def _read_summary(content: Mapping[str, Any]) -> Summary:
    interval = content["interval"]
    return Summary(**{**content, "interval": interval and Interval(**interval)})
