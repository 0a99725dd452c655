"""Which addresses may carry a job, and what NCCL and Gloo are told."""

from __future__ import annotations

import socket

import pytest

from mpiddp.errors import ConfigurationError, UnreachableError
from mpiddp.launch.network import interfaces
from mpiddp.launch.network.interface_rule import InterfaceRule
from mpiddp.launch.network.interfaces import Interface

LOOPBACK = Interface("lo", ("127.0.0.1",))
ETHERNET = Interface("eth0", ("10.0.0.1",), 1000)
INFINIBAND = Interface("ib0", ("10.1.0.1",), 100_000)
SLOW = Interface("eth1", ("10.2.0.1",), 100)
DOCKER = Interface("docker0", ("172.17.0.1",), 10_000)
LINK_LOCAL = Interface("usb0", ("169.254.3.4",), 1000)
HOST = (LOOPBACK, DOCKER, LINK_LOCAL, SLOW, ETHERNET, INFINIBAND)


# What the user's variables say


@pytest.mark.parametrize(
    ("backend", "variables"),
    [
        ("gloo", {"GLOO_SOCKET_IFNAME": ""}),
        ("gloo", {"GLOO_SOCKET_IFNAME": "lo,lo"}),
        ("gloo", {"NCCL_SOCKET_IFNAME": "nosuch"}),
        ("nccl", {"GLOO_SOCKET_IFNAME": "nosuch"}),
        ("nccl", {"NCCL_SOCKET_IFNAME": "l"}),
        ("nccl", {"NCCL_SOCKET_IFNAME": "nosuch,lo"}),
        ("nccl", {"NCCL_SOCKET_IFNAME": "^nosuch"}),
    ],
)
def test_a_variable_that_fits_an_interface(backend, variables):
    interfaces.check_variables(backend, "node1", {"NCCL_CONF_FILE": "/none", **variables})


@pytest.mark.parametrize(
    ("backend", "variable", "value"),
    [
        ("gloo", "GLOO_SOCKET_IFNAME", "nosuch"),
        # Gloo opens all, and knows no prefixes.
        ("gloo", "GLOO_SOCKET_IFNAME", "lo,nosuch"),
        ("gloo", "GLOO_SOCKET_IFNAME", "l"),
        ("nccl", "NCCL_SOCKET_IFNAME", "nosuch"),
        ("nccl", "NCCL_SOCKET_IFNAME", "=l"),
    ],
)
def test_a_variable_that_fits_none(backend, variable, value):
    said = f"^{variable} is '{value}', but the interfaces of node1 that have an address are .*lo"
    with pytest.raises(ConfigurationError, match=said):
        interfaces.check_variables(backend, "node1", {"NCCL_CONF_FILE": "/none", variable: value})


# Candidates


def addresses(found, rule=None, nodes=2):
    return [c.address for c in interfaces.list_candidates(found, rule, nodes, "node1")]


TWINS = (Interface("b", ("10.0.0.1", "10.0.0.2")), Interface("a", ("10.0.0.3",)))
BRIDGES = ("br-4f", "virbr0", "veth12", "cni0", "podman0", "docker_gwbridge")


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
            for name in BRIDGES
        ),
        (HOST, "eth", 2, ["10.0.0.1", "10.2.0.1"]),
        (HOST, "=docker0", 2, ["172.17.0.1"]),
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
        (HOST, "=hsn0", 2, ["--interface '=hsn0' fits no interface", "ib0 (10.1.0.1)"]),
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


def test_this_hosts_interfaces_are_those_of_the_kernel():
    found = {interface.name: interface for interface in interfaces.list_interfaces()}
    assert found["lo"].addresses[0] == "127.0.0.1" and found["lo"].is_loopback
    assert found.keys() <= {name for _, name in socket.if_nameindex()}
    for interface in found.values():
        for address in interface.addresses:
            with socket.socket() as probe:
                probe.bind((address, 0))


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
