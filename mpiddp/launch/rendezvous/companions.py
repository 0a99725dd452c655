"""The companions of all nodes find each other: where to connect, and the tokens, go over MPI."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from mpiddp.errors import UnreachableError
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.control import ControlChannel
from mpiddp.launch.mpi.world import Neighbourhood, Roster
from mpiddp.lifeline.lifeline import TOKEN_BYTES, Lifeline
from mpiddp.lifeline.membership import Entrance, Membership
from mpiddp.process.sockets.ports import PortRange


@dataclass(frozen=True)
class CompanionAgreement:
    """What the ranks tell each other for it. Its methods are collective."""

    control: ControlChannel
    neighbourhood: Neighbourhood | None
    """None without MPI."""
    roster: Roster | None
    """On rank 0 only."""

    def share_entrance(self, entrance: Entrance | None) -> Entrance:
        """The first rank's ``entrance``, on all ranks of its node."""
        if self.neighbourhood is not None:
            entrance = mpi.SleepingCommunicator(self.neighbourhood.node).bcast(entrance)
        assert entrance is not None, "the node's first rank has failed otherwise"
        return entrance

    def join(
        self, lifeline: Lifeline, address: str, seconds: float, ports: PortRange | None
    ) -> None:
        """Connect the nodes' companions: afterwards each rank's end is noticed.

        ``address``: at which rank 0's companion listens. ``seconds``: after which a silent
        companion is lost. ``ports``: on rank 0, those that its companion may listen on; None for
        any. Raises UnreachableError.
        """
        world = self.control.world
        token, problem, place = secrets.token_hex(TOKEN_BYTES), None, ""
        if world.rank == 0:
            try:
                clients = secrets.token_hex(TOKEN_BYTES)
                place = lifeline.listen(address, token, clients, ports)
            except UnreachableError as error:
                problem = error
        place, token = self.control.broadcast((place, token))
        if not place:
            raise problem or UnreachableError("the companion of rank 0's node cannot listen")
        if world.local_rank != 0:
            lifeline.join()
            return
        lifeline.join(
            Membership(
                rank=world.rank,
                size=world.size,
                hostname=world.hostname,
                master_hostname=world.master_hostname,
                node_rank=world.node_rank,
                seconds=seconds,
                token=token,
                address=place if world.rank != 0 else "",
                hostnames=self._list_hostnames(),
            )
        )

    def _list_hostnames(self) -> tuple[str, ...]:
        """Of each rank, on rank 0; empty on the others."""
        world, roster = self.control.world, self.roster
        if roster is not None:
            return tuple(roster.hostnames[node] for node in roster.nodes)
        return (world.hostname,) if world.size == 1 else ()
