"""Listening sockets that a node offers, and attempts to reach another node's.

An attempt succeeds when the other node has answered (any host may own a 172.17.0.1), and a message
of 64 KiB has passed each way: if a switch or a tunnel drops large packets, short messages pass, and
the first gradients do not. What both say is derived from the job's token, which goes over MPI
alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mpiddp.errors import UnreachableError
from mpiddp.launch.network.interfaces import Candidate, find_interface, list_interfaces
from mpiddp.process.background import BackgroundCalls
from mpiddp.process.sockets.listener import ListeningThread, Serve
from mpiddp.process.sockets.ports import PortRange, listen

TOKEN_BYTES = 16
MESSAGE_BYTES = 1 << 16
"""More than one packet of any interface: InfiniBand's take up to 65,520 bytes."""
NO_ANSWER = "no answer"
"""The problem of an attempt that was not waited for until its end."""
LOST = "packets"
"""How the problem of an attempt begins whose long message was lost."""
THREAD_SHARE = 0.9
"""Share of the time after which an attempt gives up by itself, to say what it had come to."""


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
