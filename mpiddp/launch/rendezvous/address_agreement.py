"""Which address of rank 0 every node really reaches.

Bind, then publish: rank 0 opens one listening socket per candidate address, on a port that the
kernel picks or a free one of ``--port-range``, and tells MPI. Every node's leader connects to all
of them. It has reached one when

- rank 0 has answered: any host may own a 172.17.0.1. What both say is derived from the job's token,
  which goes over MPI alone;
- a message of 64 KiB has passed each way: if a switch or a tunnel drops large packets, short
  messages pass, and the first gradients do not. Distant nodes exchange it with a nearer node, in a
  tree whose root is rank 0, and with rank 0 only if that fails: on 8,192 nodes rank 0 would
  otherwise move more than a gigabyte.

The winner's socket is handed on as it is; no port is ever closed and hoped for.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.network.interfaces import Candidate, find_interface, list_interfaces
from mpiddp.process.background import BackgroundCalls
from mpiddp.process.sockets.listener import ListeningThread, Serve
from mpiddp.process.sockets.ports import PortRange, listen

if TYPE_CHECKING:
    from mpiddp.launch.mpi.mpi import SleepingCommunicator
    from mpiddp.launch.mpi.world import World

TOKEN_BYTES = 16
MESSAGE_BYTES = 1 << 16
"""More than one packet of any interface: InfiniBand's take up to 65,520 bytes."""
NO_ANSWER = "no answer"
"""The problem of an attempt that was not waited for until its end."""
LOST = "packets"
"""How the problem of an attempt begins whose long message was lost."""
FAN_OUT = 16
"""Nodes that exchange long messages with rank 0, or with another node."""
NEARER_SECONDS = 2.0
"""How long a node tries another one than rank 0's: long enough to repeat a lost SYN."""
THREAD_SHARE = 0.9
"""Share of the time after which an attempt gives up by itself, to say what it had come to."""
REACH_SECONDS = 15.0
"""How long a node tries to reach rank 0 when no candidate answers."""
GRACE_SECONDS = 0.25
"""How much longer it waits for the other candidates once one has answered."""


@dataclass(frozen=True)
class Offer:
    """One listening socket of a node, as other nodes learn of it."""

    candidate: Candidate
    port: int


@dataclass(frozen=True)
class Invitation:
    """What rank 0 tells the other nodes."""

    offers: tuple[Offer, ...]
    token: bytes
    ports: PortRange | None
    """Those that any node may listen on; None for any."""


@dataclass(frozen=True)
class Attempt:
    """What came of trying one offer from one node."""

    local_address: str | None
    """This node's end of the connection; None if the offer was not reached."""
    problem: str = ""


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


def _derive(token: bytes, role: str) -> bytes:
    """What both ends say to show that they are of the job with that token."""
    return hashlib.sha256(token + role.encode()).digest()


class _Leader:
    """The connection of a node's leader: an answer, and a message each way."""

    def __init__(self, connection: socket.socket, answer: bytes) -> None:
        self._connection = connection
        self._missing = MESSAGE_BYTES
        self._unsent = memoryview(answer)

    def serve(self) -> int:
        with contextlib.suppress(BlockingIOError):
            self._flush()
            while self._missing:
                piece = self._connection.recv(self._missing)
                if not piece:
                    return 0
                self._missing -= len(piece)
                if not self._missing:
                    self._unsent = memoryview(bytes(MESSAGE_BYTES))
            self._flush()
            return 0
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def _flush(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]


