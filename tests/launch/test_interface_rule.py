"""Which interfaces the user, the environment or NCCL's own files allow."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.launch.network.interface_rule import (
    InterfaceRule,
    find_nccl_setting,
    find_rule,
    names_nobody,
    parse_interface_option,
)

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
def test_a_rule_admits_what_nccl_would(value, name):
    rule = InterfaceRule.from_nccl(value, "test")
    assert rule.admits(name) == admitted_by_nccl(value, name)


@given(RULES)
def test_a_rule_is_printed_as_it_was_read(value):
    rule = InterfaceRule.from_nccl(value, "test")
    assert rule.nccl == value
    assert InterfaceRule.from_nccl(rule.nccl, "test") == rule


def test_a_port_may_follow_a_name_and_spaces_are_no_part_of_it():
    rule = InterfaceRule.from_nccl("=eth0:8080, ib0", "test")
    assert rule.admits("eth0") and rule.admits("ib0") and not rule.admits("eth0:8080")


# --interface


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (" auto ", None),
        ("eth0", "=eth0"),
        ("eth0,ib0", "=eth0,ib0"),
        ("^=eth0", "^=eth0"),
        ("node1=ib0", "=ib0"),
        ("node1=ib0,node1=eth0,node2=eth1", "=ib0,eth0"),
        ("node*=ib0", "=ib0"),
        ("node1.cluster=ib0", "=ib0"),
        ("node1.elsewhere=ib0", None),
        ("node2=eth0", None),
    ],
)
def test_the_option(text, rule):
    found = parse_interface_option(text, "node1.cluster")
    assert (found.nccl if found else None) == rule
    assert found is None or found.source == "--interface"


def test_a_name_with_a_domain_on_a_host_without():
    found = parse_interface_option("node2.cluster.local=eth0,node1.cluster.local=ib0", "node1")
    assert found is not None and found.nccl == "=ib0"


def test_an_option_for_other_hosts():
    assert names_nobody("node2=eth0,node3=ib0", "node1.cluster")
    for option in ("node2=eth0,node1=ib0", "node*=eth0", "auto", " auto ", "eth0", "^eth0", "=ib0"):
        assert not names_nobody(option, "node1.cluster")


@pytest.mark.parametrize("text", ["", " ", "^", "=", "^=", ",", "node1=", "=,", "a=b,c", "a=b,=c"])
def test_an_option_that_names_nothing(text):
    with pytest.raises(ConfigurationError, match="--interface"):
        parse_interface_option(text, "node1")


@given(st.text("eth0ibnode1,=^*[] .", max_size=12))
def test_any_text_is_a_rule_or_a_configuration_error(text):
    try:
        rule = parse_interface_option(text, "node1")
    except ConfigurationError as error:
        assert "--interface" in str(error)
        return
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
    assert (
        find_nccl_setting("NCCL_SOCKET_IFNAME", {"NCCL_CONF_FILE": str(tmp_path / "absent")})
        is None
    )
    assert find_nccl_setting("NCCL_SOCKET_IFNAME", {"NCCL_SOCKET_IFNAME": "ib"}) == "ib"
    own.write_text("NCCL_DEBUG=WARN\n")
    assert find_nccl_setting("NCCL_SOCKET_IFNAME", {}) is None
