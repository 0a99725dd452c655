"""What the records hold, put together: cells with names that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.records.schema import Cell, Record, read_record
from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import read_usable


@dataclass(frozen=True)
class Measured:
    """A cell, and where it comes from."""

    cell: Cell
    record: int
    """Number of the record, in the order of the command line."""
    name: str
    """The contender; with its record's name if another record has measured it, too."""

    @property
    def wrong(self) -> int:
        """Wrong elements of its result."""
        return int(self.cell.details.get("wrong") or 0)


@dataclass(frozen=True)
class Material:
    records: Sequence[Record]
    names: Sequence[str]
    """Of the records: the files' names, as far as they tell them apart."""
    cells: Sequence[Measured]

    def of(self, *quantities: str) -> list[Measured]:
        return [each for each in self.cells if each.cell.quantity in quantities]


def read_material(paths: Sequence[Path]) -> Material:
    """Read all records; what is none, or shows nothing, is left out with a line.

    Raises ConfigurationError if none is left, or for one that is given twice.
    """
    records = read_usable(paths, _read)
    paths = [record.path for record in records]
    for number, record in enumerate(records):
        _check_new(record, records[:number])
    if not any(record.cells for record in records):
        where = ", ".join(str(path) for path in paths)
        raise ConfigurationError(f"{where}: expected cells to draw, found failures and refusals")
    stems = Counter(path.stem for path in paths)
    names = [path.stem if stems[path.stem] == 1 else str(path) for path in paths]
    counts = Counter(cell.key for record in records for cell in record.cells)
    cells = [
        Measured(
            cell, number, cell.contender if counts[cell.key] == 1 else f"{cell.contender} ({name})"
        )
        for number, (record, name) in enumerate(zip(records, names, strict=True))
        for cell in record.cells
    ]
    return Material(records, names, cells)


def _read(path: Path) -> Record:
    record = read_record(path)
    if not record.cells and not {"refusal", "failure"} & {line["kind"] for line in record.others}:
        raise ConfigurationError(
            f"{record.path} has no cells, so there is nothing to show: expected a record of a "
            f"command that measures or predicts, found one of {record.benchmark}"
        )
    return record


def _check_new(record: Record, others: Sequence[Record]) -> None:
    for other in others:
        if replace(record, path=other.path) == other:
            raise ConfigurationError(
                f"{record.path} is the same record as {other.path}: give one of them"
            )
