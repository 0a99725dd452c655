"""Slurm's short form of a list of hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.launch.launcher.hostnames import expand_hostnames, fold_hostnames, is_host
from mpiddp.wording import fold_numbers


@pytest.mark.parametrize(
    ("name", "hostname", "expected"),
    [
        ("node1", "node1", True),
        ("node1", "node1.cluster.local", True),
        ("Node1", "node1.Cluster.local", True),
        ("node1.cluster.local", "node1.cluster.local", True),
        ("node1.cluster", "node1.cluster.local", False),
        ("node1", "node10.cluster.local", False),
    ],
)
def test_whose_name_it_is(name, hostname, expected):
    assert is_host(name, hostname) is is_host(hostname, name) is expected


@pytest.mark.parametrize(
    ("pattern", "hostname", "expected"),
    [
        ("node*", "node1.cluster", True),
        ("node[12]", "node2.cluster", True),
        ("*.cluster", "node1.cluster", True),
        ("*.cluster", "node1", True),
        ("node*.cluster", "node1.elsewhere", False),
        ("node?", "node10", False),
    ],
)
def test_patterns_of_names(pattern, hostname, expected):
    assert is_host(pattern, hostname) is expected


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["node001", "node002", "node003", "login"], "login,node[001-003]"),
        (["n1", "n3", "n2", "n7"], "n[1-3,7]"),
        # The width is part of the name: node1 and node01 are two hosts.
        (["node1", "node01"], "node01,node1"),
        (["n099", "n100"], "n[099-100]"),
        (["gpu1-ib", "gpu2-ib", "gpu1"], "gpu1,gpu[1-2]-ib"),
        (["r1n4", "r1n5", "r2n4"], "r1n[4-5],r2n4"),
        # Numbers of a domain are not what tells its hosts apart.
        (["n1.dc2.local", "n2.dc2.local", "n2.dc3.local"], "n2.dc3.local,n[1-2].dc2.local"),
        (["n9", "n10", "m08", "m9", "m10"], "m9,m[08,10],n[9-10]"),
    ],
)
def test_fold_hostnames(names, folded):
    assert fold_hostnames(names) == folded


HOSTNAMES = st.from_regex(
    r"[a-c]{0,2}[0-9]{0,3}[a-c]{1,2}-?[0-9]{0,3}(?:\.c[12]?)?", fullmatch=True
)


@given(st.lists(HOSTNAMES, min_size=1, max_size=12))
def test_a_folded_list_expands_to_the_same_hosts(names):
    assert sorted(expand_hostnames(fold_hostnames(names))) == sorted(set(names))
    assert expand_hostnames("r[1-2]n[09-10]-ib,n1") == (
        *("r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"), "n1",
    )  # fmt: skip


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 4))
def test_folded_numbers_say_the_same(numbers, most):
    whole = fold_numbers(numbers)
    unfolded = set()
    for item in whole.split(","):
        low, _, high = item.partition("-")
        unfolded |= set(range(int(low), int(high or low) + 1))
    assert unfolded == set(numbers)
    ranges = whole.split(",")
    short = ranges if len(ranges) <= most else [*ranges[:most], "…"]
    assert fold_numbers(numbers, most=most) == ",".join(short)


@pytest.mark.parametrize("text", ["", ",", "n[x]", "n[1-x]"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError, match=r"no host|invalid literal"):
        expand_hostnames(text)
