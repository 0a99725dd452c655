"""The address of the store, and the interface by which each node reaches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.launch.network import interfaces
from mpiddp.launch.network.interface_rule import find_rule, names_nobody
from mpiddp.launch.network.interfaces import Interface
from mpiddp.launch.rendezvous.address_agreement import Agreement, agree, meet, tell_no_offer
from mpiddp.launch.rendezvous.offers import OfferServer
from mpiddp.launch.rendezvous.store import Meeting
from mpiddp.process.sockets.ports import find_range

if TYPE_CHECKING:
    from mpiddp.launch.mpi.mpi import SleepingCommunicator
    from mpiddp.launch.mpi.world import World
    from mpiddp.launch.network.interface_rule import InterfaceRule


@dataclass(frozen=True)
class Route:
    """How one node reaches rank 0; found by its leader."""

    meeting: Meeting
    interface: str
    """Of this node; ``?`` if no interface holds the address."""
    local_address: str
    """This node's end of its connection to the agreed address."""
    variables: Mapping[str, str]
    """Interface variables that NCCL and Gloo are told on this node."""


def find_route(
    world: World,
    leaders: SleepingCommunicator | None,
    hostnames: Sequence[str],
    *,
    interface: str,
    port_range: str,
    timeout: float,
) -> tuple[Route, int | None]:
    """Candidates, attempts, agreement. Collective over leaders.

    Returns on rank 0, too, the descriptor of the socket that listens there; the caller owns it.

    ``leaders``: None if this process is alone. ``hostnames``: of the job, as far as this rank
    knows. The others: as options of a launch.
    """
    own = interfaces.list_interfaces()
    rule = find_rule(interface, world.hostname)
    _check_hosts(interface, world, leaders, hostnames)
    if world.rank != 0:
        assert leaders is not None
        agreement = meet(None, leaders, world, timeout)
        return _make_route(agreement, own, rule, world), None
    try:
        candidates = interfaces.list_candidates(own, rule, world.node_count, world.hostname)
        server = OfferServer(candidates, find_range(port_range))
    except Exception:  # Whatever it is: the other leaders wait for rank 0's word.
        if leaders is not None:
            tell_no_offer(leaders)
        raise
    winner = None
    try:
        agreement = meet(server, leaders, world, timeout)
        winner = agreement.common[0]
    finally:
        descriptor = server.hand_over(winner)
    return _make_route(agreement, own, rule, world), descriptor


def _make_route(
    agreement: Agreement, own: Sequence[Interface], rule: InterfaceRule | None, world: World
) -> Route:
    offer = agreement.offers[agreement.common[0]]
    meeting = Meeting(
        offer.candidate.address, offer.port, offer.candidate.interface, agreement.token.hex()
    )
    found = (interfaces.find_interface(own, a) for a in agreement.local_addresses)
    used = list(dict.fromkeys(each.name for each in found if each is not None))
    variables = interfaces.choose_variables(own, used, rule, world.node_count)
    return Route(meeting, used[0] if used else "?", agreement.local_addresses[0], variables)


def _check_hosts(
    interface: str, world: World, leaders: SleepingCommunicator | None, hostnames: Sequence[str]
) -> None:
    """Refuse ``--interface HOST=NAME`` if no node is a HOST: a name was mistyped.

    Some may be: one command line may serve jobs on changing nodes.
    """
    missed = names_nobody(interface, world.hostname)
    if leaders is not None:
        (missed,) = agree(leaders, [missed])
    if missed:
        raise ConfigurationError(
            f"--interface {interface!r} names none of the job's hosts, which are "
            f"{fold_hostnames(hostnames)}: expected HOST=NAME,… for one of them at least"
        )
