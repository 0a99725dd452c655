"""Listening sockets for callers who know a token: who is admitted, and what strangers can do."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import resource
import selectors
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.process.sockets import listener
from mpiddp.process.sockets.links import describe_server, listen_locally, open_connection
from mpiddp.process.sockets.listener import ListeningThread, TokenListener

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

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()
        self.socket.close()


@settings(max_examples=20)
@given(st.sampled_from([TOKEN, OTHER]), st.lists(st.integers(0, 16), max_size=3))
def test_a_token_may_come_in_pieces_and_nothing_after_it_is_read(token, cuts):
    with Server() as server, server.connect() as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bounds = [0, *sorted(cuts), 16]
        for begin, end in itertools.pairwise(bounds):
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
