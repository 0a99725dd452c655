"""Tables of aligned columns, from rows of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from benchmarks.records.options import format_rows

Row = TypeVar("Row")


def format_table(rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str]]) -> str:
    """A line of heads, then a line for each row; ``columns``: the text of a row's cell, by head."""
    body = ([text(row) for text in columns.values()] for row in rows)
    return "\n".join(format_rows([list(columns), *body]))
