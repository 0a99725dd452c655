"""Links between nodes, measured for real over loopback; what is made of figures and of names."""

import contextlib
import socket
import sys
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.doctor.network import name_resolution, node_links, routes
from mpiddp.doctor.network.name_resolution import Resolution
from mpiddp.doctor.network.node_links import LinkServer, NodeLinks, Ping
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.launch.network.interfaces import Interface

TOKEN = b"0123456789abcdef"


@pytest.fixture
def counter():
    made = LinkServer("127.0.0.1", TOKEN)
    yield made
    made.close()


def test_a_clock_that_is_behind(counter, monkeypatch):
    real = time.time
    answers = iter(range(10**6))
    # Client and server take turns in asking for the time: only the client's is behind.
    monkeypatch.setattr(node_links.time, "time", lambda: real() - 100 * (next(answers) % 2 == 0))
    found = node_links.ping("127.0.0.1", counter.port, TOKEN)
    assert found.offset == pytest.approx(100, abs=1)


def test_a_stream_is_counted_and_takes_its_time(counter):
    begin = time.monotonic()
    node_links.stream("127.0.0.1", counter.port, TOKEN)
    assert time.monotonic() - begin >= node_links.STREAM_SECONDS
    assert wait_until(lambda: counter.rate() is not None, 60, 0.01)
    assert counter.rate() > 1e6


def test_what_comes_first_is_not_counted(monkeypatch):
    counted = node_links._Stream(None, None)
    times = iter((2.0, 2.04, 2.0625, 2.5625))
    monkeypatch.setattr(node_links.time, "monotonic", lambda: next(times))
    for length, rate in ((100, None), (100, 40_000), (5, None), (10, 160)):
        counted.count(length)
        assert counted.rate() == (rate and pytest.approx(rate))


def test_who_is_not_of_this_job_gets_no_answer(counter):
    with pytest.raises(ConnectionError):
        node_links.ping("127.0.0.1", counter.port, b"another job's 16")
    with socket.create_connection(("127.0.0.1", counter.port), 60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert counter.rate() is None
    # It closes what its own have closed.
    with socket.create_connection(("127.0.0.1", counter.port), 60) as connection:
        connection.sendall(TOKEN + node_links.SINK)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    # It still answers its own.
    assert node_links.ping("127.0.0.1", counter.port, TOKEN).seconds > 0


@given(st.integers(2, 200))
def test_in_no_turn_a_node_sends_and_receives(size):
    turns = node_links.take_turns(size)
    assert sorted(node for turn in turns for node in turn) == list(range(size))
    for turn in turns:
        assert not set(turn) & {(node + 1) % size for node in turn}


def ring(rates, *, seconds=1e-4, offsets=None, problems=None):
    """Links of nodes n0, n1, …; ``rates[i]`` is that of the link to node i, in bits per second."""
    count = len(rates)
    return [
        NodeLinks(
            f"n{i}", f"n{(i + 1) % count}",
            None if i == 0 else Ping(2e-4, (offsets or {}).get(i, 1e-5)), Ping(seconds, 0.0),
            rates[i], (problems or {}).get(i, ()),
        )
        for i in range(count)
    ]  # fmt: skip


def way(speed=0, *, name="eth0", is_virtual=False):
    return routes.Way(name, "10.0.0.1", "10.0.0.1", None, speed, "nothing", None, is_virtual)


def judge(links, *ways):
    """``ways``: of each node; without any, of interfaces that claim nothing."""
    return routes.judge_links(links, ways or [way()] * len(links))


def test_good_links_name_the_slowest():
    finding = judge(ring([9.4e9, 9.0e9, 9.3e9]))
    assert finding.status == "pass"
    assert "at least 9.0 Gbit/s (n0 → n1)" in finding.found and "100 µs" in finding.found


@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ([9e9, 9e9, 9e8, 9e9], ["n1 → n2 900 Mbit/s"]),
        # Alike, and all too slow.
        ([1e7, 1e7], ["n1 → n0 10 Mbit/s", "n0 → n1 10 Mbit/s"]),
        ([9e9, None, 9e9], ["n0 → n1 0 Mbit/s"]),
    ],
)
def test_slow_links(rates, named):
    finding = judge(ring(rates))
    assert finding.status == "warn" and finding.code == 0
    assert all(name in finding.found for name in named)
    assert finding.found.count(" → ") == len(named)


