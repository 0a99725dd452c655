"""Which interfaces and addresses may carry a job, and what NCCL and Gloo are told."""

import re
from contextlib import nullcontext, suppress
from socket import AF_INET, AF_INET6
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.network import interfaces
from mpiddp.launch.network.interface_rule import (
    InterfaceRule,
    find_nccl_setting,
    find_rule,
    names_nobody,
    parse_interface_option,
)
from mpiddp.launch.network.interfaces import Interface

LOOPBACK = Interface("lo", ("127.0.0.1",))
ETHERNET = Interface("eth0", ("10.0.0.1",), 1000)
INFINIBAND = Interface("ib0", ("10.1.0.1",), 100_000)
SLOW = Interface("eth1", ("10.2.0.1",), 100)
DOCKER = Interface("docker0", ("172.17.0.1",), 10_000)
LINK_LOCAL = Interface("usb0", ("169.254.3.4",), 1000)
HOST = (LOOPBACK, DOCKER, LINK_LOCAL, SLOW, ETHERNET, INFINIBAND)


@pytest.mark.parametrize(
    ("backend", "variable", "value", "fits"),
    [
        ("gloo", "GLOO_SOCKET_IFNAME", "", True),
        ("gloo", "GLOO_SOCKET_IFNAME", "lo,lo", True),
        ("gloo", "NCCL_SOCKET_IFNAME", "nosuch", True),
        ("nccl", "GLOO_SOCKET_IFNAME", "nosuch", True),
        ("nccl", "NCCL_SOCKET_IFNAME", "nosuch,l", True),
        ("nccl", "NCCL_SOCKET_IFNAME", "^nosuch", True),
        # Gloo opens all, and knows no prefixes.
        ("gloo", "GLOO_SOCKET_IFNAME", "lo,nosuch", False),
        ("gloo", "GLOO_SOCKET_IFNAME", "l", False),
        ("nccl", "NCCL_SOCKET_IFNAME", "=l", False),
    ],
)
def test_a_variable_that_fits_no_interface_is_refused(backend, variable, value, fits):
    said = f"^{variable} is '{value}', but the interfaces of node1 that have an address are .*lo"
    with nullcontext() if fits else pytest.raises(ConfigurationError, match=said):
        interfaces.check_variables(backend, "node1", {"NCCL_CONF_FILE": "/none", variable: value})


# Candidates


def addresses(found, rule=None, nodes=2):
    return [c.address for c in interfaces.list_candidates(found, rule, nodes, "node1")]


TWINS = (Interface("b", ("10.0.0.1", "10.0.0.2")), Interface("a", ("10.0.0.3",)))


