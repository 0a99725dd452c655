"""What a node's companion is told: where its ranks enter, and its place among the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entrance:
    """Where the ranks of a node connect to their companion."""

    address: str
    """A local socket's, for `links.connect`."""
    token: str


@dataclass(frozen=True)
class Membership:
    """One node's companion among the others, told by the node's first rank."""

    rank: int
    """The node's first."""
    size: int
    """Ranks of the job."""
    hostname: str
    master_hostname: str
    """The host of rank 0."""
    node_rank: int
    seconds: float
    """How long a connection may be silent."""
    token: str
    address: str = ""
    """Where rank 0's companion listens; empty for itself."""
    ras: str = ""
    """Where NCCL answers on this node; empty if it is not used, or not asked."""
    records: str = ""
    """The beginning of the files that torch writes if NCCL times out; empty for none."""
    hostnames: tuple[str, ...] = ()
    """Of each rank; known to rank 0's companion alone."""

    @staticmethod
    def unpack(content: Mapping[str, Any]) -> Membership:
        """From a message, in which lists stand for tuples."""
        return Membership(**{**content, "hostnames": tuple(content["hostnames"])})
