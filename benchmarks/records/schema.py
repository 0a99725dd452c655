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
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.records.statistics import Summary, summarize
from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import convert, decode, read_whole
from mpiddp.wording import count_noun, describe_size, print_message

MOST_BYTES = 1 << 30
"""Of a record: 1 GiB. Its lines are read one by one."""
SCHEMA = 3
"""Version of the records' form; a change that breaks readers raises it."""

Coordinate = int | float | str
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def describe_place(quantity: str, contender: str, at: Mapping[str, Coordinate]) -> str:
    """``all-reduce, mpiddp ring, 2 ranks, 4 KiB, float32``."""
    parts = [quantity, contender]
    for name, value in at.items():
        if name in ("ranks", "nodes"):
            parts.append(count_noun(int(value), name[:-1]))
        elif name == "bytes":
            parts.append(describe_size(int(value)))
        else:
            parts.append(value if isinstance(value, str) else f"{name} {value}")
    return ", ".join(parts)


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

    def __post_init__(self) -> None:
        if not self.ranks >= self.nodes >= 1:
            raise ContentError(f"expected 1 <= nodes <= ranks, found {self.nodes} and {self.ranks}")
        if not self.samples:
            raise ContentError("samples: expected one or more")

    @property
    def key(self) -> tuple[Coordinate, ...]:
        """Unique among the cells of a record; equal for the same measurement in two records."""
        places = [word for name in sorted(self.at) for word in (name, self.at[name])]
        return (self.quantity, self.contender, self.ranks, self.nodes, *places)

    @property
    def name(self) -> str:
        """As in `describe_place`, with the nodes if there are several."""
        nodes = {"nodes": self.nodes} if self.nodes > 1 else {}
        place = {"ranks": self.ranks, **nodes, **self.at}
        return describe_place(self.quantity, self.contender, place)

    @property
    def bytes(self) -> int:
        """Of a cell that has a size."""
        if not isinstance(size := self.at.get("bytes"), int):
            raise ContentError(
                f"{self.quantity} of {self.contender}: expected bytes, found {size!r}"
            )
        return size

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


@dataclass(frozen=True)
class _Line:
    kind: str


@dataclass(frozen=True)
class _Form:
    kind: str
    schema: int


@dataclass(frozen=True)
class _Head:
    benchmark: str
    environment: Mapping[str, Any]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class _End:
    is_complete: bool


def read_record(path: Path) -> Record:
    """Read a file of records. Raises ConfigurationError, with the line, if it is none."""
    head: _Head | None = None
    end: _End | None = None
    cells, others = list[Cell](), list[Mapping[str, Any]]()
    for number, content in _read_lines(path):
        end = None
        try:
            if head is None:
                head = _read_head(content)
            elif convert(content, _Line).kind == "cell":
                cells.append(convert(content, Cell))
            elif content["kind"] == "run":
                # Of another machine, perhaps: its rounds are not the first one's.
                raise ContentError("expected one record in a file, found a second: cut it here")
            else:
                others.append(content)
                end = convert(content, _End) if content["kind"] == "end" else None
        except ContentError as error:
            raise ContentError(f"{path}, line {number}: {error}") from None
    assert head is not None
    return Record(
        path=path,
        benchmark=head.benchmark,
        environment=head.environment,
        options=head.options,
        cells=tuple(cells),
        others=tuple(others),
        is_complete=end is not None and end.is_complete,
    )


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        # Not splitlines, which also breaks at separators that JSON allows in strings.
        lines = read_whole(path, MOST_BYTES).removesuffix(b"\n").split(b"\n")
    except ContentError as error:
        raise ContentError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield number, decode(line, dict[str, Any])
        except ContentError as error:
            is_last = number == len(lines) > 1
            advice = ": if it was cut off, delete this last line, and the others are read"
            raise ContentError(f"{path}, line {number}: {error}{advice * is_last}") from None


def _read_head(content: Mapping[str, Any]) -> _Head:
    form = convert(content, _Form)
    if form != _Form("run", SCHEMA):
        raise ContentError(
            f"expected kind 'run' and schema {SCHEMA}, as --output FILE.jsonl writes it, found "
            f"{form.kind!r} and {form.schema}: measure again with this version of mpiddp"
        )
    return convert(content, _Head)
