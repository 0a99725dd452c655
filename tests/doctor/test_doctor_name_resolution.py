"""Names of hosts, and look-ups that may not be answered."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.doctor.network import name_resolution
from mpiddp.doctor.network.name_resolution import Resolution


@pytest.mark.parametrize(
    ("addresses", "nodes", "status", "words"),
    [
        (("10.0.0.1",), 2, "pass", "resolves"),
        (("127.0.1.1",), 2, "warn", "resolves to 127.0.1.1, where no other node finds it"),
        (("10.0.0.1", "127.0.1.1"), 2, "warn", "127.0.1.1"),
        (("127.0.1.1",), 1, "pass", "enough for one node"),
        ((), 1, "warn", "does not resolve (not known)"),
    ],
)
def test_host_name(addresses, nodes, status, words):
    finding = name_resolution.judge_host_name(Resolution(addresses, "not known"), nodes)
    assert finding.status == status and words in finding.found


def test_a_name_is_really_looked_up():
    assert "127.0.0.1" in name_resolution.resolve("localhost").addresses
    found = name_resolution.resolve("name.invalid")
    assert found.addresses == () and found.problem


def look_up(*addresses):
    look_ups = name_resolution.begin_look_ups(addresses)
    return list(name_resolution.find_unanswered(look_ups))


def test_a_server_that_keeps_silent_is_not_waited_for(monkeypatch):
    asked, release = [], threading.Event()

    def wait(address):
        asked.append(address)
        if address != "::ffff:10.0.0.2":
            release.wait()
        return "name", [], [address]

    monkeypatch.setattr(socket, "gethostbyaddr", wait)
    unanswered = look_up("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1")
    release.set()
    # The form that torch asks for.
    assert sorted(asked) == [f"::ffff:10.0.0.{i}" for i in (1, 2, 3)]
    assert unanswered == ["10.0.0.1", "10.0.0.3"]
    finding = name_resolution.judge_look_ups(unanswered)
    assert finding.status == "warn" and "for 10.0.0.1, 10.0.0.3:" in finding.found


def test_that_there_is_no_name_is_an_answer(monkeypatch):
    def refuse(address):
        raise socket.herror(2, "Host name lookup failure")

    monkeypatch.setattr(socket, "gethostbyaddr", refuse)
    assert look_up("10.0.0.1") == []
    assert name_resolution.judge_look_ups(()).status == "pass"


@given(st.integers(1, 500))
def test_the_sample_is_small_and_spread(count):
    everyone = [f"10.0.{i // 256}.{i % 256}" for i in range(count)]
    sample = name_resolution.choose_sample(everyone)
    assert len(sample) == min(count, name_resolution.SAMPLE) == len(set(sample))
    assert set(sample) <= set(everyone)
    assert {everyone[0], everyone[-1]} <= set(sample)
