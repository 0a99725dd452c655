"""Latency, bandwidth and clocks between nodes, over plain TCP on the agreed interfaces.

That is what Gloo will use, and NCCL if it has nothing better. Every node's leader connects to
rank 0's node and to its neighbour in the ring of nodes. Bytes are sent for a fixed time, so that a
slow link takes no longer, and by every second node at a time: what a node sends would hold up its
answers to what it receives, and the wrong link would look slow.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpiddp.launch.mpi import mpi
from mpiddp.process.sockets.listener import ListeningThread, Serve

if TYPE_CHECKING:
    from mpi4py import MPI

CONNECT_SECONDS = 3.0
ROUNDS = 20
"""Messages there and back; the quickest counts."""
PING_SECONDS = 0.5
"""When to stop before all rounds are done."""
STREAM_SECONDS = 0.25
WARM_UP_SECONDS = 0.05
"""The first bytes fill buffers; they are not counted."""
CHUNK = 1 << 18
TRIALS = 3
"""How often the bytes are sent while a link looks slow: the best counts. Who was only busy
elsewhere is quicker the next time."""
SLOW_SHARE = 0.5
"""A link slower than this share of the job's median is slow."""
FAULTY_SHARE = 0.1
"""Beyond what other programs on the network do to a link."""
LEAST_TO_TELL = 2
"""Nodes: with as few, either end of a slow link may be to blame."""
LEAST_BANDWIDTH = 1e8
"""Bits per second. Below, the gradients of a small model already take seconds per step."""

ECHO, SINK = b"e", b"s"
STAMP = struct.Struct("!d")
"""An answer: the answering host's clock, seconds since 1970."""


@dataclass(frozen=True)
class Ping:
    """The quickest of some messages there and back."""

    seconds: float
    """There and back."""
    offset: float
    """The other host's clock minus this one's, seconds; wrong by at most half of ``seconds``."""


@dataclass(frozen=True)
class NodeLinks:
    """What one node's leader found about its links; compact, for rank 0."""

    hostname: str
    neighbour: str
    master: Ping | None
    """To rank 0's node; None on that node, and if it was not reached."""
    ring: Ping | None
    """To the neighbour."""
    received: float | None
    """Bits per second from the node before this one; None if nothing came."""
    problems: tuple[str, ...] = ()
    cross_checked: float | None = None
    """As ``received``, from the node before that one; measured only if a link is slow."""


class _Stream:
    """Counts what another node's leader sends."""

    def __init__(self, connection: socket.socket, buffer: memoryview) -> None:
        self._connection = connection
        self._buffer = buffer
        self._total = 0
        self._first = self._last = 0.0
        self._mark: tuple[float, int] | None = None
        """Time and bytes at the end of the warm-up."""

    def serve(self) -> int:
        with contextlib.suppress(BlockingIOError):
            length = self._connection.recv_into(self._buffer)
            self.count(length)
            return selectors.EVENT_READ if length else 0
        return selectors.EVENT_READ

    def count(self, length: int) -> None:
        now = time.monotonic()
        if not self._total:
            self._first = now
        elif self._mark is None and now - self._first >= WARM_UP_SECONDS:
            self._mark = (now, self._total + length)
        self._total += length
        self._last = now

    def rate(self) -> float | None:
        """Bits per second, None if too little came."""
        begin, before = self._mark or (self._first, 0)
        if self._last <= begin or self._total <= before:
            return None
        return 8 * (self._total - before) / (self._last - begin)


