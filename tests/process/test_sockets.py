"""Listening sockets: callers who know a token, what strangers can do, and ports of a range."""

import contextlib
import itertools
import os
import queue
import random
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.launch.network.interfaces import Candidate
from mpiddp.launch.rendezvous.offers import OfferServer
from mpiddp.process.sockets import links, listener, ports
from mpiddp.process.sockets.event_loop import EventLoop
from mpiddp.process.sockets.links import Link, describe_server, listen_locally, open_connection
from mpiddp.process.sockets.listener import ListeningThread, TokenListener
from mpiddp.process.sockets.ports import PortRange

TOKEN, OTHER = b"0123456789abcdef", b"fedcba9876543210"
SOON = 60.0
"""Seconds: whatever takes longer hangs."""


class Server:
    """A ListeningThread, and the callers that it has admitted."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
        self.admitted: queue.SimpleQueue[tuple[bytes, socket.socket]] = queue.SimpleQueue()
        admit = {
            token: lambda caller, token=token: self.admitted.put((token, caller))
            for token in (TOKEN, OTHER)
        }
        self._thread = ListeningThread([self.socket], admit)
        self.listener = self._thread._listener

    def connect(self) -> socket.socket:
        return socket.create_connection(self.socket.getsockname(), SOON)

    def take(self) -> tuple[bytes, bytes]:
        """The token of the next caller that is admitted, and what else it has sent."""
        token, caller = self.admitted.get(timeout=SOON)
        with caller:
            caller.settimeout(SOON)
            return token, caller.recv(100)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()
        self.socket.close()


@settings(max_examples=20)
@given(st.sampled_from([TOKEN, OTHER]), st.lists(st.integers(0, 16), max_size=3))
def test_a_token_may_come_in_pieces_and_nothing_after_it_is_read(token, cuts):
    with Server() as server, server.connect() as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin, end in itertools.pairwise([0, *sorted(cuts), 16]):
            caller.sendall(token[begin:end])
        caller.sendall(b"after")
        assert server.take() == (token, b"after")


@settings(max_examples=20)
@given(st.binary(min_size=16, max_size=40).filter(lambda said: said[:16] not in (TOKEN, OTHER)))
def test_any_other_bytes_close_the_connection(said):
    with Server() as server, server.connect() as caller:
        caller.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""
        assert server.admitted.empty()


def test_a_byte_now_and_then_does_not_extend_the_deadline():
    with selectors.DefaultSelector() as selector, listen_locally() as server:
        made = TokenListener([server], selector, {TOKEN: lambda _: None})
        with open_connection(describe_server(server), SOON) as caller:
            due = []
            # A 16th byte would end it as well.
            for byte in TOKEN[:15]:
                caller.sendall(bytes([byte]))
                for key, events in selector.select(SOON):
                    key.data(events)
                due.append(made.find_time())
            assert set(due) == {due[0]}
            made.refresh(due[0])
            assert caller.recv(1) == b""
        made.close()


def test_whom_it_serves_it_leaves_when_it_is_closed():
    with listen_locally() as server:
        events = [selectors.EVENT_READ, selectors.EVENT_WRITE]  # The last one is waited for first.
        thread = ListeningThread([server], {TOKEN: lambda _: events.pop})
        with open_connection(describe_server(server), SOON) as caller:
            caller.sendall(TOKEN)
            is_served = wait_until(lambda: not events, SOON)
            thread.close()
            assert is_served and caller.recv(1) == b""


def test_a_token_on_its_way_is_waited_for_while_others_connect(monkeypatch):
    def connect_strangers(stack: contextlib.ExitStack, server: Server) -> None:
        for _ in range(20):
            stack.enter_context(server.connect())

    monkeypatch.setattr(listener, "MOST_UNAUTHENTICATED", 4)
    with monkeypatch.context() as patch, Server() as server, contextlib.ExitStack() as stack:
        patch.setattr(listener, "SPARED_SECONDS", SOON)
        caller = stack.enter_context(server.connect())
        connect_strangers(stack, server)
        assert wait_until(lambda: server.listener._paused_until < listener.NEVER, SOON)
        caller.sendall(TOKEN + b"x")
        assert server.take() == (TOKEN, b"x")
    # The queue of strangers is worked off, four at a time.
    with Server() as server, contextlib.ExitStack() as stack:
        connect_strangers(stack, server)
        caller = stack.enter_context(server.connect())
        caller.sendall(OTHER + b"y")
        assert server.take() == (OTHER, b"y")


@pytest.fixture
def few_files():
    """20 more files than are open now may be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_without_free_descriptors_callers_wait_without_work(few_files, monkeypatch):
    attempts = []
    accept = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", lambda own: attempts.append(1) or accept(own))
    with Server() as server, socket.socket() as waiting:
        # Strangers get a part of them.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert server.listener._most == files // listener.FILES_SHARE
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(waiting.fileno()))
        waiting.connect(server.socket.getsockname())
        waiting.sendall(TOKEN + b"z")
        began = time.monotonic()
        assert wait_until(lambda: attempts, SOON)
        time.sleep(1)
        count, has_admitted = len(attempts), not server.admitted.empty()
        most = (time.monotonic() - began) / listener.SPARED_SECONDS + 1
        for descriptor in held:
            os.close(descriptor)
        assert 1 <= count <= most and not has_admitted
        assert server.take() == (TOKEN, b"z")


# Messages


