"""What was priced: a table for each number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mpiddp.schedules.cost import Bounds
from mpiddp.schedules.registry import Price


@dataclass(frozen=True)
class Row:
    """One algorithm on one number of ranks."""

    name: str
    prices: tuple[Price, ...] | None
    """For each size; None where it can neither be simulated nor has a closed form."""
    obstacle: str = ""


@dataclass(frozen=True)
class Table:
    """All algorithms on one number of ranks."""

    ranks: int
    nodes: int
    rows: tuple[Row, ...]
    bounds: tuple[Bounds, ...]

    @property
    def title(self) -> str:
        """Ranks and, where several share one, nodes."""
        nodes = f" on {self.nodes:,} node{'s' if self.nodes > 1 else ''}"
        ranks = f"{self.ranks:,} rank{'s' if self.ranks > 1 else ''}"
        return ranks + (nodes if self.nodes != self.ranks else "")


def get_ratio(price: Price, least: Bounds) -> float | None:
    """How many times the lower bound; None where that is nothing."""
    return price.seconds / least.seconds if least.seconds else None
