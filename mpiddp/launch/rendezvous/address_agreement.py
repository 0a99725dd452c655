"""Which address of rank 0 every node really reaches.

Bind, then publish: rank 0 opens one listening socket per candidate address, on a port that the
kernel picks or a free one of ``--port-range``, and tells MPI. The first rank of every node connects
to all of them (`offers`), and the address wins that all nodes have reached.

Distant nodes exchange the long message with a nearer node, in a tree whose root is rank 0, and with
rank 0 only if that fails: on 8,192 nodes rank 0 would otherwise move more than a gigabyte.

The winner's socket is handed on as it is; no port is ever closed and hoped for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.network.interfaces import Candidate
from mpiddp.launch.rendezvous.offers import (
    LOST,
    MESSAGE_BYTES,
    NO_ANSWER,
    Attempt,
    Invitation,
    Offer,
    OfferServer,
    try_offers,
)

if TYPE_CHECKING:
    from mpiddp.launch.mpi.mpi import SleepingCommunicator
    from mpiddp.launch.mpi.world import World

FAN_OUT = 16
"""Nodes that exchange long messages with rank 0, or with another node."""
NEARER_SECONDS = 2.0
"""How long a node tries another one than rank 0's: long enough to repeat a lost SYN."""
REACH_SECONDS = 15.0
"""How long a node tries to reach rank 0 when no candidate answers."""
GRACE_SECONDS = 0.25
"""How much longer it waits for the other candidates once one has answered."""
UNTRIED = Attempt(None, "the nearer node does not listen there")


@dataclass(frozen=True)
class Agreement:
    """What the leaders of all nodes found."""

    offers: tuple[Offer, ...]
    common: tuple[int, ...]
    """Indices of the offers that every node reached, in rank 0's order of preference."""
    local_addresses: tuple[str, ...]
    """This node's ends of the connections to the common offers."""
    token: bytes


def describe_failure(
    offers: Sequence[Offer], rows: Sequence[tuple[str, Sequence[Attempt]]], master: str
) -> str:
    """A table of which node could not reach which address of rank 0."""
    heads = [f"{o.candidate.address} ({o.candidate.interface})" for o in offers]
    cells = [
        [name, *("reached" if a.local_address is not None else a.problem for a in attempts)]
        for name, attempts in rows
    ]
    table = [["node", *heads], *cells]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads) + 1)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    advice = "Open a path between the nodes (firewall?)"
    if any(a.problem.startswith(LOST) for _, attempts in rows for a in attempts):
        advice += ", with one MTU on all of it (ip link set INTERFACE mtu BYTES)"
    return (
        f"no address of rank 0 on {master} was reached by every node. {advice}, "
        "or name the interface that has one: --interface NAME\n  " + "\n  ".join(lines)
    )


def meet(
    server: OfferServer | None, leaders: SleepingCommunicator | None, world: World, timeout: float
) -> Agreement:
    """Let every node's leader try rank 0's offers. Collective over leaders.

    ``server``: rank 0's. ``leaders``: None if this process is alone, which takes its first offer.

    Raises UnreachableError on all leaders if no offer was reached by all of them; rank 0's holds
    the table. Raises ConfigurationError if rank 0 called `tell_no_offer` instead.
    """
    invitation = server.invitation if server is not None else None
    if leaders is not None:
        invitation = leaders.bcast(invitation)
    if invitation is None:
        raise ConfigurationError("rank 0 has no address to offer")
    if leaders is None:
        own = invitation.offers[0].candidate.address
        return Agreement(invitation.offers, (0,), (own,), invitation.token)
    is_tree = world.node_count > 1 + FAN_OUT
    # Two rounds must fit into the phase, or its deadline would come before the table.
    seconds = min(timeout / (7 if is_tree else 3), REACH_SECONDS)
    # A second, longer round only if the first found nothing: a lost SYN is repeated after 1 s.
    for grace in (GRACE_SECONDS, seconds):
        with contextlib.ExitStack() as stack:
            attempt = partial(try_offers, token=invitation.token, grace=grace)
            if is_tree:
                tree = _try_in_tree(invitation, leaders, world, attempt, seconds)
                attempts = stack.enter_context(tree)
            else:
                attempts = attempt(invitation.offers, seconds=seconds)
            reached = [attempt.local_address is not None for attempt in attempts]
            has_ended = all(attempt.problem != NO_ANSWER for attempt in attempts)
            *everyone, all_have_ended = agree(leaders, [*reached, has_ended])
        common = tuple(index for index, has_reached in enumerate(everyone) if has_reached)
        if common:
            local = tuple(attempts[index].local_address or "" for index in common)
            return Agreement(invitation.offers, common, local, invitation.token)
        if all_have_ended:
            break
    rows = leaders.gather((world.hostname, attempts))
    if rows is not None:
        raise UnreachableError(describe_failure(invitation.offers, rows, world.hostname))
    raise UnreachableError("this node's part of the addresses of rank 0 is in rank 0's table")


