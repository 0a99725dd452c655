"""Messages between caller and rank, what ranks print, and who may connect."""

import contextlib
import io
import itertools
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import called
from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.process.sockets import ports
from mpiddp.process.sockets.links import describe_server, listen_locally, open_connection
from mpiddp.remote import channel, pickling, rank
from mpiddp.remote.channel import MARK, SHARED_BYTES, Address, Channel, Parcel, make_mark
from mpiddp.remote.job import ROLES, RankJob, _RankListener
from mpiddp.remote.rank_output import OutputReader, write

SOON = 60.0
SIZES = st.integers(0, 300) | st.integers(SHARED_BYTES - 70, SHARED_BYTES + 70)


@contextlib.contextmanager
def connect(kind: str) -> Iterator[tuple[Channel, Channel]]:
    if kind == "local":
        ours, theirs = socket.socketpair()
    else:
        with ports.listen("127.0.0.1") as server:
            theirs = socket.create_connection(server.getsockname(), SOON)
            ours, _ = server.accept()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


def make_parcel(body: bytes, sizes: list[int]) -> Parcel:
    contents = [np.arange(size, dtype=np.uint8) for size in sizes]
    return Parcel(body, tuple(memoryview(each) for each in contents))


@pytest.mark.parametrize("kind", ["local", "network"])
@settings(max_examples=40)
@given(
    messages=st.lists(
        st.tuples(st.text(max_size=9), SIZES, st.lists(SIZES, max_size=4), st.booleans()),
        max_size=4,
    )
)
def test_messages_of_any_size_come_in_order(kind, messages):
    with connect(kind) as (sender, receiver), ThreadPoolExecutor(1) as pool:

        def send() -> None:
            for text, size, sizes, is_kept in messages:
                with contextlib.closing(make_parcel(bytes(size), sizes)) as parcel:
                    if is_kept:
                        parcel.keep()
                    sender.send(text, [text], parcel)
            sender.send("end")

        sending = pool.submit(send)
        for text, size, sizes, _ in messages:
            found = receiver.receive()
            assert (found.kind, found.content) == (text, [text])
            assert found.body == bytes(size)
            assert [each.nbytes for each in found.buffers] == sizes
            for each in found.buffers:
                assert bytes(each) == bytes(np.arange(each.nbytes, dtype=np.uint8))
        assert receiver.receive() == channel.Message("end")
        sending.result()
        # Cells of a notebook, or the sizes of many buffers.
        sending = pool.submit(sender.send, "call", content := "x" * (2 << 20))
        assert receiver.receive().content == content
        sending.result(SOON)


def test_a_message_that_comes_byte_by_byte():
    with connect("local") as (ours, theirs), connect("local") as (sender, copied):
        sender.send("kind", {"a": 1}, make_parcel(b"body", [3, 70_000]))
        sender.connection.close()
        data, (descriptor,), *_ = socket.recv_fds(copied.connection, 1 << 20, 1)
        while piece := copied.connection.recv(1 << 20):
            data += piece
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(theirs.receive)
            socket.send_fds(ours.connection, [data[:1]], [descriptor])
            for at in range(1, len(data)):
                ours.connection.sendall(data[at : at + 1])
            found = receiving.result(SOON)
        os.close(descriptor)
        assert (found.content, found.body) == ({"a": 1}, b"body")
        assert bytes(found.buffers[1]) == bytes(np.arange(70_000, dtype=np.uint8))
        ours.connection.close()
        with pytest.raises(EOFError):
            theirs.receive()


def test_receivers_share_no_memory_and_no_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    with connect("local") as (first, one), connect("local") as (second, other):
        content = np.zeros(SHARED_BYTES + 1, dtype=np.uint8)
        with contextlib.closing(Parcel(b"", (memoryview(content),))) as parcel:
            found = []
            for sender, receiver in ((first, one), (second, other)):
                sender.send("call", None, parcel)
                found.append(receiver.receive().buffers[0])
            found[0][5] = 1
            assert (found[1][5], content[5], found[0].readonly) == (0, 0, False)
    # Results that somebody keeps must not use up what a process may open.
    assert len(os.listdir("/proc/self/fd")) <= before
    array = np.frombuffer(found[0], dtype=np.uint8)
    del found
    assert array[5] == 1 and not array[6:].any()