def test_messages_come_whole_and_what_is_none_is_an_error(monkeypatch):
    line = b'["kind", [1, "two"]]\n'
    monkeypatch.setattr(links, "LONGEST_LINE", len(line))
    own, its = socket.socketpair()
    with own, its:
        link = Link(own)
        assert link.receive() == [] and not link.wait(0)
        for piece, messages in ((line[:5], []), (line[5:], [("kind", [1, "two"])])):
            its.sendall(piece)
            assert link.wait(float("inf")) and link.receive() == messages
        # What the other end does not take yet is sent later.
        link.send("much", "x" * 10**7)
        assert link.has_unsent
        received = 0
        while link.has_unsent:
            received += len(its.recv(1 << 20))
            link.flush()
        while not its.recv(1 << 20).endswith(b"\n"):
            pass
        assert 0 < received < 10**7 + 20
        loop, lost = EventLoop(), []
        loop.add(link, pytest.fail, lost.append)
        its.close()
        loop.wait(time.monotonic() + SOON, pytest.fail)
        assert lost == ["the other end has gone"] and not loop.selector.get_map()
    for said, problem in (
        (line[:-1] + b" \n", f"a line of more than {len(line)} bytes"),
        (b"1\n", "no message"),
        (b"[1]\n", "not enough values"),
        (b"[1, 2, 3]\n", "too many values"),
        (b"{\n", "Expecting property name"),
    ):
        own, its = socket.socketpair()
        with own, its:
            its.sendall(said)
            with pytest.raises(ValueError, match=problem):
                Link(own).receive()


# Ports of a range: which are taken, and what is said when none is free

HOST = "127.0.0.1"
RANGE = PortRange(24000, 24999)


@contextlib.contextmanager
def hold_two() -> Iterator[tuple[PortRange, list[socket.socket]]]:
    """Two neighbouring ports, and what listens on them."""
    for _ in range(100):
        low = random.randrange(25000, 31000)
        with contextlib.ExitStack() as stack:
            try:
                held = [socket.create_server((HOST, port)) for port in (low, low + 1)]
            except OSError:
                continue
            for each in held:
                stack.enter_context(each)
            yield PortRange(low, low + 1), held
            return
    raise AssertionError("no two neighbouring ports are free")


@given(first=st.integers(1, 60000), size=st.integers(2, 500))
def test_every_port_is_tried_once_and_jobs_begin_at_different_ones(first, size):
    # 20 random starts among 1,000 ports: all alike once in 10**57 runs.
    assert len({next(RANGE.order()) for _ in range(20)}) > 1
    assert sorted(PortRange(first, first + size - 1).order()) == list(range(first, first + size))


def test_what_is_no_range():
    for text in ("", "5-", "-5", "5-5", "6-5", "0-5", "5-65536", "1-2-3", " 1-2", "1-2\n", "١-٢"):
        with pytest.raises(ConfigurationError, match=r"^port_range: expected LOW-HIGH") as caught:
            ports.parse_option(text)
        assert str(caught.value).endswith(f"found {text!r}")


def test_the_option_comes_before_the_variable():
    assert str(ports.parse_option("1-65535")) == "1-65535"
    variables = {"MPIDDP_PORT_RANGE": "7-9"}
    for nothing in ({}, {"MPIDDP_PORT_RANGE": ""}):
        assert ports.find_range("auto", nothing) is None
    assert ports.find_range("auto", variables) == PortRange(7, 9)
    assert ports.find_range("1-5", variables) == PortRange(1, 5)
    with pytest.raises(ConfigurationError, match=r"^MPIDDP_PORT_RANGE: expected LOW-HIGH"):
        ports.find_range("auto", {"MPIDDP_PORT_RANGE": "9-7"})


def test_ports_in_use_are_passed_over():
    with hold_two() as (pair, held):
        with pytest.raises(OSError, match=f"no port of --port-range {pair} is free"):
            ports.listen(HOST, pair)
        held[1].close()
        with ports.listen(HOST, pair) as server:
            assert server.getsockname() == (HOST, pair.high)
            # It listens, and with its other port in use too the range is used up.
            socket.create_connection((HOST, pair.high), 5).close()
            with pytest.raises(OSError, match="is free"):
                ports.listen(HOST, pair)


def test_a_port_of_a_job_that_has_ended_is_free():
    with hold_two() as (pair, held):
        with socket.create_connection((HOST, pair.low), 5) as caller:
            accepted, _ = held[0].accept()
            held[0].close()
            # This end closes first, and stays in TIME_WAIT for a minute.
            accepted.close()
            assert caller.recv(1) == b""
        with ports.listen(HOST, pair) as again:
            assert again.getsockname()[1] == pair.low


def test_a_reserved_port_is_for_who_asks_for_it():
    with hold_two() as (pair, held):
        held[0].close()
        with ports.reserve(HOST, pair) as holder:
            assert holder.getsockname() == (HOST, pair.low)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, pair.low), 5)
            with socket.create_server(("", pair.low)), pytest.raises(OSError, match="is free"):
                ports.reserve(HOST, pair)
    with ports.reserve(HOST) as holder, ports.reserve(HOST) as other:
        assert 0 != holder.getsockname()[1] != other.getsockname()[1]


def test_offers_are_in_the_range():
    with pytest.raises(OSError, match="Cannot assign requested address"):
        ports.listen("192.0.2.1", RANGE)
    addresses = ("127.0.0.2", "127.0.0.3")
    server = OfferServer([Candidate(each, "lo") for each in addresses], RANGE)
    try:
        assert all(RANGE.low <= offer.port <= RANGE.high for offer in server.offers)
        assert [offer.candidate.address for offer in server.offers] == [*addresses]
    finally:
        server.hand_over(None)
    with hold_two() as (pair, _), pytest.raises(UnreachableError) as caught:
        OfferServer([Candidate(HOST, "lo")], pair)
    assert str(caught.value) == (
        f"no address can be listened on: {HOST} on lo: no port of --port-range {pair} is free; "
        "give a larger range"
    )
