"""How a rank takes calls, in this process: what comes from its caller at the wrong moment."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import called
from mpiddp.remote import pickling, rank
from mpiddp.remote.channel import Channel, Parcel

SOON = 60.0
WORLD = SimpleNamespace(rank=0, size=1)


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
        world=WORLD, device="cpu", threads=1, backend="gloo", collectives=None,
        do_postponed=lambda: None,
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


def test_a_signal_that_comes_after_its_function_does_not_disturb_the_answer(caller, monkeypatch):
    server = serve(caller)
    # A function may let Ctrl-C raise, as libraries do.
    call(caller, 1, lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None)
    monkeypatch.setattr(server, "_mark", lambda _: signal.raise_signal(signal.SIGINT))
    try:
        server._do(server._inbox.get(timeout=SOON))
    except KeyboardInterrupt:
        pytest.fail("the signal has ended the rank")
    assert caller.receive().kind == "value"
