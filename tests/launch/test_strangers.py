"""A stranger at each listener: who connects without the job's token keeps nobody out.

A thousand of them during start-up have no effect.

Another user where the tests are root's, else another process of the same one.
"""

import contextlib
import itertools
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

import launchers
from benchmarks.measure.launching import json_lines, worker_loop
from benchmarks.measure.launching.processes import MARK
from mpiddp.doctor.network import node_links
from mpiddp.launch.network.interfaces import Candidate
from mpiddp.launch.rendezvous.offers import Attempt, OfferServer, try_offers
from mpiddp.process.sockets import links, ports
from mpiddp.process.sockets import listener as listener_module
from mpiddp.process.sockets.listener import TokenListener
from mpiddp.remote import channel
from mpiddp.remote.job import ROLES, _RankListener

HOST = "127.0.0.2"
HUNG = 30.0
"""Seconds for what takes milliseconds, however busy the machine is; strangers stay for longer."""
PORTS = ports.PortRange(21000, 21999)

STRANGER = """
import contextlib, os, resource, socket, sys, time
what, places = sys.argv[1], [each.rpartition(":") for each in sys.argv[2:]]
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
connections = []
FLOODS = {
    "idle": [b""],
    # Beside garbage, halves of ours, and of torch's first message.
    "mixed": [b"", bytes(range(255, 155, -1)), b"GET / HTTP/1.1\\r\\n\\r\\n", b"0" * 16,
              b"\\0\\xce\\xf7", b"x"],
}

def say(data):
    for host, _, port in places:
        # After the change of user nothing more can be imported, as getaddrinfo would.
        connection = socket.socket()
        connection.settimeout(5)
        connections.append(connection)
        connection.connect((host, int(port)))
        with contextlib.suppress(OSError):
            connection.sendall(data)

if what in FLOODS:
    for number in range(1000):
        with contextlib.suppress(OSError):
            say(FLOODS[what][number % len(FLOODS[what])])
elif what == "slow":
    for _ in range(8):
        say(b"x")
else:
    say({
        "wrong": b"0" * 32 + b"\\n",
        "garbage": bytes(range(256)) * 64 + b"\\n",
        "not ASCII": '{"token": "\\xe9\\u20ac"}\\n'.encode(),
        "surrogate": b'{"token": "\\\\ud800"}\\n',
        "nested": b"[" * 200_000 + b"\\n",
        "endless": b"a" * 20_000_000,
    }[what])
print("here", flush=True)
while what in ("slow", "mixed"):
    time.sleep(0.05)
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(b"x")
sys.stdin.read()
"""
WAYS = ("wrong", "garbage", "not ASCII", "surrogate", "nested", "endless", "slow", "idle")


@contextlib.contextmanager
def stranger(what: str, *places: tuple[str, int]) -> Iterator[None]:
    """Somebody who has connected to each of ``places``, in this way, and stays."""
    words = [f"{host}:{port}" for host, port in places]
    command = [sys.executable, "-I", "-S", "-c", STRANGER, what, *words]
    with launchers.begin(*command) as (_, line):
        assert line == "here"
        yield


@dataclass(frozen=True)
class Listener:
    """What strangers connect to, and what those who belong there do."""

    port: int
    use: Callable[[], object]
    """Returns once those who belong there have been served."""


@contextlib.contextmanager
def offers() -> Iterator[Listener]:
    """The address agreement's."""
    host = OfferServer([Candidate(HOST, "lo")])

    def use() -> None:
        found = try_offers(host.offers, host.token, seconds=HUNG, grace=0.1)
        assert found == (Attempt("127.0.0.1"),)

    try:
        yield Listener(host.offers[0].port, use)
    finally:
        host.hand_over(None)