class LinkServer:
    """Answers pings and counts streams on ``address``, in one thread, for this job only."""

    def __init__(self, address: str, token: bytes) -> None:
        self.address = address
        self._socket = socket.create_server((address, 0), backlog=socket.SOMAXCONN)
        self.port: int = self._socket.getsockname()[1]
        self._streams: list[_Stream] = []
        self._buffer = memoryview(bytearray(CHUNK))
        self._thread = ListeningThread(
            [self._socket], {token + ECHO: self._echo, token + SINK: self._sink}
        )

    def close(self) -> None:
        self._thread.close()
        self._socket.close()

    def _echo(self, connection: socket.socket) -> Serve:
        def serve() -> int:
            with contextlib.suppress(BlockingIOError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not connection.recv_into(self._buffer):
                    return 0
                connection.send(STAMP.pack(time.time()))
            return selectors.EVENT_READ

        return serve

    def _sink(self, connection: socket.socket) -> Serve:
        self._streams.append(_Stream(connection, self._buffer))
        return self._streams[-1].serve

    def forget(self) -> None:
        """Drop the counts of earlier streams."""
        self._streams = []

    def rate(self) -> float | None:
        """Bits per second of the quickest stream that came; None if there was none."""
        rates = [each.rate() for each in self._streams]
        return max((rate for rate in rates if rate is not None), default=None)


def ping(address: str, port: int, token: bytes) -> Ping:
    """Exchange messages with another node's LinkServer. Raises OSError if it is not reached."""
    found: list[Ping] = []
    with _connect(address, port, token + ECHO) as connection, connection.makefile("rb") as answers:
        end = time.monotonic() + PING_SECONDS
        for _ in range(ROUNDS):
            begin, clock = time.monotonic(), time.time()
            connection.sendall(b"\0" * STAMP.size)
            stamp = answers.read(STAMP.size)
            if len(stamp) < STAMP.size:
                raise ConnectionResetError("closed by the other side")
            seconds = time.monotonic() - begin
            found.append(Ping(seconds, STAMP.unpack(stamp)[0] - (clock + seconds / 2)))
            if time.monotonic() > end:
                break
    return min(found, key=lambda each: each.seconds)


def stream(address: str, port: int, token: bytes) -> None:
    """Send to another node's LinkServer for STREAM_SECONDS, and drop what has not left by then."""
    chunk = bytes(CHUNK)
    with _connect(address, port, token + SINK) as connection:
        # Closing does not wait for what a slow link has not carried yet.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end = time.monotonic() + STREAM_SECONDS
        with contextlib.suppress(TimeoutError):
            while (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                connection.send(chunk)


def _connect(address: str, port: int, hello: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(hello)
    return connection


def find_neighbours(leaders: MPI.Intracomm, mine: Any, away: int = 1) -> Any:
    """What the node ``away`` places further in the ring says of itself as ``mine`` does of this
    one. Collective."""
    rank, size = leaders.Get_rank(), leaders.Get_size()
    return leaders.sendrecv(mine, dest=(rank - away) % size, source=(rank + away) % size)


def _stream_in_turns(
    leaders: MPI.Intracomm, target: tuple[str, int, bytes] | None
) -> OSError | None:
    """Send to ``target`` when it is this node's turn; returns what went wrong. Collective."""
    problem: OSError | None = None
    for senders in take_turns(leaders.Get_size()):
        mpi.wait(leaders.Ibarrier())
        if target is not None and leaders.Get_rank() in senders:
            try:
                stream(*target)
            except OSError as error:
                problem = error
    mpi.wait(leaders.Ibarrier())
    return problem


def find_limit(rates: Sequence[float]) -> float:
    """Bits per second below which a link is slow, beside the others or by any measure."""
    return max(LEAST_BANDWIDTH, SLOW_SHARE * statistics.median(rates))


def take_turns(size: int) -> list[range]:
    """Who sends at the same time: in no turn does a node of the ring both send and receive."""
    even = size - size % 2
    turns = [range(0, even, 2), range(1, even, 2)]
    return turns if size == even else [*turns, range(size - 1, size)]


def measure(leaders: MPI.Intracomm, server: LinkServer, hostname: str, token: bytes) -> NodeLinks:
    """Measure this node's links. Collective over the leaders of two or more nodes."""
    quietly = mpi.SleepingCommunicator(leaders)
    here = (hostname, server.address, server.port)
    neighbour, address, port = find_neighbours(leaders, here)
    problems: list[str] = []

    def note(host: str, address: str, error: OSError) -> None:
        problems.append(f"{hostname} → {host} ({address}): {error.strerror or 'timed out'}")

    def reach(host: str, address: str, port: int) -> Ping | None:
        try:
            return ping(address, port, token)
        except OSError as error:
            note(host, address, error)
            return None

    master_place = quietly.bcast(here)
    ring = reach(neighbour, address, port)
    master = reach(*master_place) if leaders.Get_rank() != 0 else None
    for _ in range(TRIALS):
        error = _stream_in_turns(leaders, (address, port, token) if ring is not None else None)
        if error is not None:
            note(neighbour, address, error)
        rates = quietly.gather(server.rate() or 0.0)
        is_slow = quietly.bcast(rates is not None and min(rates) < find_limit(rates))
        if not is_slow:
            break
    received, cross_checked = server.rate(), None
    if is_slow and leaders.Get_size() > LEAST_TO_TELL:
        # Both ends of a slow link are tried with others: that tells which of them is to blame.
        server.forget()
        _, address, port = find_neighbours(leaders, here, 2)
        _stream_in_turns(leaders, (address, port, token))
        cross_checked = server.rate() or 0.0
    return NodeLinks(
        hostname, neighbour, master, ring, received, tuple(dict.fromkeys(problems)), cross_checked
    )