@pytest.mark.parametrize(
    ("near", "far", "hosts"),
    [
        # n1 sends slowly, to either of the next two; it receives slowly; its link with n2 alone is.
        ([9e9, 9e9, 4e8, 9e9, 9e9], [9e9, 9e9, 9e9, 4e8, 9e9], ("n1",)),
        ([9e9, 4e8, 9e9, 9e9, 9e9], [9e9, 4e8, 9e9, 9e9, 9e9], ("n1",)),
        ([9e9, 9e9, 4e8, 9e9, 9e9], [9e9] * 5, ()),
        # Slow, as beside another job.
        ([9e9, 9e9, 2e9, 9e9, 9e9], [9e9, 9e9, 9e9, 2e9, 9e9], ()),
        ([9e9, 9e9, None, 9e9, 9e9], [9e9, 9e9, 9e9, 0.0, 9e9], ("n1",)),
    ],
)
def test_which_end_of_a_slow_link_is_to_blame(near, far, hosts):
    links = [replace(link, cross_checked=rate) for link, rate in zip(ring(near), far, strict=True)]
    finding = judge(links)
    assert finding.hosts == hosts
    assert (finding.status, finding.code) == (("fail", 1) if hosts else ("warn", 0))


def test_links_that_are_late_or_not_there():
    finding = judge(ring([9e9, 9e9], seconds=0.02))
    assert finding.status == "warn" and "n0 → n1 20.0 ms there and back" in finding.found
    finding = judge(ring([9e9, 9e9], problems={1: ("n1 → n0 (10.0.0.1): x",)}))
    assert (finding.status, finding.code) == ("fail", 4)
    assert "n1 → n0 (10.0.0.1): x" in finding.found and "--interface" in finding.advice


@pytest.mark.parametrize(
    ("rate", "speed", "is_virtual", "said"),
    [
        # Mbit/s. A cable of 1, 10 and 200 Gbit/s; one TCP stream needs not fill the last.
        (900, 1000, False, None),
        (240, 1000, False, "240 Mbit/s, though eth0 claims 1.0 Gbit/s"),
        (378, 10_000, False, "378 Mbit/s, though eth0 claims 10.0 Gbit/s"),
        (2400, 10_000, False, "2.4 Gbit/s, though eth0 claims 10.0 Gbit/s"),
        (9000, 200_000, False, None),
        # A container on a network of 1 Gbit/s: veth claims 10 of it.
        (940, 10_000, True, None),
        (378, 10_000, True, "378 Mbit/s, though eth0, a virtual interface, claims 10.0 Gbit/s"),
        # tun says 10 Mbit/s.
        (378, 10, True, None),
    ],
)
def test_a_link_below_what_it_claims(rate, speed, is_virtual, said):
    ways = [way(speed, is_virtual=is_virtual)] * 2
    finding = judge(ring([rate * 1e6] * 2), *ways)
    assert finding.status == ("pass" if said is None else "warn")
    if said is not None:
        assert f"n1 → n0 {said}; n0 → n1 {said};" in finding.found
        assert ("tc qdisc show dev eth0" in finding.advice) is is_virtual
        assert ("ethtool" in finding.advice) is not is_virtual


def test_the_end_that_claims_less_is_the_limit():
    quick, slow = way(100_000, name="ib0"), way(1000)
    assert judge(ring([9e8, 9e8]), quick, slow).status == "pass"
    assert "ib0" not in judge(ring([2e8, 2e8]), quick, slow).found
    # What one end claims is no claim of the link while the other says nothing.
    assert judge(ring([9e8, 9e8]), quick, way()).status == "pass"


def test_which_interfaces_are_virtual(tmp_path):
    """Of a fake /sys/class/net."""
    drivers = {"enp1s0": "mlx5_core", "ens3": "virtio_net", "ens160": "vmxnet3"}
    for name, driver in drivers.items():
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    stacked = {"veth1": "", "bond0": "enp1s0", "br0": "veth1 bond0", "docker0": "veth1"}
    for name, below in stacked.items():
        (tmp_path / name).mkdir()
        for each in below.split():
            (tmp_path / name / f"lower_{each}").symlink_to(tmp_path / each)
    names = (*drivers, "bond0", "br0", "docker0", "veth1", "gone")
    real = {name for name in names if not routes.is_virtual(name, tmp_path)}
    assert real == {"enp1s0", "bond0", "br0"}


