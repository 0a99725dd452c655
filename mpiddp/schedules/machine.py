"""How long messages and additions take on a machine, by their size.

Each range of sizes has a line: α seconds, and β for each byte. At some sizes libraries change the
protocol (eager, rendezvous), and processors the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import ConfigurationError

Size = TypeVar("Size", float, NDArray[Any])
"""Of a message in bytes, or of many."""


@dataclass(frozen=True)
class Piece:
    """The cost of messages from one size on, up to the next piece."""

    start: float
    """Bytes of its smallest message; more than 0."""
    latency: float
    """Where its line meets 0 bytes, which may be below 0."""
    seconds_per_byte: float


@dataclass(frozen=True)
class MessageCost:
    """The cost of a message between two ranks, or of adding one."""

    latency: float
    """α: seconds for each message."""
    seconds_per_byte: float
    """β."""
    pieces: tuple[Piece, ...] = ()
    """For messages from some size on, smallest first, if the protocol or the cache changes."""

    @property
    def lines(self) -> tuple[Piece, ...]:
        """All pieces, from 0 bytes on."""
        return (Piece(0.0, self.latency, self.seconds_per_byte), *self.pieces)

    def seconds(self, size: Size) -> Size:
        """Of a message of ``size`` bytes."""
        if not self.pieces:
            return self.latency + size * self.seconds_per_byte
        place = np.searchsorted([piece.start for piece in self.pieces], size, side="right")
        latency = np.array([line.latency for line in self.lines])[place]
        per_byte = np.array([line.seconds_per_byte for line in self.lines])[place]
        total: Size = latency + size * per_byte
        return total

    def delay(self, size: Size) -> Size:
        """α, or what the message takes if a later piece is quicker than that."""
        least: Size = np.minimum(self.latency, self.seconds(size))
        return least

    def occupation(self, size: Size) -> Size:
        """Seconds beyond α: for so long no other message can use the link."""
        if not self.pieces:
            return size * self.seconds_per_byte
        beyond: Size = np.maximum(self.seconds(size) - self.latency, 0.0)
        return beyond

    @property
    def least_latency(self) -> float:
        """The minimum over all sizes."""
        return min(self.seconds(line.start) for line in self.lines)

    def least_per_byte(self, apart: float = 0.0) -> float:
        """The minimum over all sizes; ``apart`` seconds of each message are left out."""
        starts = ((self.seconds(piece.start) - apart) / piece.start for piece in self.pieces)
        return max(min([*(line.seconds_per_byte for line in self.lines), *starts]), 0.0)

    @property
    def is_possible(self) -> bool:
        """Whether no size takes less than 0 seconds, and no larger one of a piece less."""
        figures = [self.latency, self.least_latency, *(line.start for line in self.lines)]
        figures += [line.seconds_per_byte for line in self.lines]
        is_ordered = all(low.start < high.start for low, high in pairwise(self.lines))
        return is_ordered and all(math.isfinite(each) and each >= 0 for each in figures)


@dataclass(frozen=True)
class Machine:
    """The costs of messages and additions. Raises ConfigurationError for impossible ones."""

    inside: MessageCost
    """Between two ranks of one node."""
    between: MessageCost
    """Between ranks of two nodes."""
    addition: float = 0.0
    """γ: seconds for each byte that arrives to be added."""
    shared: float | None = None
    """Seconds per byte of a node's link to the network, each way: by default, and at most, those of
    ``between``."""
    adding: MessageCost | None = None
    """The cost of adding a message, in place of ``addition``, if it depends on the size."""

    def __post_init__(self) -> None:
        costs = [self.inside, self.between, *([self.adding] if self.adding else [])]
        figures = [self.addition, *([] if self.shared is None else [self.shared])]
        good = all(math.isfinite(figure) and figure >= 0 for figure in figures)
        if not good or not all(cost.is_possible for cost in costs):
            raise ConfigurationError(f"latencies and seconds per byte must be >= 0: {self}")
        if not self.between.pieces and self.uplink > self.between.seconds_per_byte:
            raise ConfigurationError(
                f"one rank sends a byte in {self.between.seconds_per_byte} s between nodes, so its "
                f"node's link cannot need {self.uplink} s for it"
            )

    @property
    def uplink(self) -> float:
        """Seconds per byte of a node's link, each way."""
        return self.between.seconds_per_byte if self.shared is None else self.shared

    def occupation(self, size: Size) -> Size:
        """Seconds for which a message of ``size`` bytes keeps its node's link busy."""
        alone = self.between.occupation(size)
        return alone if self.shared is None else np.minimum(alone, size * self.shared)

    def addition_seconds(self, size: Size) -> Size:
        """Of adding a message of ``size`` bytes."""
        return size * self.addition if self.adding is None else self.adding.seconds(size)
