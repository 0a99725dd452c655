"""The companions of all nodes find each other: where to connect, and the tokens, go over MPI."""

from __future__ import annotations

import os
import secrets

from mpiddp import environment
from mpiddp.errors import UnreachableError
from mpiddp.launch.mpi.control import ControlChannel
from mpiddp.launch.mpi.world import Roster
from mpiddp.lifeline.lifeline import TOKEN_BYTES, Lifeline
from mpiddp.lifeline.membership import Membership
from mpiddp.process.sockets.ports import find_range


def join(
    lifeline: Lifeline,
    control: ControlChannel,
    roster: Roster | None,
    address: str,
    seconds: float,
    port_range: str,
) -> None:
    """Connect the nodes' companions: afterwards each rank's end is noticed. Collective.

    ``roster``: on rank 0 only. ``address``: at which rank 0's companion listens. ``seconds``: after
    which a silent companion is lost. ``port_range``: the option. Raises UnreachableError.
    """
    world = control.world
    token, problem, place = secrets.token_hex(TOKEN_BYTES), None, ""
    if world.rank == 0:
        try:
            clients = secrets.token_hex(TOKEN_BYTES)
            place = lifeline.listen(address, token, clients, find_range(port_range))
        except UnreachableError as error:
            problem = error
    place, token = control.broadcast((place, token))
    if not place:
        raise problem or UnreachableError("the companion of rank 0's node cannot listen")
    if world.local_rank != 0:
        lifeline.join()
        return
    hostnames: tuple[str, ...] = (world.hostname,) if world.size == 1 else ()
    if roster is not None:
        hostnames = tuple(roster.hostnames[node] for node in roster.nodes)
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
            records=os.environ.get(environment.FLIGHT_RECORDS[0], ""),
            ras=os.environ.get(environment.NCCL_RAS_ADDRESS, ""),
            hostnames=hostnames,
        )
    )