@pytest.mark.parametrize(
    ("offsets", "status", "words"),
    [
        ({}, "pass", "at most 10 µs ± 100 µs from n0 (n1)"),
        ({2: 0.02}, "pass", "20.0 ms ± 100 µs from n0 (n2)"),
        # Master's clock minus theirs: positive is behind.
        ({1: 30.0}, "warn", "n1 is 30.0 s behind n0"),
        ({1: -30.0, 2: 2.0}, "warn", "n1 is 30.0 s ahead of n0; n2 is 2.0 s behind n0"),
        # Within what the way there and back leaves open.
        ({1: 1.00005}, "pass", "1.0 s"),
    ],
)
def test_clocks(offsets, status, words):
    finding = routes.judge_clocks(ring([1e9] * 3, offsets=offsets))
    assert finding.status == status and words in finding.found
    assert ("NTP" in finding.advice) == (status == "warn")


ETH, FAST = Interface("eth0", ("10.0.0.1",), 1000), Interface("ib0", ("10.1.0.1",), 100_000)
DOCKER = Interface("docker0", ("172.17.0.1",), 100_000)


@pytest.mark.parametrize(
    ("interfaces", "by_user", "status"),
    [
        ([ETH], False, "pass"),
        ([ETH, DOCKER], False, "pass"),
        ([ETH, FAST], False, "warn"),
        ([ETH, FAST], True, "pass"),
        ([Interface("eth0", ("10.0.0.1",)), FAST], False, "pass"),
        ([FAST], False, "pass"),
        # Twice as fast.
        ([ETH, replace(FAST, speed=1999)], False, "pass"),
        ([ETH, replace(FAST, speed=2000)], False, "warn"),
    ],
)
def test_interfaces(interfaces, by_user, status, tmp_path):
    told = {"GLOO_SOCKET_IFNAME": "eth0"}
    way = routes.find_way(
        *("eth0", "10.0.0.1", "10.0.0.2", interfaces, told),
        chosen_by_user=by_user, routes=tmp_path / "none",
    )  # fmt: skip
    (finding,) = routes.judge_ways([way])
    assert finding.status == status
    assert finding.found.startswith("eth0 10.0.0.1 → 10.0.0.2")
    if status == "warn":
        assert f"ib0 at {interfaces[1].speed} Mbit/s is left unused" in finding.found
        assert "--interface ib0" in finding.advice
    else:
        assert "GLOO_SOCKET_IFNAME=eth0" in finding.found


# As Linux wrote it on a machine of the x86 family, whose order of bytes is the little one.
ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth1\t00000000\t010200C0\t0003\t0\t0\t9\t00000000\t0\t0\t0
eth1\t00024D0A\tFE004D0A\t0002\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth1\t00004D0A\tFE004D0A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth1\t00004D0A\tFF004D0A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth1\t00014D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


@pytest.mark.parametrize(
    ("interface", "address", "gateway"),
    [
        ("eth0", "192.0.2.9", None),
        ("eth0", "198.51.100.7", "192.0.2.1"),
        # Of two alike the first.
        ("eth1", "10.77.0.2", "10.77.0.254"),
        ("eth1", "10.77.1.2", None),
        # That route is down.
        ("eth1", "10.77.2.2", "192.0.2.1"),
        # Only other interfaces have routes.
        ("ib0", "10.77.0.2", None),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="the table was recorded on such a machine")
def test_the_gateway_is_read_from_the_kernels_table(interface, address, gateway):
    assert routes.find_gateway(ROUTES, interface, address) == gateway
    # The same as redirects would have made them, and as the system would refuse them.
    dynamic, refused = (ROUTES.replace("\t0003", flags) for flags in ("\t0013", "\t0203"))
    assert routes.find_gateway(dynamic, interface, address) == gateway
    assert routes.find_gateway(refused, interface, address) is None


def test_nodes_that_differ_in_their_address_alone_are_folded():
    here = routes.Way("ib0", "10.1.0.1", "10.1.0.1", None, 0, "nothing", None)
    near = [replace(here, address=f"10.1.0.{last}") for last in (2, 3)]
    far = replace(here, address="10.9.0.5", gateway="10.9.0.254", speed=1000)
    found = [finding.found for finding in routes.judge_ways([here, *near, far])]
    assert len(set(found[:3])) == 1
    assert found[0] == "ib0 10.1.0.[1-3] → 10.1.0.1; NCCL and Gloo are told nothing"
    assert found[3].startswith("ib0 10.9.0.5 → 10.1.0.1 through 10.9.0.254 at 1000 Mbit/s; ")
    (alone,) = routes.judge_ways([here])
    assert alone.found.startswith("ib0 10.1.0.1; ")


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
    assert found.addresses == () and found.problem not in ("", "not found")


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