@contextlib.contextmanager
def benchmark() -> Iterator[Listener]:
    """Rank 0's of a benchmark, and the command's own: both wait in `lines.accept`."""
    token = "ab" * 16
    with json_lines.listen(HOST) as server, ThreadPoolExecutor(1) as pool:
        port = json_lines.get_port(server)
        waiting = pool.submit(json_lines.accept, server, token, 2, HUNG)

        def use() -> None:
            theirs = [json_lines.connect([f"{HOST}:{port}"], token, each, HUNG) for each in (1, 2)]
            found = waiting.result(HUNG)
            assert sorted(greeting for _, greeting in found) == [1, 2]
            for each in (*theirs, *(line for line, _ in found)):
                each.close()

        yield Listener(port, use)


@contextlib.contextmanager
def doctor() -> Iterator[Listener]:
    """The doctor's, for messages between nodes."""
    token = bytes(16)
    counter = node_links.LinkServer(HOST, token)
    try:
        yield Listener(counter.port, lambda: node_links.ping(HOST, counter.port, token))
    finally:
        counter.close()


@contextlib.contextmanager
def repeated(step: Callable[[], object]) -> Iterator[None]:
    """Meanwhile a thread does ``step`` again and again."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            step()

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield
        finally:
            ended.set()
            working.result()


@contextlib.contextmanager
def lifeline() -> Iterator[Listener]:
    """A companion process's."""
    token = "ab" * 16
    with selectors.DefaultSelector() as selector, ports.listen(HOST) as server:

        def welcome(caller: socket.socket) -> None:
            links.Link(caller).send("welcome")
            caller.close()

        admit = {links.encode_token(token): welcome}
        listener = TokenListener([server], selector, admit)

        def serve() -> None:
            for key, events in selector.select(0.01):
                key.data(events)
            listener.refresh(time.monotonic())

        def use() -> None:
            place = links.describe_server(server)
            link = links.connect(place, token, HUNG)
            assert link.wait(HUNG) and link.receive() == [("welcome", None)]
            link.close()

        with repeated(serve), contextlib.closing(listener):
            yield Listener(server.getsockname()[1], use)


@contextlib.contextmanager
def rank_listener() -> Iterator[Listener]:
    """That of a process which calls `mpiddp.ranks`, until its ranks are there."""
    with contextlib.ExitStack() as stack:
        server = ports.listen(HOST)
        receiving = _RankListener([server], stack)

        def use() -> None:
            for role in ROLES:
                with channel.connect(receiving.address) as connection:
                    row = {"rank": 0, "size": 1, "role": role}
                    channel.Channel(connection).send("hello", row)
            launchers.until(lambda: receiving.is_complete, "the rank", HUNG)

        stack.enter_context(repeated(lambda: receiving.wait(0.01)))
        yield Listener(server.getsockname()[1], use)


# Only the benchmark's reads more than some bytes: at the others, most strangers are alike.
CASES = [(benchmark, what) for what in WAYS]
CASES += itertools.product((offers, doctor, lifeline, rank_listener), ("garbage", "slow", "idle"))


@pytest.mark.parametrize(
    ("listener", "what"), CASES, ids=[f"{each.__name__}-{what}" for each, what in CASES]
)
def test_a_stranger_keeps_nobody_out(listener, what, monkeypatch):
    monkeypatch.setattr(listener_module, "GREETING_SECONDS", 10 * HUNG)
    with listener() as listening:
        before = len(os.listdir("/proc/self/fd"))
        with stranger(what, (HOST, listening.port)):
            # Far below the limit of 1,024 that most users have.
            assert len(os.listdir("/proc/self/fd")) - before < 300
            listening.use()


def test_a_stranger_who_stays_silent_is_shown_out(monkeypatch):
    monkeypatch.setattr(listener_module, "GREETING_SECONDS", 0.2)
    with json_lines.listen(HOST) as server, ThreadPoolExecutor(1) as pool:
        place = (HOST, json_lines.get_port(server))
        waiting = pool.submit(json_lines.accept, server, "secret", 1, 10 * HUNG)
        with socket.create_connection(place, HUNG) as silent:
            silent.sendall(b"s")
            assert silent.recv(1) == b""
        with contextlib.closing(json_lines.connect(["{}:{}".format(*place)], "secret", 1, HUNG)):
            ((line, _),) = waiting.result(HUNG)
            line.close()
        with pytest.raises(TimeoutError, match="0 of 1 connected"):
            json_lines.accept(server, "secret", 1, 0.0)


