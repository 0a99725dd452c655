"""Which cells of two records belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common.records import Cell, Record
from benchmarks.compare.verdicts import Key, index_cells, is_comparable
from mpiddp.errors import ConfigurationError


@dataclass(frozen=True)
class Matched:
    """The cells of two records."""

    pairs: Mapping[Key, tuple[Cell, Cell]]
    incomparable: tuple[Cell, ...]
    """In both records, but in other units or with values that have no ratio."""
    gone: tuple[Cell, ...]
    """In the old record only."""
    added: tuple[Cell, ...]
    """In the new record only."""


def match(old: Record, new: Record) -> Matched:
    """Raises ConfigurationError if the records have no cell in common."""
    if old.benchmark != new.benchmark:
        raise ConfigurationError(
            f"{old.path} is a record of {old.benchmark}, {new.path} one of {new.benchmark}: "
            "expected two of the same command"
        )
    olds, news = index_cells(old), index_cells(new)
    common = {key: (olds[key], news[key]) for key in news if key in olds}
    if not common:
        raise ConfigurationError(
            f"{old.path} and {new.path} have no cell in common: expected the same contenders, "
            "ranks and sizes in both"
        )
    pairs = {key: pair for key, pair in common.items() if is_comparable(*pair)}
    return Matched(
        pairs,
        tuple(new for key, (_, new) in common.items() if key not in pairs),
        tuple(cell for key, cell in olds.items() if key not in news),
        tuple(cell for key, cell in news.items() if key not in olds),
    )
