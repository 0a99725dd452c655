"""The ranks' companions find each other: where to connect, and the token, go over MPI."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from mpiddp.errors import UnreachableError
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.control import ControlChannel
from mpiddp.launch.mpi.world import Neighbourhood, Roster
from mpiddp.lifeline.lifeline import Lifeline
from mpiddp.lifeline.membership import Membership
from mpiddp.process.sockets.ports import PortRange

TOKEN_BYTES = 16


@dataclass(frozen=True)
class Place:
    """A rank's place among the others."""

    control: ControlChannel
    neighbourhood: Neighbourhood | None
    """None without MPI."""
    roster: Roster | None
    """On rank 0 only."""


def join(
    lifeline: Lifeline,
    place: Place,
    address: str,
    seconds: float,
    ports: PortRange | None = None,
) -> None:
    """Connect a rank's companion with those of the other ranks. Collective.

    ``address``: at which rank 0's companion listens. ``seconds``: after which a silent companion
    is lost. ``ports``: on rank 0, those that its companion may listen on; None for any. Raises
    UnreachableError.
    """
    world, control = place.control.world, place.control
    token, problem = secrets.token_hex(TOKEN_BYTES), None
    places, leader = ["", ""], world.rank
    try:
        if world.rank == 0:
            clients = secrets.token_hex(TOKEN_BYTES)
            places[0] = lifeline.listen(address, token, clients, ports)
    except UnreachableError as error:
        problem = error
    places[0], token = control.broadcast((places[0], token))
    try:
        if world.local_rank == 0:
            places[1] = lifeline.listen("", token)
    except UnreachableError as error:
        problem = error
    if place.neighbourhood is not None:
        node = mpi.SleepingCommunicator(place.neighbourhood.node)
        places[1], leader = node.bcast((places[1], world.rank))
    if problem is not None or not all(places):
        raise problem or UnreachableError("the companion of another rank cannot listen")
    leads = world.local_rank == 0
    lifeline.join(
        Membership(
            rank=world.rank,
            size=world.size,
            hostname=world.hostname,
            parent=0 if leads else leader,
            parent_hostname=world.master_hostname if leads else world.hostname,
            node_rank=world.node_rank,
            local_rank=world.local_rank,
            seconds=seconds,
            token=token,
            places=() if world.rank == 0 else (places[0],) if leads else (places[1], places[0]),
            hostnames=_list_hostnames(place),
        )
    )


def _list_hostnames(place: Place) -> tuple[str, ...]:
    """Of each rank, on rank 0; empty on the others."""
    world, roster = place.control.world, place.roster
    if roster is not None:
        return tuple(roster.hostnames[node] for node in roster.nodes)
    return (world.hostname,) if world.size == 1 else ()
