"""Variables that matter: names, and the values of the harmless ones alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp import environment
from mpiddp.doctor.node import variables
from mpiddp.launch.fabrics import NodeFabrics, Setting

NAMES = st.one_of(
    st.sampled_from(sorted(environment.HARMLESS)),
    st.from_regex(r"(NCCL|GLOO|UCX|FI|OMPI_MCA|AWS|WANDB)_[A-Z_]{1,12}", fullmatch=True),
)


@given(st.dictionaries(NAMES, st.just("s3cret-value"), max_size=8))
def test_no_other_value_is_ever_shown(given_variables):
    row = variables.find_variables(given_variables)
    for name, value in row:
        assert name in given_variables
        assert (value is not None) == (name in environment.HARMLESS)
    finding = variables.judge_variables(["n1"], [row])
    harmless = given_variables.keys() & environment.HARMLESS
    assert finding.found.count("s3cret-value") == len(harmless)


def test_what_is_set_is_told():
    row = variables.find_variables(
        {"NCCL_IB_DISABLE": "1", "NCCL_SECRET": "x", "HOME": "/root", "PATH": "/bin"}
    )
    finding = variables.judge_variables(["n1"], [row])
    assert (finding.status, finding.found) == ("pass", "NCCL_IB_DISABLE=1, NCCL_SECRET")
    assert variables.judge_variables(["n1"], [()]).found == "none of those that matter is set"


SETTINGS = (
    Setting(variable="NCCL_CROSS_NIC", value="1", why="quicker"),
    Setting(variable="NCCL_NET", value="X", needs_nodes=True, why="it stops"),
    Setting(variable="NCCL_IB_DISABLE", wrong=("[1-9]*",), why="it goes over TCP"),
)
NODE = NodeFabrics({"InfiniBand": ("mlx5_0",)}, ("NVIDIA",), settings=SETTINGS)


@pytest.mark.parametrize(
    ("node", "given_variables", "nodes", "status", "words"),
    [
        (NodeFabrics(), {}, 2, "skip", "no fast network card that is known"),
        (NODE, {}, 1, "warn", "InfiniBand (mlx5_0), NVIDIA: not set: NCCL_CROSS_NIC=1. --site"),
        (NODE, {}, 2, "warn", "not set: NCCL_CROSS_NIC=1 NCCL_NET=X. --site-defaults sets"),
        (NODE, {"NCCL_CROSS_NIC": "0"}, 1, "pass", "InfiniBand (mlx5_0), NVIDIA: nothing is"),
        (
            NODE,
            {"NCCL_CROSS_NIC": "0", "NCCL_IB_DISABLE": "1"},
            1,
            "warn",
            "NCCL_IB_DISABLE=1: it goes over TCP. Unset NCCL_IB_DISABLE",
        ),
    ],
)
def test_what_a_fabric_lacks(node, given_variables, nodes, status, words):
    finding = variables.judge_fabric(node, given_variables, nodes)
    assert finding.status == status and words in finding.text


def test_nodes_that_differ():
    rows = [
        variables.find_variables({"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth0"}),
        variables.find_variables({"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "ens1"}),
        variables.find_variables({"NCCL_ALGO": "Tree", "UCX_TLS": "tcp"}),
    ]
    assert variables.judge_variables(["n1", "n2"], rows[:2]).status == "pass"
    finding = variables.judge_variables(["n1", "n2", "n3"], rows)
    assert finding.status == "warn"
    assert finding.found.startswith("NCCL_ALGO, UCX_TLS differs on n3; set on n1: ")