@pytest.mark.parametrize("kind", ["local", "network"])
def test_what_is_larger_than_the_memory_is_refused_and_the_next_message_comes(kind, monkeypatch):
    with connect(kind) as (sender, receiver), ThreadPoolExecutor(1) as pool:
        before = len(os.listdir("/proc/self/fd"))

        def send() -> None:
            with contextlib.closing(make_parcel(bytes(5000), [70_000])) as parcel:
                sender.send("call", None, parcel)
            sender.send("next")

        def refuse(size: int) -> None:
            if size:
                raise ConfigurationError(f"no memory for {size} bytes")

        pool.submit(send).result(SOON)
        monkeypatch.setattr(channel, "check_memory", refuse)
        with pytest.raises(ConfigurationError, match="no memory for"):
            receiver.receive()
        monkeypatch.undo()
        assert receiver.receive().kind == "next"
        assert len(os.listdir("/proc/self/fd")) <= before


def test_memory_is_looked_up_for_large_parcels_only(monkeypatch):
    class Huge:
        nbytes = 1 << 50

    text = r"1024 TiB to be sent, but on \S+ the machine has .* left"
    with pytest.raises(ConfigurationError, match=text):
        Parcel(b"", (Huge(),))
    channel.check_memory(1 << 20)


# Strangers


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def make_message(path: Path, content: Any = None) -> bytes:
    """What a channel sends, with a bomb as its pickle."""
    with connect("local") as (sender, receiver):
        sender.send("hello", content, Parcel(pickle.dumps(Bomb(path))))
        return receiver.connection.recv(1 << 20)


def test_nothing_of_who_does_not_know_the_token_or_sends_no_greeting_is_unpickled(tmp_path):
    bomb = tmp_path / "unpickled"
    row = {"rank": 0, "role": "calls", "size": 1, "python": "3"}
    with contextlib.ExitStack() as stack:
        listener = _RankListener([listen_locally()], stack)
        token, proof = (each.encode() for each in (listener.address.token, listener.address.proof))

        def call(said: bytes) -> bytes:
            """What is answered until the connection is closed."""
            with open_connection(listener.address.places[0], SOON) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                stranger.setblocking(False)
                answer, end = b"", time.monotonic() + SOON
                with contextlib.suppress(ConnectionError):  # What was not read resets it.
                    while time.monotonic() < end:
                        listener.wait(0.02)
                        with contextlib.suppress(BlockingIOError):
                            if not (piece := stranger.recv(1000)):
                                break
                            answer += piece
                assert time.monotonic() < end
                return answer

        for said in (token[:-1] + b"!\n", proof + b"\n", b""):
            assert call(said + make_message(bomb, row)) == b""
        for said in (
            b"", b"\x00", b"\xff" * 100, b"\x03\0\0\0{]}", b"\x02\0\0\0{}",
            make_message(bomb, 3), make_message(bomb, {"rank": 0}), make_message(bomb)[:-5],
        ):  # fmt: skip
            assert call(token + b"\n" + said) == proof
    assert not bomb.exists()


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("local", "a message"), ("local", "half the proof"), ("network", "a wrong proof")],
)
def test_a_rank_tells_whoever_listens_in_its_callers_place_its_token_only(
    kind, answer, tmp_path, monkeypatch
):
    bomb = tmp_path / "unpickled"
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 0.3)
    server = listen_locally() if kind == "local" else ports.listen("127.0.0.1")
    address = Address((describe_server(server),), "ab" * 16, "cd" * 16)
    said = {
        "a message": make_message(bomb, {"number": 1}) * 2,
        "half the proof": address.proof.encode()[:-1],
        "a wrong proof": address.proof.encode()[:-1] + b"!" + make_message(bomb),
    }[answer]
    with server, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(channel.connect, address)
        heard = []
        server.settimeout(0.2)
        while not (connecting.done() and heard):
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(SOON)
                    heard.append(connection.recv(1000))
                    connection.sendall(said)
                    connection.shutdown(socket.SHUT_WR)
                    # What it has left unread resets the connection.
                    heard.append(connection.recv(1000))
        with pytest.raises(UnreachableError, match="does not reach the process that started"):
            connecting.result()
    assert set(heard) - {b""} == {b"ab" * 16 + b"\n"}
    assert not bomb.exists()


def test_a_rank_that_is_stopped_on_its_way_keeps_no_other_waiting(monkeypatch):
    monkeypatch.setattr(channel, "SILENT_SECONDS", 0.5)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        listener = _RankListener([listen_locally()], stack)

        def enter() -> list[Channel]:
            silent, *others = (Channel(channel.connect(listener.address)) for _ in range(4))
            for role, each in zip(ROLES, others, strict=True):
                each.send("hello", {"rank": 0, "role": role, "size": 1})
            return [silent, *others]

        entering, end = pool.submit(enter), time.monotonic() + SOON
        while not listener.is_complete and time.monotonic() < end:
            listener.wait(0.02)
        for each in entering.result(SOON):
            stack.callback(each.close)
        assert listener.is_complete


