"""Tables of aligned columns, from rows of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from benchmarks.records.options import format_rows

Row = TypeVar("Row")


def format_table(
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], str]] | Iterable[tuple[str, Callable[[Row], str]]],
) -> str:
    """A line of heads, then a line for each row; ``columns``: the text of a row's cell, by head.

    As pairs, if several columns have one head.
    """
    pairs = columns.items() if isinstance(columns, Mapping) else columns
    heads, texts = zip(*pairs, strict=True)
    return "\n".join(format_rows([heads, *([text(row) for text in texts] for row in rows)]))
