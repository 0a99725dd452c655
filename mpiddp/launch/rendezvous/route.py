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
from mpiddp.launch.rendezvous.address_agreement import (
    Agreement,
    OfferServer,
    agree,
    meet,
    tell_no_offer,
)
from mpiddp.launch.rendezvous.store import Meeting
from mpiddp.process.sockets.ports import PortRange, find_range

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


class RouteFinder:
    """A node leader's part of the address phase. Rank 0's owns the listening sockets until then."""

    ports: PortRange | None = None
    """On rank 0, once ``find`` is done: those that may be listened on; None for any."""

    def __init__(
        self, option: str, port_range: str, world: World, leaders: SleepingCommunicator | None
    ) -> None:
        """``option``: ``--interface``. ``port_range``: ``--port-range``.

        ``leaders``: None if this process is alone.
        """
        self._option = option
        self._port_range = port_range
        self._world = world
        self._leaders = leaders
        self._server: OfferServer | None = None
        self.descriptor: int | None = None
        """On rank 0, once an address is agreed: of the listening socket. The caller owns it."""

    def find(self, hostnames: Sequence[str], timeout: float) -> Route:
        """Candidates, attempts, agreement. Collective over leaders.

        ``hostnames``: of the job, as far as this rank knows. ``timeout``: of the phase, seconds.
        """
        world, leaders = self._world, self._leaders
        own = interfaces.list_interfaces()
        rule = find_rule(self._option, world.hostname)
        self._check_option(hostnames)
        if world.rank == 0:
            self._listen(own, rule)
        if leaders is not None:
            agreement = meet(self._server, leaders, world, timeout)
        else:
            assert self._server is not None
            agreement = self._server.agree_alone()
        return self._take(agreement, own, rule)

    def close(self) -> None:
        """Stop listening, if no address was agreed."""
        if self._server is not None:
            self._server.hand_over(None)
            self._server = None

    def _listen(self, own: Sequence[Interface], rule: InterfaceRule | None) -> None:
        world = self._world
        try:
            self.ports = find_range(self._port_range)
            candidates = interfaces.list_candidates(own, rule, world.node_count, world.hostname)
            self._server = OfferServer(candidates, self.ports)
        except Exception:  # Whatever it is: the other leaders wait for rank 0's word.
            if self._leaders is not None:
                tell_no_offer(self._leaders)
            raise

    def _take(
        self, agreement: Agreement, own: Sequence[Interface], rule: InterfaceRule | None
    ) -> Route:
        """Keep the winner's socket, and close the others."""
        winner = agreement.common[0]
        if self._server is not None:
            self.descriptor = self._server.hand_over(winner)
            self._server = None
        offer = agreement.offers[winner]
        meeting = Meeting(
            offer.candidate.address, offer.port, offer.candidate.interface, agreement.token.hex()
        )
        found = (interfaces.find_interface(own, a) for a in agreement.local_addresses)
        used = list(dict.fromkeys(each.name for each in found if each is not None))
        variables = interfaces.choose_variables(own, used, rule, self._world.node_count)
        return Route(meeting, used[0] if used else "?", agreement.local_addresses[0], variables)

    def _check_option(self, hostnames: Sequence[str]) -> None:
        """Refuse ``--interface HOST=NAME`` if no node is a HOST: a name was mistyped.

        Some may be: one command line may serve jobs on changing nodes.
        """
        missed = names_nobody(self._option, self._world.hostname)
        if self._leaders is not None:
            (missed,) = agree(self._leaders, [missed])
        if missed:
            raise ConfigurationError(
                f"--interface {self._option!r} names none of the job's hosts, which are "
                f"{fold_hostnames(hostnames)}: expected HOST=NAME,… for one of them at least"
            )