def test_a_rank_that_was_stopped_while_it_connects_tries_again(monkeypatch):
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 0.0)
    ours, theirs = socket.socketpair()

    def open_late(place: str, seconds: float) -> socket.socket:
        monkeypatch.setattr(channel, "open_connection", lambda *_: theirs)
        time.sleep(0.01)
        raise ConnectionResetError(place)

    monkeypatch.setattr(channel, "open_connection", open_late)
    with ours:
        ours.sendall(b"cd")
        with channel.connect(Address(("@gone",), "ab", "cd")) as found:
            assert found is theirs


def test_a_rank_sends_no_token_to_another_users_socket(monkeypatch):
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(channel, "find_user", lambda connection: os.geteuid() + 1)
    with listen_locally() as server:
        with pytest.raises(UnreachableError, match="the socket is another user's"):
            channel.connect(Address((describe_server(server),), "ab", "cd"))
        server.setblocking(False)
        connection, _ = server.accept()
        assert connection.recv(10) == b""
        connection.close()


# How a rank takes calls: what comes from its caller at the wrong moment


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    ours, theirs = socket.socketpair()
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(rank, "connect", lambda _: theirs)
    monkeypatch.setattr(rank, "_redirect", lambda *_: [])
    monkeypatch.setattr(rank.CallServer, "_find_state", lambda _: {})
    monkeypatch.setattr(rank, "is_broken", lambda _: False)
    before = signal.getsignal(signal.SIGINT)
    with ours, theirs:
        yield Channel(ours)
    signal.signal(signal.SIGINT, before)


def serve(caller: Channel) -> rank.CallServer:
    session = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=1), device="cpu", threads=1, backend="gloo",
        collectives=None, do_postponed=lambda: None,
    )  # fmt: skip
    server = rank.CallServer(session, None)  # type: ignore[arg-type]
    assert caller.receive().kind == "hello"
    return server


def call(caller: Channel, number: int, function: object, *arguments: object) -> None:
    content = {"number": number, "fingerprint": "", "folders": [], "sources": {}}
    caller.send("call", content, Parcel(*pickling.dump((function, arguments, {}))))


def test_a_function_whose_caller_has_just_gone_is_not_begun(caller):
    server, threads = serve(caller), threading.enumerate()
    (listening,) = (each for each in threads if each.name == "mpiddp-calls")
    call(caller, 1, called.note, "begun")
    caller.connection.shutdown(socket.SHUT_WR)
    # It looks whether a function runs before the main thread comes to this one.
    listening.join(SOON)
    assert not listening.is_alive()
    server.serve()
    answer = caller.receive()
    assert answer.kind == "error" and pickling.load(answer.body)[1] == "KeyboardInterrupt"
    assert "begun" not in called.heard


def test_a_call_that_a_rank_has_no_memory_for_is_answered(caller, monkeypatch):
    server, coming = serve(caller), [ConfigurationError("no memory"), EOFError()]
    monkeypatch.setattr(server._calls, "receive", mock.Mock(side_effect=coming))
    caller.send("call")
    server.serve()
    server.close()
    assert pickling.load(caller.receive().body)[2] == "no memory"


def test_a_signal_that_comes_after_its_function_does_not_disturb_the_answer(caller, monkeypatch):
    def end() -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # The next one, while it cleans up.
        # A function may let Ctrl-C raise, as libraries do.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    server = serve(caller)
    call(caller, 1, end)
    monkeypatch.setattr(server, "_mark", lambda _: signal.raise_signal(signal.SIGINT))
    try:
        server._do(server._inbox.get(timeout=SOON))
    except KeyboardInterrupt:
        pytest.fail("the signal has ended the rank")
    assert caller.receive().kind == "value"


def test_the_sender_may_change_what_is_kept(monkeypatch):
    # The kernel writes 2 GiB at a time at most.
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda to, view, at: pwrite(to, view[:40_000], at))
    for size in (100, SHARED_BYTES + 1):
        content = np.zeros(size, dtype=np.uint8)
        with contextlib.closing(Parcel(b"", (memoryview(content),))) as parcel:
            parcel.keep()
            content[:] = 1
            with connect("local") as (sender, receiver):
                sender.send("call", None, parcel)
                assert not any(receiver.receive().buffers[0])


# What ranks print, cut in any way, comes out as it was, line by line


