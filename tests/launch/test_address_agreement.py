"""From listening sockets to an agreed address, and to the store that serves on it."""

import contextlib
import functools
import itertools
import operator
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
import torch.distributed as distributed
from torch.distributed import TCPStore

import launchers
from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.mpi.world import World
from mpiddp.launch.network.interfaces import Candidate
from mpiddp.launch.rendezvous import address_agreement, store
from mpiddp.launch.rendezvous import offers as offers_module
from mpiddp.launch.rendezvous.offers import Attempt, Offer, OfferServer
from mpiddp.launch.rendezvous.store import Meeting
from mpiddp.process.sockets import listener

FIRST = Candidate("127.0.0.2", "eth0")
SECOND = Candidate("127.0.0.3", "ib0")
THIRD = Candidate("127.0.0.4", "ib1")
# The kernel connects to every loopback alias from the first one.
REACHED = Attempt("127.0.0.1")


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


MOST_BYTES = 50e6
"""That rank 0 may move for the agreement of 8,192 nodes."""
HUNG = 60.0
"""Seconds after which something is taken to hang, however busy the machine is."""


def try_offers(offers, token, seconds=HUNG, grace=HUNG):
    return offers_module.try_offers(offers, token, seconds=seconds, grace=grace)


@contextlib.contextmanager
def receive(*candidates):
    """An OfferServer that is closed at the end whatever the test did."""
    made = OfferServer(candidates)
    try:
        yield made
    finally:
        with contextlib.suppress(OSError):  # It was closed.
            made.hand_over(None)


