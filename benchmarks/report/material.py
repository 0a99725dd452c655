"""What the records hold, put together: cells with names of their own, and checked values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.records import Cell, Record, read_record
from mpiddp.errors import ConfigurationError


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
    """Read all records. Raises ConfigurationError for one that is none, that shows nothing, or that
    is given twice."""
    records: list[Record] = []
    for path in paths:
        record = read_record(path)
        _check_record(record, records)
        records.append(record)
    if not any(record.cells for record in records):
        where = ", ".join(str(path) for path in paths)
        raise ConfigurationError(f"{where}: expected cells to draw, found failures and refusals")
    names = _name_records(paths)
    counts = Counter(cell.key for record in records for cell in record.cells)
    cells = [
        Measured(
            cell, number, cell.contender if counts[cell.key] == 1 else f"{cell.contender} ({name})"
        )
        for number, (record, name) in enumerate(zip(records, names, strict=True))
        for cell in record.cells
    ]
    return Material(records, names, cells)


def _check_record(record: Record, others: Sequence[Record]) -> None:
    for cell in record.cells:
        _check_cell(cell, record.path)
    if not record.cells and not {"refusal", "failure"} & {line["kind"] for line in record.others}:
        raise ConfigurationError(
            f"{record.path} has no cells, so there is nothing to show: expected a record of a "
            f"command that measures or predicts, found one of {record.benchmark}"
        )
    for other in others:
        if replace(record, path=other.path) == other:
            raise ConfigurationError(
                f"{record.path} is the same record as {other.path}: give one of them"
            )


def _name_records(paths: Sequence[Path]) -> list[str]:
    stems = Counter(path.stem for path in paths)
    return [path.stem if stems[path.stem] == 1 else str(path) for path in paths]


def _check_cell(cell: Cell, path: Path) -> None:
    """Raise ConfigurationError unless the values are of the kind that every record has."""
    counts = _are(int, cell.ranks, cell.nodes) and cell.ranks >= cell.nodes >= 1
    for what, fits in (
        ("texts as quantity and contender", _are(str, cell.quantity, cell.contender, cell.unit)),
        ("ranks, and nodes that have some of them", counts),
        ("samples that are numbers", bool(cell.samples) and _are_numbers(cell.samples)),
        ("places as texts or numbers", _are(int | float | str, *_list_places(cell.at))),
        ("details by name", isinstance(cell.details, Mapping)),
    ):
        if not fits:
            shown = f"{cell.quantity!s:.40} of {cell.contender!s:.40}"
            raise ConfigurationError(f"{path} has a cell ({shown}) without {what}")


def _are(kind: Any, *values: object) -> bool:
    return all(isinstance(value, kind) for value in values)


def _are_numbers(values: Sequence[object]) -> bool:
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _list_places(at: object) -> Iterator[object]:
    if not isinstance(at, Mapping):
        yield None
    else:
        yield from at.values()