LABEL = b"[3] "
PIECES = st.sampled_from(
    [b"a", b"line\n", b"\r", b"\r\n", "né".encode(), "né".encode()[1:], b"\xc3", b"\xff", b"\0",
     b"\0mpiddp call ", b"\0mpiddp call 12", b"12\0", b"\0mpiddp\0", b" 50%\r", b"\n\n", b"x" * 50]
)  # fmt: skip


def read_all(writes: list[bytes], label: bytes | None) -> tuple[str, int]:
    """What is printed of one rank's stream that comes in these parts, and its last call."""
    texts: list[str] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = OutputReader(ours, label, texts.append)
        for each in writes:
            theirs.sendall(each)
            reader.read()
        theirs.close()
        reader.read()
        assert reader.is_ended
        reader.close()
        return "".join(texts), reader.call


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=150)
@given(st.lists(PIECES, max_size=12), st.lists(PIECES, max_size=6), st.lists(st.integers(0, 999)))
def test_a_sink_gets_what_was_printed_however_it_is_cut(before, after, places):
    data = [b"".join(part) for part in (before, after)]
    if any(MARK.search(part) for part in (*data, data[0] + b"\0", b"\0" + data[1])):
        return  # A rank that prints marks spoils its own output alone.
    text, call = read_all(cut(data[0] + make_mark(7) + data[1], places), None)
    assert text == "".join(part.decode(errors="replace") for part in data)
    assert call == 7


@settings(max_examples=150)
@given(st.lists(PIECES, max_size=12), st.lists(st.integers(0, 999)))
def test_every_line_has_its_label_however_it_is_cut(pieces, places):
    data = b"".join(pieces)
    if MARK.search(data + b"\0"):
        return
    text, call = read_all(cut(data + make_mark(1), places), LABEL)
    assert call == 1
    for line in re.split(r"\r\n|\n|\r", text):
        assert line == "" or line.startswith("[3] ")
    found = re.sub(r"(^|(?<=[\n\r]))\[3\] ", "", text)
    expected = data.decode(errors="replace")
    assert found.rstrip("\n") == expected.rstrip("\n")


def test_what_looks_like_the_beginning_of_a_mark_is_not_lost():
    assert read_all([b"\0mpiddp call 5"], None) == ("\0mpiddp call 5", 0)
    assert read_all([b"a\0"], LABEL) == ("[3] a\0\n", 0)
    # Marks of several calls in one read.
    found = read_all([b"one\n" + make_mark(1) + b"two" + make_mark(2) + b"three"], LABEL)
    assert found == ("[3] one\n[3] two\n[3] three\n", 2)


def test_a_line_whose_end_is_late_is_printed(monkeypatch):
    texts: list[str] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = OutputReader(ours, LABEL, texts.append)
        theirs.sendall(b"Name? ")
        monkeypatch.setattr(time, "monotonic", lambda: 0.0)
        reader.read()
        reader.flush_late()
        assert texts == []
        monkeypatch.setattr(time, "monotonic", lambda: 60.0)
        reader.flush_late()
    assert "".join(texts).startswith("[3] Name? ")


def test_what_launchers_say_while_ranks_start_is_printed_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mpiddp.remote.job.QUIET_SECONDS", -1.0)
    texts, shown = ["one\n", "two\n"], list[str]()
    with (tmp_path / "log").open("w+") as file:
        job = RankJob.__new__(RankJob)
        vars(job).update(_log=file.fileno(), _shown=0, _output=None, starter=mock.Mock())
        job.starter.poll = lambda: shown.append(capsys.readouterr().err)
        ranks = mock.Mock(wait=lambda _: file.write(texts[len(shown)]) and file.flush())
        type(ranks).is_complete = mock.PropertyMock(side_effect=[False, False, True])
        job._await_ranks(ranks)
    assert shown == texts
    # Without a standard input the log is descriptor 0.
    monkeypatch.setattr(os, "pread", lambda *_: b"said")
    assert [RankJob._read_log(SimpleNamespace(_log=n)) for n in (0, -1)] == ["said", ""]


def test_a_console_that_has_gone_stops_nothing(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        write("err", "lost")
    # One that is there shows it at once.
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    write("out", "shown")
    assert raw.getvalue() == b"shown"


def test_who_prints_without_end_does_not_hold_up_the_end():
    texts: list[str] = []
    ours, theirs = socket.socketpair()

    def print_more(text: str) -> None:
        """As a process that a rank has left behind."""
        texts.append(text)
        assert len(texts) < 10
        with contextlib.suppress(BrokenPipeError):
            theirs.sendall(b"more\n")

    reader = OutputReader(ours, None, print_more)
    with theirs:
        theirs.sendall(b"hello\n")
        reader.close()
    assert texts == ["hello\n"]