@contextlib.contextmanager
def _try_in_tree(
    invitation: Invitation,
    leaders: SleepingCommunicator,
    world: World,
    attempt: Callable[..., tuple[Attempt, ...]],
    seconds: float,
) -> Iterator[tuple[Attempt, ...]]:
    """One Attempt per offer of rank 0; a node's children may connect to it until the context ends.

    Collective over leaders. Takes three times ``seconds`` at most.
    """
    is_distant = world.node_rank > FAN_OUT
    message_bytes = 0 if is_distant else MESSAGE_BYTES
    attempts = attempt(invitation.offers, seconds=seconds, message_bytes=message_bytes)
    addresses = [each.local_address for each in attempts]
    with _listen_to_children(invitation, world, addresses) as ports:
        mine = [(each, ports[each]) if each and each in ports else None for each in addresses]
        everyone = leaders.allgather(mine if ports else None)
        if is_distant:
            places = everyone[(world.node_rank - 1) // FAN_OUT] or ()
            parent = [each and Offer(Candidate(each[0], ""), each[1]) for each in places]
            attempts = _pass_long_messages(parent, invitation.offers, attempts, attempt, seconds)
        yield attempts


def _pass_long_messages(
    parent: Sequence[Offer | None],
    offers: Sequence[Offer],
    attempts: Sequence[Attempt],
    attempt: Callable[..., tuple[Attempt, ...]],
    seconds: float,
) -> tuple[Attempt, ...]:
    """What comes of a long message on each network on which rank 0 has answered.

    ``parent``: the nearer node's offer on each network. Rank 0 is tried if none of them is reached.
    """
    reached = [index for index, each in enumerate(attempts) if each.local_address is not None]
    passed: dict[int, Attempt] = {}
    nearer, first = dict(enumerate(parent)), dict(enumerate(offers))
    for partners, limit in ((nearer, NEARER_SECONDS), (first, seconds)):
        tried = {index: offer for index in reached if (offer := partners.get(index)) is not None}
        if tried and all(each.local_address is None for each in passed.values()):
            found = attempt(tuple(tried.values()), seconds=min(seconds, limit))
            passed = dict(zip(tried, found, strict=True))
    results = list(attempts)
    for index in reached:
        result = passed.get(index, UNTRIED)
        # One that a long message has passed keeps the address by which rank 0 was reached.
        if result.local_address is None:
            results[index] = result
    return tuple(results)


@contextlib.contextmanager
def _listen_to_children(
    invitation: Invitation, world: World, addresses: Sequence[str | None]
) -> Iterator[dict[str | None, int]]:
    """The port of each address at which others may exchange long messages with this node."""
    server = None
    candidates = [Candidate(each, "") for each in dict.fromkeys(addresses) if each is not None]
    if 0 < FAN_OUT * world.node_rank < world.node_count - 1 and candidates:
        # Its children turn to rank 0 if it cannot listen; the other leaders wait for this one.
        with contextlib.suppress(UnreachableError, OSError, RuntimeError):
            server = OfferServer(candidates, invitation.ports, invitation.token)
    try:
        yield {} if server is None else {o.candidate.address: o.port for o in server.offers}
    finally:
        if server is not None:
            server.hand_over(None)


def tell_no_offer(leaders: SleepingCommunicator) -> None:
    """Rank 0's part of `meet` if it has no OfferServer: the other leaders wait for none."""
    leaders.bcast(None)


def agree(leaders: SleepingCommunicator, flags: Sequence[bool]) -> tuple[bool, ...]:
    """Which of ``flags`` every node has set. Collective over leaders."""
    import numpy
    from mpi4py import MPI

    mine = numpy.array(flags, dtype=numpy.uint8)
    everyone = numpy.empty_like(mine)
    leaders.Allreduce(mine, everyone, op=MPI.MIN)
    return tuple(map(bool, everyone))
