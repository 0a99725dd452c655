"""How the ranks of an examination tell each other what they found; also for one process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from mpiddp.launch.mpi import mpi
from mpiddp.launch.startup import Starter

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class Circle:
    """The ranks of a launch whose MPI is up. Values should be small: rank 0 gets all of them."""

    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    def gather(self, value: T) -> list[T] | None:
        """All ranks' values on rank 0, None on the others. Collective."""
        return _gather(self._starter.resources.comm, value)

    def gather_on_node(self, value: T) -> list[T] | None:
        """The values of a node's ranks on its first rank, None on the others. Collective."""
        neighbourhood = self._starter.neighbourhood
        return _gather(neighbourhood.node if neighbourhood is not None else None, value)

    def gather_nodes(self, value: T) -> list[T] | None:
        """The values of all nodes' first ranks on rank 0, None on the others. Collective."""
        neighbourhood = self._starter.neighbourhood
        if neighbourhood is not None and neighbourhood.leaders is None:
            return None
        return _gather(neighbourhood.leaders if neighbourhood is not None else None, value)

    def hostnames(self) -> tuple[str, ...]:
        """Of the nodes, by their rank. Rank 0 alone knows them."""
        roster = self._starter.peers.roster
        return roster.hostnames if roster is not None else (self._starter.control.world.hostname,)

    def host_of(self, rank: int) -> str:
        """Host name of a rank. Rank 0 alone knows it."""
        roster = self._starter.peers.roster
        return self.hostnames()[roster.nodes[rank] if roster is not None else 0]

    def describe_rank(self, rank: int) -> str:
        """``rank 3 on node002``. Rank 0 alone knows it."""
        return f"rank {rank} on {self.host_of(rank)}"


def _gather(communicator: MPI.Intracomm | None, value: T) -> list[T] | None:
    # Who waits sleeps: the cores are importing torch.
    if communicator is None:
        return [value]
    return mpi.SleepingCommunicator(communicator).gather(value)