@contextlib.contextmanager
def another_server(address: str, answer: bytes | None, *, hang_up: bool = True):
    """Somebody else's server: sends ``answer`` to whoever comes, or stays silent with None."""
    held = []
    with socket.create_server((address, 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if answer:
                        # What is unread when it closes would discard the answer.
                        connection.recv(1 << 10)
                        connection.sendall(answer)
                    if answer is None or not hang_up:
                        held.append(connection)
                    else:
                        connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Offer(Candidate(address, "docker0"), server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    for connection in held:
        connection.close()


def test_every_offer_is_reached_and_tells_this_ends_address():
    # 192.0.2.0/24 is reserved for documentation: no host has it.
    absent = Candidate("192.0.2.77", "eth5")
    with receive(FIRST, absent, SECOND) as host, receive(FIRST) as another:
        assert [offer.candidate for offer in host.offers] == [FIRST, SECOND]
        assert try_offers(host.offers, host.token) == (REACHED, REACHED)
        (attempt,) = try_offers(another.offers, host.token)
    assert attempt == Attempt(None, "another host answered") and len(host.token) == 16
    with pytest.raises(UnreachableError, match=r"192\.0\.2\.77 on eth5: "):
        OfferServer([absent])


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH_9.2p1\r\n", b"\0" * 32, b"short"], ids=repr
)
def test_another_server_is_not_mistaken_for_rank_0(answer):
    with another_server("127.0.0.5", answer) as offer:
        (attempt,) = try_offers([offer], b"t" * 16)
    assert attempt == Attempt(None, "another host answered")


def test_once_one_answers_the_silent_ones_get_the_grace_only():
    with receive(FIRST) as host, another_server("127.0.0.5", None) as silent:
        began = time.monotonic()
        # Nobody listens at port 1.
        offers = [silent, *host.offers, Offer(Candidate("127.0.0.6", "eth9"), 1)]
        attempts = try_offers(offers, host.token, seconds=2 * HUNG, grace=1.0)
        seconds = time.monotonic() - began
    silence, refusal = Attempt(None, "no answer"), Attempt(None, "Connection refused")
    assert attempts == (silence, REACHED, refusal) and seconds < HUNG


def test_an_address_by_which_long_messages_are_lost(monkeypatch):
    token = b"t" * 16
    answer = offers_module._derive(token, "rank 0")
    with another_server("127.0.0.5", answer, hang_up=False) as offer:
        offers = [Offer(Candidate("127.0.0.5", "eth0", 9000), offer.port)]
        monkeypatch.setattr(offers_module, "THREAD_SHARE", 0.08)
        (attempt,) = try_offers(offers, token)
    assert attempt == Attempt(None, "packets of 9000 bytes do not pass by lo")
    text = address_agreement.describe_failure(offers, [("node2", [attempt])], "node1")
    assert "(firewall?), with one MTU on all of it (ip link set INTERFACE mtu BYTES), or" in text
    assert text.splitlines()[2] == "  node2  packets of 9000 bytes do not pass by lo"


def test_strangers_neither_learn_nor_hold_up_anything(monkeypatch):
    monkeypatch.setattr(listener, "MOST_UNAUTHENTICATED", 8)
    monkeypatch.setattr(listener, "SPARED_SECONDS", 0.01)
    with receive(FIRST) as host, contextlib.ExitStack() as stack:
        said = (b"", b"", b"x", b"GET / HTTP/1.0\r\n\r\n", host.token, b"\0" * 100_000)
        strangers = []
        for number in range(60):
            stranger = socket.create_connection(("127.0.0.2", host.offers[0].port), 5)
            strangers.append(stack.enter_context(stranger))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said[number % len(said)])
        assert try_offers(host.offers, host.token) == (REACHED,)
        place = ("127.0.0.2", host.offers[0].port)
        rows = psutil.Process().net_connections("tcp")
        kept = [row for row in rows if row.laddr == place and row.status == "ESTABLISHED"]
        assert len(kept) <= listener.MOST_UNAUTHENTICATED
        # The last one may still wait, in silence.
        for stranger in strangers:
            stranger.settimeout(0.01)
            with contextlib.suppress(TimeoutError, ConnectionError):
                assert stranger.recv(100) == b""


def test_nothing_listens_afterwards():
    before = listening()
    with receive(FIRST, SECOND) as host:
        assert host.hand_over(None) is None
    assert listening() <= before
    # What it hands over: test_the_store_serves_on_the_socket_and_on_no_other.
    assert "mpiddp-listener" not in {thread.name for thread in threading.enumerate()}


class Leaders:
    """The leaders' communicator of one leader, which hears the other leaders' answers.

    Their attempts have ended where ``have_ended``.
    """

    def __init__(self, reached, rows=None, have_ended=True):
        self.answers = [[*row, have_ended] for row in reached]
        self.rows, self.rounds = rows, 0

    def bcast(self, value):
        return value

    def Allreduce(self, mine, everyone, op):  # noqa: N802
        self.rounds += 1
        everyone[:] = [min(column) for column in zip(mine, *self.answers, strict=True)]

    def gather(self, row):
        return None if self.rows is None else [row, *self.rows]


def make_world(node_rank=0, node_count=2):
    return SimpleNamespace(
        hostname=f"node{node_rank + 1}", node_rank=node_rank, node_count=node_count
    )


@pytest.fixture
def meet(monkeypatch):
    """``address_agreement.meet``, which needs MPI's constants, but no MPI."""
    import mpi4py

    monkeypatch.setattr(mpi4py.rc, "initialize", False)
    monkeypatch.setattr(address_agreement, "GRACE_SECONDS", HUNG)
    return address_agreement.meet


def test_a_node_that_is_alone_takes_its_first_offer():
    with receive(FIRST, SECOND) as host:
        agreement = address_agreement.meet(host, None, make_world(0, 1), HUNG)
    assert (agreement.common, agreement.local_addresses) == ((0,), (FIRST.address,))


def test_without_a_common_address_rank_0_has_the_table(meet):
    other = ("node2", (Attempt(None, "No route to host"),))
    with receive(FIRST) as host:
        leaders = Leaders([[False]], rows=[other], have_ended=False)
        with pytest.raises(UnreachableError) as caught:
            meet(host, leaders, make_world(), HUNG)
        # A lost packet gets a second, patient chance before that.
        assert leaders.rounds == 2
        leaders = Leaders([[False]], rows=[other])
        with pytest.raises(UnreachableError, match="node2  No route to host"):
            meet(host, leaders, make_world(), HUNG)
        assert leaders.rounds == 1
        with pytest.raises(UnreachableError, match="rank 0's table"):
            meet(host, Leaders([[False]]), make_world(), HUNG)
    assert caught.value.exit_code == 4
    assert "node2  No route to host" in str(caught.value)
    assert "node1  reached" in str(caught.value)


def test_without_an_offer_nobody_waits_for_one(meet):
    told = []
    address_agreement.tell_no_offer(SimpleNamespace(bcast=told.append))
    assert told == [None]
    others = SimpleNamespace(bcast=lambda _: told[0])
    with pytest.raises(ConfigurationError, match="rank 0 has no address to offer"):
        meet(None, others, make_world(1), 10)


@pytest.mark.parametrize(("world", "tries"), [(make_world(), 2), (make_world(17, 18), 6)])
def test_both_rounds_fit_into_the_phase(world, tries, meet, monkeypatch):
    rounds = []

    def fail(offers, token, *, seconds, grace, message_bytes=1):
        rounds.append(seconds)
        failure = Attempt(None, offers_module.NO_ANSWER)
        return (failure if message_bytes else REACHED,) * len(offers)

    monkeypatch.setattr(address_agreement, "try_offers", fail)
    leaders = Leaders([[False]], rows=[("node2", (Attempt(None, "timed out"),))])
    leaders.allgather = lambda _: [None, [("127.0.0.2", 1)]]
    with receive(FIRST) as host, pytest.raises(UnreachableError, match="no answer"):
        meet(host, leaders, world, 12)
    assert len(rounds) == tries and sum(rounds) < 12


class NodeThreads:
    """The leaders' communicators of threads that stand for nodes; counts rank 0's messages.

    A broadcast goes down a binomial tree, the others go around a ring.
    """

    def __init__(self, nodes):
        self._barrier = threading.Barrier(nodes, timeout=HUNG)
        self._values = [None] * nodes
        self.moved = []
        """Bytes of each message."""

    def of(self, rank):
        nodes, exchange = len(self._values), functools.partial(self._exchange, rank)
        return SimpleNamespace(
            bcast=lambda value: exchange(value, nodes.bit_length())[0],
            allgather=lambda value: exchange(value, 2 * nodes),
            Allreduce=lambda mine, everyone, op: operator.setitem(
                everyone, slice(None), numpy.min(exchange(mine, 2 * nodes), axis=0)
            ),
        )

    def _exchange(self, rank, value, messages):
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        if rank == 0:
            self.moved += [max(len(pickle.dumps(value)) for value in values)] * messages
        return values


def meet_in_threads(nodes, exchange):
    """What so many nodes agree on of two addresses, and the bytes of rank 0's messages.

    ``exchange(connection, message, length, end, number)``: number of rank 0's offer, None for
    another node's.
    """
    threads, moved = NodeThreads(nodes), []
    with receive(FIRST, SECOND) as host, pytest.MonkeyPatch.context() as patch:
        ports = {offer.port: number for number, offer in enumerate(host.offers)}

        def count(connection, message, length, end):
            number = ports.get(connection.getpeername()[1])
            received = exchange(connection, message, length, end, number)
            if number is not None:
                moved.extend([len(message), len(received)])
            return received

        def connect(place, seconds, connect=socket.create_connection):
            return connect(place, seconds, (place[0], 0))

        patch.setattr(offers_module, "_exchange", count)
        # Each node has an address on each network.
        patch.setattr(socket, "create_connection", connect)

        def lead(rank):
            server = host if rank == 0 else None
            return address_agreement.meet(server, threads.of(rank), make_world(rank, nodes), HUNG)

        with ThreadPoolExecutor(nodes) as pool:
            agreed = {each.common for each in pool.map(lead, range(nodes))}
    return agreed, moved + threads.moved


def exchange_really(connection, message, length, end, number, exchange=offers_module._exchange):
    return exchange(connection, message, length, end)


def test_what_rank_0_moves_grows_by_little_with_the_nodes(meet):
    found = {}
    for nodes in (2, 17, 18, 32, 64):
        agreed, found[nodes] = meet_in_threads(nodes, exchange_really)
        assert agreed == {(0, 1)}
    bytes_of_a_node = (sum(found[64]) - sum(found[32])) / 32
    assert sum(found[64]) + bytes_of_a_node * (8192 - 64) < MOST_BYTES
    assert len(found[64]) - len(found[32]) < 20 * 32


def lose(end):
    """What becomes of a message that nobody answers."""
    time.sleep(max(0.0, end - time.monotonic()))
    raise TimeoutError


def test_a_node_that_does_not_reach_a_nearer_one_turns_to_rank_0(meet):
    long_messages, waited = itertools.count(), []

    def exchange(connection, message, length, end, number):
        is_long = length == offers_module.MESSAGE_BYTES
        if is_long and number is None:
            waited.append(end - time.monotonic())
            lose(end)
        # Of the second address only the first 17 nodes' pass.
        if is_long and number == 1 and next(long_messages) > 16:
            raise TimeoutError
        return exchange_really(connection, message, length, end, number)

    assert meet_in_threads(20, exchange)[0] == {(0,)}
    assert next(long_messages) == 20
    assert len(waited) == 2 * 3 and max(waited) <= address_agreement.NEARER_SECONDS


def test_one_network_that_passes_long_messages_is_enough(meet, monkeypatch):
    """Those of the other are lost between distant nodes; nobody waits for rank 0's there."""
    monkeypatch.setattr(address_agreement, "GRACE_SECONDS", 0.1)
    tried = []

    def exchange(connection, message, length, end, number):
        if length == offers_module.MESSAGE_BYTES:
            if number is None and connection.getpeername()[0] == "127.0.0.3":
                lose(end)
            tried.append(number)
        return exchange_really(connection, message, length, end, number)

    assert meet_in_threads(20, exchange)[0] == {(0,)}
    assert tried.count(0) == tried.count(1) == 17


def test_a_node_that_cannot_listen_to_others_does_not_leave_them_waiting(meet, monkeypatch):
    made, before = [], listening()

    def refuse(servers, admit):
        made.append(servers)
        if len(made) > 1:
            raise RuntimeError("can't start new thread")
        return listener.ListeningThread(servers, admit)

    monkeypatch.setattr(offers_module, "ListeningThread", refuse)
    assert meet_in_threads(20, exchange_really)[0] == {(0, 1)}
    assert len(made) == 2 and listening() <= before


# The store

ALONE = World(0, 1, 0, 1, 0, 1, "node1", "node1")


def test_the_store_serves_on_the_socket_and_on_no_other():
    before = listening()
    with receive(FIRST, SECOND) as host:
        offer = host.offers[1]
        descriptor = host.hand_over(1)
    meeting = Meeting(offer.candidate.address, offer.port, "ib0", host.token.hex())
    server = store.make_store(meeting, ALONE, descriptor, 10, "secret")
    assert listening() - before == {("127.0.0.3", offer.port)}

    client = TCPStore("127.0.0.3", offer.port, is_master=False, timeout=timedelta(seconds=10))
    server.set("who", "server")
    # What ranks tell each other stands where nobody finds it by chance.
    assert client.get("mpiddp/secret/who") == b"server" and not client.check(["who"])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", offer.port), 5)
    del client, server
    assert listening() <= before


@pytest.mark.parametrize("chosen", [None, "0"])
def test_gloo_asks_at_once_unless_the_user_said_otherwise(monkeypatch, chosen):
    seen = []

    def init(*_, **__):
        seen.append(os.environ["GLOO_ENABLE_STORE_V2_API"])
        raise RuntimeError("as far as this test goes")

    launchers.set_variables(monkeypatch, {"GLOO_ENABLE_STORE_V2_API": chosen})
    monkeypatch.setattr(distributed, "init_process_group", init)
    memory = distributed.HashStore()
    with pytest.raises(RuntimeError, match="as far as"):
        store.make_group(memory, ALONE, "gloo", torch.device("cpu"), 10)
    assert seen == [chosen or "1"]
    assert os.environ.get("GLOO_ENABLE_STORE_V2_API") == chosen