def test_only_a_lifeline_of_the_same_user_with_the_token_is_admitted(monkeypatch):
    admitted: list[socket.socket] = []
    with selectors.DefaultSelector() as selector, links.listen_locally() as server:
        place = links.describe_server(server)
        listener = TokenListener([server], selector, {b"secret\n": admitted.append})
        user = os.geteuid()
        for each, token in ((user + 1, "secret"), (user, "secreT"), (user, "secret")):
            monkeypatch.setattr(os, "geteuid", lambda each=each: each)
            link = links.connect(place, token, HUNG)
            for _ in range(2):
                for key, events in selector.select(0.1):
                    key.data(events)
            assert bool(admitted) is ((each, token) == (user, "secret"))
            link.close()
        for caller in admitted:
            caller.close()
        listener.close()


def test_a_line_has_one_deadline_and_a_limit(monkeypatch):
    ours, theirs = map(json_lines.JsonLine, socket.socketpair())
    with ThreadPoolExecutor(1) as pool:
        ended, end = threading.Event(), time.monotonic() + 30

        def drip() -> None:
            while not ended.wait(0.05) and time.monotonic() < end:
                theirs._connection.sendall(b"1")

        dripping = pool.submit(drip)
        with pytest.raises(TimeoutError):
            ours.receive(0.2)
        assert time.monotonic() < end
        ended.set()
        dripping.result()
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 100)
    theirs._connection.sendall(b"1" * 200)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        ours.receive(HUNG)
    for line in (ours, theirs):
        line.close()


@pytest.mark.by_default("openmpi")
def test_a_flood_during_start_up_has_no_effect(either_launcher, tmp_path):
    """They connect to all that the job listens on in two phases of its start-up, until its end."""
    program = [launchers.PROGRAMS / "flooded.py", tmp_path, PORTS]
    not_ours: set[tuple[str, int]] = set()
    with launchers.start(either_launcher, 2, program) as job, contextlib.ExitStack() as strangers:
        # MPI's own; the address agreement, on whose socket the store serves later; the store, and
        # the companion process of rank 0.
        for phase, listeners in (("mpi", 0), ("address", 1), ("lifeline", 2)):
            job.until((tmp_path / f"{phase}.held.0").exists, f"rank 0 to hold in {phase}")
            places = job.places() - not_ours
            if phase == "mpi":
                not_ours = places
            else:
                assert len(places) == listeners
                assert all(PORTS.low <= port <= PORTS.high for _, port in places)
                strangers.enter_context(stranger("mixed", *places))
            (tmp_path / f"{phase}.go").touch()
        result = job.wait().expect(0)
    assert "Traceback" not in result.stderr


class Member:
    """Rank 0 of two."""

    rank, size = 0, 2
    port = 0

    def broadcast(self, value: int) -> int:
        self.port = value
        return value

    def greet(self) -> dict[str, int]:
        return {}


def can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), HUNG).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("master", "everywhere"), [("127.0.0.1", False), ("localhost", False), ("some-name", True)]
)
def test_ranks_of_one_machine_listen_on_loopback_only(monkeypatch, master, everywhere):
    # A name that is no address may mean loopback on its own host, where nobody else could come.
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv(MARK, "secret")
    member = Member()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(worker_loop.join_lines(member, []).__enter__)
        launchers.until(lambda: member.port, "rank 0 to listen")
        assert can_connect("127.0.0.1", member.port)
        assert can_connect("127.0.0.2", member.port) is everywhere
        # Rank 1 comes, and then there is no benchmark to connect to.
        json_lines.connect([f"127.0.0.1:{member.port}"], "secret", 1, HUNG).close()
        with pytest.raises(ConnectionError, match="no address"):
            joining.result()