class OfferServer:
    """A node's listening sockets, and the thread that answers the leaders of this job."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        ports: PortRange | None = None,
        token: bytes | None = None,
    ) -> None:
        """``ports``: those that may be listened on; None for any. ``token``: of the job; rank 0
        makes it.

        Raises UnreachableError if no candidate can be listened on.
        """
        self.token = secrets.token_bytes(TOKEN_BYTES) if token is None else token
        self._ports = ports
        self._listeners: list[tuple[Candidate, socket.socket]] = []
        problems = []
        for candidate in candidates:
            try:
                self._listeners.append((candidate, listen(candidate.address, ports)))
            except OSError as error:
                reason = error.strerror or error
                problems.append(f"{candidate.address} on {candidate.interface}: {reason}")
        if not self._listeners:
            raise UnreachableError("no address can be listened on: " + "; ".join(problems))
        servers = [each for _, each in self._listeners]
        try:
            self._thread = ListeningThread(servers, {_derive(self.token, "leader"): self._admit})
        except (OSError, RuntimeError):
            for server in servers:
                server.close()
            raise

    def _admit(self, connection: socket.socket) -> Serve:
        return _Leader(connection, _derive(self.token, "rank 0")).serve

    @property
    def offers(self) -> tuple[Offer, ...]:
        return tuple(Offer(c, listener.getsockname()[1]) for c, listener in self._listeners)

    @property
    def invitation(self) -> Invitation:
        return Invitation(self.offers, self.token, self._ports)

    def agree_alone(self) -> Agreement:
        """The agreement of a process that has nobody to agree with: the first offer."""
        offers = self.offers
        return Agreement(offers, (0,), (offers[0].candidate.address,), self.token)

    def hand_over(self, index: int | None) -> int | None:
        """Stop answering and close all sockets but one, whose descriptor is returned.

        The caller owns the descriptor.
        """
        self._thread.close()
        descriptor = None
        for position, (_, listener) in enumerate(self._listeners):
            if position == index:
                descriptor = listener.detach()
            else:
                listener.close()
        return descriptor


def try_offers(
    offers: Sequence[Offer],
    token: bytes,
    *,
    seconds: float,
    grace: float,
    message_bytes: int = MESSAGE_BYTES,
) -> tuple[Attempt, ...]:
    """Connect to every offer at once; an attempt succeeds when a message has come back.

    ``message_bytes``: MESSAGE_BYTES, or 0 if rank 0's answer is enough.

    Returns one Attempt per offer, after all have ended, or ``grace`` seconds after the first
    success, or after ``seconds``.
    """
    calls = BackgroundCalls(
        {
            index: partial(_try_offer, offer, token, seconds, message_bytes)
            for index, offer in enumerate(offers)
        }
    )
    attempts = [Attempt(None, NO_ANSWER)] * len(offers)
    end = time.monotonic() + seconds
    while (answer := calls.next_result(end)) is not None:
        index, attempt = answer
        attempts[index] = attempt
        if attempt.local_address is not None:
            end = min(end, time.monotonic() + grace)
    return tuple(attempts)


def _try_offer(offer: Offer, token: bytes, seconds: float, message_bytes: int) -> Attempt:
    end = time.monotonic() + THREAD_SHARE * seconds
    candidate, local_address, is_ours = offer.candidate, "", False
    try:
        with socket.create_connection(
            (candidate.address, offer.port), THREAD_SHARE * seconds
        ) as connection:
            local_address = connection.getsockname()[0]
            answer = _derive(token, "rank 0")
            is_ours = _exchange(connection, _derive(token, "leader"), len(answer), end) == answer
            if is_ours:
                message = _exchange(connection, bytes(message_bytes), message_bytes, end)
                if len(message) == message_bytes:
                    return Attempt(local_address)
    except TimeoutError:
        return Attempt(None, _describe_loss(candidate, local_address) if is_ours else "timed out")
    except OSError as error:
        # One that is not ours may reset the connection instead of closing it.
        if is_ours or not local_address:
            return Attempt(None, error.strerror or str(error))
    return Attempt(None, "the connection was closed" if is_ours else "another host answered")


def _exchange(connection: socket.socket, message: bytes, length: int, end: float) -> bytes:
    """Send a message; returns ``length`` bytes that come back, fewer if that is all.

    Raises TimeoutError if it takes until ``end``, and OSError.
    """
    connection.settimeout(max(1e-3, end - time.monotonic()))
    connection.sendall(message)
    received = b""
    while len(received) < length:
        connection.settimeout(max(1e-3, end - time.monotonic()))
        piece = connection.recv(length - len(received))
        if not piece:
            break
        received += piece
    return received


def _describe_loss(candidate: Candidate, local_address: str) -> str:
    """What a node says of an address at which short messages pass and long ones do not."""
    own = find_interface(list_interfaces(), local_address)
    sizes = [mtu for mtu in (candidate.mtu, own.mtu if own is not None else 0) if mtu]
    return (
        f"{LOST} of {min(sizes, default=0) or '?'} bytes do not pass"
        f" by {own.name if own is not None else local_address}"
    )


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
    server: OfferServer | None, leaders: SleepingCommunicator, world: World, timeout: float
) -> Agreement:
    """Let every node's leader try rank 0's offers. Collective over leaders.

    Raises UnreachableError on all leaders if no offer was reached by all of them; rank 0's holds
    the table. Raises ConfigurationError if rank 0 called `tell_no_offer` instead.
    """
    invitation = server.invitation if server is not None else None
    invitation = leaders.bcast(invitation)
    if invitation is None:
        raise ConfigurationError("rank 0 has no address to offer")
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
    # Whoever was reached by a long message keeps the address by which rank 0 was.
    return tuple(
        found if index in reached and found.local_address is None else each
        for index, each in enumerate(attempts)
        for found in [passed.get(index, UNTRIED)]
    )


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
