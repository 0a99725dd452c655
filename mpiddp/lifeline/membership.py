"""What a companion is told of its rank and of the others once the ranks have met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Membership:
    """One rank's place in the tree of companions."""

    rank: int
    size: int
    hostname: str
    parent: int
    """Whose companion this one's is connected to: the node's first rank, or rank 0."""
    parent_hostname: str
    node_rank: int
    local_rank: int
    seconds: float
    """How long a connection may be silent."""
    token: str
    places: tuple[str, ...]
    """Where to connect to, the first that answers; none on rank 0."""
    hostnames: tuple[str, ...] = ()
    """Of each rank; known to rank 0 alone."""

    @staticmethod
    def unpack(content: Mapping[str, Any]) -> Membership:
        """From a message, in which lists stand for tuples."""
        sequences = {name: tuple(content[name]) for name in ("places", "hostnames")}
        return Membership(**{**content, **sequences})
