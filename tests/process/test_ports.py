"""Ports of a range: which are taken, and what is said when none is free."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.network.interfaces import Candidate
from mpiddp.launch.rendezvous.offers import OfferServer
from mpiddp.process.sockets import ports
from mpiddp.process.sockets.ports import PortRange

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
        with pytest.raises(ConfigurationError) as caught:
            ports.parse_option(text)
        assert str(caught.value).startswith("port_range: expected LOW-HIGH")
        assert str(caught.value).endswith(f"found {text!r}")


def test_the_option_comes_before_the_variable():
    assert str(ports.parse_option("1-65535")) == "1-65535"
    variables = {"MPIDDP_PORT_RANGE": "7-9"}
    assert ports.find_range("auto", {}) is None
    assert ports.find_range("auto", {"MPIDDP_PORT_RANGE": ""}) is None
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
        server = held[0]
        with socket.create_connection((HOST, pair.low), 5) as caller:
            accepted, _ = server.accept()
            server.close()
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
