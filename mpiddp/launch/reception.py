"""Which address of rank 0 every node really reaches.

Bind, then publish: rank 0 opens one listening socket per candidate address on a port that the
kernel picks, and tells MPI. Every node's leader connects to all of them and has reached one when
it has read back this job's token, since any host may own a 172.17.0.1. The winner's socket is
handed on as it is; no port is ever closed and hoped for.
"""

from __future__ import annotations

import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.network import Candidate

if TYPE_CHECKING:
    from mpiddp.launch.mpi import SleepingCommunicator

TOKEN_BYTES = 16
REACH_SECONDS = 15.0
"""How long a node tries to reach rank 0 when no candidate answers."""
GRACE_SECONDS = 0.25
"""How much longer it waits for the other candidates once one has answered."""


@dataclass(frozen=True)
class Offer:
    """One listening socket of rank 0, as the other nodes learn of it."""

    candidate: Candidate
    port: int


@dataclass(frozen=True)
class Attempt:
    """What came of trying one offer from one node."""

    local_address: str | None
    """This node's end of the connection; None if the offer was not reached."""
    problem: str = ""


@dataclass(frozen=True)
class Agreement:
    """What the leaders of all nodes found."""

    offers: tuple[Offer, ...]
    common: tuple[int, ...]
    """Indices of the offers that every node reached, in rank 0's order of preference."""
    local_addresses: tuple[str, ...]
    """This node's ends of the connections to the common offers."""
    token: bytes


class Reception:
    """Rank 0's listening sockets, and the thread that answers them with the job's token."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._listeners: list[tuple[Candidate, socket.socket]] = []
        problems = []
        for candidate in candidates:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                listener.bind((candidate.address, 0))
                listener.listen(socket.SOMAXCONN)
                listener.setblocking(False)
            except OSError as error:
                listener.close()
                problems.append(f"{candidate.address} on {candidate.interface}: {error}")
                continue
            self._listeners.append((candidate, listener))
        if not self._listeners:
            raise UnreachableError("no address can be listened on: " + "; ".join(problems))
        self._wake, self._alarm = socket.socketpair()
        self._thread = threading.Thread(target=self._answer, name="mpiddp-reception", daemon=True)
        self._thread.start()

    @property
    def offers(self) -> tuple[Offer, ...]:
        return tuple(Offer(c, listener.getsockname()[1]) for c, listener in self._listeners)

    def agree_alone(self) -> Agreement:
        """The agreement of a process that has nobody to agree with: the first offer."""
        offers = self.offers
        return Agreement(offers, (0,), (offers[0].candidate.address,), self.token)

    def hand_over(self, index: int | None) -> int | None:
        """Stop answering and close all sockets but one, whose descriptor is returned.

        The caller owns the descriptor.
        """
        self._alarm.send(b"x")
        self._thread.join()
        self._wake.close()
        self._alarm.close()
        descriptor = None
        for position, (_, listener) in enumerate(self._listeners):
            if position == index:
                descriptor = listener.detach()
            else:
                listener.close()
        return descriptor

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for _, listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake:
                        return
                    _greet(key.fileobj, self.token)


def _greet(listener: Any, token: bytes) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:
        return  # The caller went away between the event and the accept.
    with connection:
        try:
            connection.sendall(token)
        except OSError:
            return  # Its leader reports the address as not reached.


def try_offers(
    offers: Sequence[Offer], token: bytes, *, seconds: float, grace: float
) -> tuple[Attempt, ...]:
    """Connect to every offer at once; an attempt succeeds when ``token`` was read back.

    Returns one Attempt per offer, after all have ended, or ``grace`` seconds after the first
    success, or after ``seconds``.
    """
    answers: queue.SimpleQueue[tuple[int, Attempt]] = queue.SimpleQueue()
    for index, offer in enumerate(offers):
        threading.Thread(
            target=lambda i=index, o=offer: answers.put((i, _try_offer(o, token, seconds))),
            name=f"mpiddp-reach-{offer.candidate.address}",
            daemon=True,
        ).start()
    attempts = [Attempt(None, "no answer")] * len(offers)
    end = time.monotonic() + seconds
    for _ in offers:
        try:
            index, attempt = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        attempts[index] = attempt
        if attempt.local_address is not None:
            end = min(end, time.monotonic() + grace)
    return tuple(attempts)


def _try_offer(offer: Offer, token: bytes, seconds: float) -> Attempt:
    try:
        with socket.create_connection((offer.candidate.address, offer.port), seconds) as connection:
            local_address: str = connection.getsockname()[0]
            received = b""
            while len(received) < TOKEN_BYTES:
                piece = connection.recv(TOKEN_BYTES - len(received))
                if not piece:
                    break
                received += piece
    except OSError as error:
        return Attempt(None, error.strerror or "timed out")
    if received != token:
        return Attempt(None, "another host answered")
    return Attempt(local_address)


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
    return (
        f"no address of rank 0 on {master} was reached by every node. Open a path between the "
        "nodes (firewall?), or name the interface that has one: --interface NAME\n  "
        + "\n  ".join(lines)
    )


def meet(
    reception: Reception | None, leaders: SleepingCommunicator, hostname: str, timeout: float
) -> Agreement:
    """Let every node's leader try rank 0's offers. Collective over leaders.

    Raises UnreachableError on all leaders if no offer was reached by all of them; rank 0's holds
    the table. Raises ConfigurationError if rank 0 called `tell_no_offer` instead.
    """
    published = (reception.offers, reception.token) if reception is not None else None
    published = leaders.bcast(published)
    if published is None:
        raise ConfigurationError("rank 0 has no address to offer")
    offers, token = published
    # Two rounds must fit into the phase, or its deadline would come before the table.
    seconds = min(timeout / 3, REACH_SECONDS)
    # A second, patient round only where haste found nothing: a lost SYN is repeated after 1 s.
    for grace in (GRACE_SECONDS, seconds):
        attempts = try_offers(offers, token, seconds=seconds, grace=grace)
        common = _find_common(attempts, leaders)
        if common:
            local = (attempts[index].local_address for index in common)
            return Agreement(offers, common, tuple(a for a in local if a is not None), token)
    rows = leaders.gather((hostname, attempts))
    if rows is not None:
        raise UnreachableError(describe_failure(offers, rows, hostname))
    raise UnreachableError("this node's part of the addresses of rank 0 is in rank 0's table")


def tell_no_offer(leaders: SleepingCommunicator) -> None:
    """Rank 0's part of `meet` where it has no Reception: the other leaders wait for none."""
    leaders.bcast(None)


def _find_common(attempts: Sequence[Attempt], leaders: SleepingCommunicator) -> tuple[int, ...]:
    """Indices of the attempts that succeeded on every node."""
    import numpy
    from mpi4py import MPI

    mine = numpy.array([a.local_address is not None for a in attempts], dtype=numpy.uint8)
    everyone = numpy.empty_like(mine)
    leaders.Allreduce(mine, everyone, op=MPI.MIN)
    return tuple(int(index) for index in numpy.flatnonzero(everyone))