@pytest.mark.parametrize(
    ("present", "value", "nodes", "expected"),
    [
        # Fast ones first, bridges and link-local ones last.
        (HOST, None, 2, ["10.1.0.1", "10.0.0.1", "10.2.0.1", "172.17.0.1", "169.254.3.4"]),
        (HOST, None, 1, ["127.0.0.1"]),
        # Equal ones keep the system's order.
        (TWINS, None, 2, ["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
        *(
            ((Interface(name, ("10.9.0.1",), 10**6), ETHERNET), None, 2, ["10.0.0.1", "10.9.0.1"])
            for name in ("br-4f", "virbr0", "veth12", "cni0", "podman0", "docker_gwbridge")
        ),
        (HOST, "=docker0", 2, ["172.17.0.1"]),
        (HOST, "=lo", 2, ["127.0.0.1"]),
        (HOST, "^docker,usb,lo,eth", 2, ["10.1.0.1"]),
        # Who asks for it on one node gets it.
        (HOST, "=eth0", 1, ["10.0.0.1"]),
    ],
)
def test_which_addresses_are_offered(present, value, nodes, expected):
    rule = None if value is None else InterfaceRule.from_nccl(value, "--interface")
    assert addresses(present, rule, nodes) == expected
    # A rule of NCCL's does not stop a single node.
    ours = InterfaceRule.from_nccl("=hsn0", "NCCL_SOCKET_IFNAME")
    assert nodes > 1 or addresses(present, ours, 1) == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("present", "rule", "nodes", "words"),
    [
        ([LOOPBACK], None, 2, ["no interface that other nodes could reach", "lo (127.0.0.1)"]),
        ([ETHERNET], None, 1, ["no interface for loopback", "eth0 (10.0.0.1)"]),
        ([], None, 2, ["IPv4 address: none"]),
        (HOST, "node1=hsn0", 2, ["--interface 'node1=hsn0' fits no interface of node1"]),
        (HOST, "=hsn0", 1, ["--interface '=hsn0' fits no interface", "lo (127.0.0.1)"]),
    ],
)
def test_nothing_left_says_what_there_is(present, rule, nodes, words):
    parsed = InterfaceRule.from_nccl(rule, "--interface") if rule else None
    with pytest.raises(ConfigurationError if rule else UnreachableError) as caught:
        interfaces.list_candidates(present, parsed, nodes, "node1")
    for word in ["node1", *words]:
        assert word in str(caught.value)


def test_interfaces_are_up_and_have_an_ipv4_address(monkeypatch):
    four, six = (SimpleNamespace(family=each, address=f"{each}") for each in (AF_INET, AF_INET6))
    entries = {"eth0": [six, four], "eth1": [six], "down": [four], "gone": [four]}
    states = {name: SimpleNamespace(isup=name != "down", speed=1, mtu=2) for name in entries}
    del states["gone"]
    monkeypatch.setattr("psutil.net_if_addrs", lambda: entries)
    monkeypatch.setattr("psutil.net_if_stats", lambda: states)
    assert interfaces.list_interfaces() == (Interface("eth0", (four.address,), 1, 2),)


# What NCCL and Gloo are told

UNSET = {"NCCL_CONF_FILE": "/none"}


def choose(used, rule=None, nodes=2, present=HOST, **variables):
    return interfaces.choose_variables(present, used, rule, nodes, {**UNSET, **variables})


def test_between_nodes_nccl_gets_exact_names_and_gloo_one():
    told = {"NCCL_SOCKET_IFNAME": "=ib0,eth0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert choose(["ib0", "eth0"]) == told
    # Where NCCL cannot choose wrongly, it is told nothing.
    assert choose(["eth0"], present=(LOOPBACK, ETHERNET)) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert choose(["lo"], nodes=1) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert choose([]) == {}


def test_what_is_set_already_is_left_alone(tmp_path):
    assert choose(["ib0"], NCCL_SOCKET_IFNAME="eth").keys() == {"GLOO_SOCKET_IFNAME"}
    assert choose(["ib0"], GLOO_SOCKET_IFNAME="eth0").keys() == {"NCCL_SOCKET_IFNAME"}
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_SOCKET_IFNAME=eth\n")
    assert choose(["ib0"], NCCL_CONF_FILE=str(file)) == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_the_users_option_is_passed_on_whatever_is_set():
    prefix = InterfaceRule.from_nccl("^docker,lo", "--interface")
    told = {"NCCL_SOCKET_IFNAME": "^docker,lo", "GLOO_SOCKET_IFNAME": "eth0"}
    assert choose(["eth0"], prefix) == told
    # This node was reached over another interface, but the option decides.
    exact = InterfaceRule.from_nccl("=eth1", "--interface")
    expected = {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"}
    assert choose(["ib0"], exact, NCCL_SOCKET_IFNAME="eth", GLOO_SOCKET_IFNAME="eth0") == expected


def test_nccls_syntax_is_translated_for_gloo():
    rule = InterfaceRule.from_nccl("^docker,lo,usb,eth", "NCCL_SOCKET_IFNAME")
    chosen = choose(["eth0", "ib0"], rule, NCCL_SOCKET_IFNAME="^docker,lo,usb,eth")
    assert chosen == {"GLOO_SOCKET_IFNAME": "ib0"}
    none_used = choose([], rule, NCCL_SOCKET_IFNAME="^docker,lo,usb,eth")
    assert none_used == {"GLOO_SOCKET_IFNAME": "ib0"}


# Rules, in NCCL's syntax

NAMES = st.sampled_from(
    ["lo", "eth0", "eth1", "eth10", "ib0", "ib0.8001", "ens1f0np0", "docker0", "br-1", "hsn0"]
)
ITEMS = st.sampled_from(["lo", "eth", "eth0", "eth1", "ib", "ib0", "e", "ens1f0", "docker", "hsn0"])
RULES = st.builds(
    lambda prefix, items: prefix + ",".join(items),
    st.sampled_from(["", "=", "^", "^="]),
    st.lists(ITEMS, min_size=1, max_size=3),
)


def admitted_by_nccl(value: str, name: str) -> bool:
    """NCCL's documentation of NCCL_SOCKET_IFNAME, read independently.

    "Define to a list of prefixes to filter interfaces to be used by NCCL. … Using the ^ symbol,
    NCCL will exclude interfaces starting with any prefix in that list. To match (or not) an exact
    interface name, begin the prefix string with the = character."
    """
    pattern = re.fullmatch(r"(\^?)(=?)(.*)", value)
    assert pattern is not None
    excludes, whole, items = pattern.groups()
    alternatives = "|".join(map(re.escape, items.split(",")))
    found = re.match(f"(?:{alternatives}){'$' if whole else ''}", name) is not None
    return found if not excludes else not found


@given(RULES, NAMES)
def test_a_rule_admits_what_nccl_would_and_is_printed_as_it_was_read(value, name):
    rule = InterfaceRule.from_nccl(value, "test")
    assert rule.admits(name) == admitted_by_nccl(value, name)
    assert rule.nccl == value
    # A port may follow a name, and spaces are no part of it.
    rule = InterfaceRule.from_nccl("=eth0:8080, ib0", "test")
    assert rule.admits("eth0") and rule.admits("ib0") and not rule.admits("eth0:8080")


# What the user's option says, --interface


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (" auto ", None), ("eth0,ib0", "=eth0,ib0"), ("^=eth0", "^=eth0"),
        ("node1=ib0,node1=eth0,node2=eth1", "=ib0,eth0"), ("node*=ib0", "=ib0"),
        ("node1.cluster=ib0", "=ib0"), ("node1.elsewhere=ib0", None), ("node2=eth0", None),
    ],
)  # fmt: skip
def test_the_option(text, rule):
    found = parse_interface_option(text, "node1.cluster")
    assert (found.nccl if found else None) == rule
    assert found is None or found.source == "--interface"


def test_an_option_for_other_hosts():
    assert names_nobody("node2=eth0,node3=ib0", "node1.cluster")
    for option in ("node2=eth0,node1=ib0", "node*=eth0", " auto ", "eth0", "^eth0", "=ib0"):
        assert not names_nobody(option, "node1.cluster")


@pytest.mark.parametrize("text", ["", "^=", ",", "node1=", "=,", "a=b,c", "a=b,=c"])
def test_an_option_that_names_nothing(text):
    with pytest.raises(ConfigurationError, match="--interface"):
        parse_interface_option(text, "node1")


@given(st.text("eth0ibnode1,=^*[] .", max_size=12))
@example("^ ,")
@example("=,eth0")
def test_any_text_is_a_rule_or_a_configuration_error(text):
    with suppress(ConfigurationError):
        rule = parse_interface_option(text, "node1")
        assert rule is None or (rule.names and all(rule.names))


def test_the_option_comes_before_the_environment():
    nccl = {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_CONF_FILE": "/none"}
    gloo = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_CONF_FILE": "/none"}

    def find(option, variables):
        rule = find_rule(option, "node1", variables)
        return None if rule is None else (rule.source, rule.nccl)

    assert find("eth1", nccl) == ("--interface", "=eth1")
    assert find("node2=eth1", nccl) == ("NCCL_SOCKET_IFNAME", "eth")
    assert find("auto", nccl) == ("NCCL_SOCKET_IFNAME", "eth")
    # Gloo takes one whole name.
    assert find("auto", gloo) == ("GLOO_SOCKET_IFNAME", "=ib0")
    assert find("auto", {"NCCL_CONF_FILE": "/none"}) is None


def test_nccls_configuration_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    own, named = tmp_path / ".nccl.conf", tmp_path / "named.conf"
    assert find_nccl_setting("NCCL_SOCKET_IFNAME", {}) is None
    own.write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==ens1f0\n")
    assert find_nccl_setting("NCCL_SOCKET_IFNAME", {}) == "=ens1f0"
    named.write_text("# NCCL_SOCKET_IFNAME=lo\n NCCL_SOCKET_IFNAME = ^docker \n")
    assert find_nccl_setting("NCCL_SOCKET_IFNAME", {"NCCL_CONF_FILE": str(named)}) == "^docker"
    absent = {"NCCL_CONF_FILE": str(tmp_path / "absent")}
    assert find_nccl_setting("NCCL_SOCKET_IFNAME", absent) is None
    assert find_nccl_setting("NCCL_SOCKET_IFNAME", {"NCCL_SOCKET_IFNAME": "ib"}) == "ib"
    own.write_text("NCCL_DEBUG=WARN\n")
    assert find_nccl_setting("NCCL_SOCKET_IFNAME", {}) is None
