"""Collective calls of real ranks: what they compute, over every transport, is exact."""

from __future__ import annotations

import pytest

import battery
import launchers

pytestmark = pytest.mark.mpi

DEADLINE = 140.0


@pytest.mark.parametrize(
    ("name", "size", "parts", "variables", "wait"),
    [
        # A pool leaves the ranks two cores, and more ranks than cores must not spin.
        ("openmpi", 2, ("sums", "moves"), {"MPIDDP_WAIT": ""}, "spin"),
        pytest.param(
            *("mpich", 3, ("sums", "moves")),
            {"MPIDDP_WAIT": "", "MPIDDP_MESSAGE_BYTES": "30000"},
            "yield",
            marks=pytest.mark.long,
        ),
        pytest.param("openmpi", 5, ("sums",), {"MPIDDP_WAIT": ""}, "yield", marks=pytest.mark.long),
        *[pytest.param(name, 2, ("moves",), {"MPIDDP_WAIT": "yield"}, "yield",
                       marks=pytest.mark.long)
          for name in launchers.OPTIONAL if not launchers.table()[name].missing()],
    ],
)  # fmt: skip
def test_calls_on_one_node_are_exact(name, size, parts, variables, wait, pool):
    reports = pool(name, size).call(battery.run, *parts, timeout=DEADLINE, env=variables).values
    battery.check_reports(reports)
    described = reports[0]["describe"]
    assert sorted(described["transports"]) == sorted(battery.TRANSPORTS[1:])
    assert described["transports"][0] == "shared-memory"
    assert described["nodes"] == [size] and described["notes"] == []
    assert described["single_copy"] is True and described["wait"] == wait
    assert reports[0]["chosen"]["64"] == "one-shot over shared-memory"
    assert reports[0]["chosen"][str(1 << 22)] == "direct over shared-memory"


@pytest.mark.parametrize(
    ("nodes", "part", "chosen"),
    [
        (
            [0, 1, 0],
            "sums",
            [
                f"two-level:inner=direct,outer={outer} over shared-memory+mpi"
                for outer in ("recursive-doubling", "ring")
            ],
        ),
        ([0, 1, 2], "moves", ["recursive-doubling over mpi", "ring over mpi"]),
    ],
)
def test_calls_between_nodes_are_exact(nodes, part, chosen, pool):
    """On uneven nodes in cyclic order, and on nodes of one rank each."""
    cut = {"MPIDDP_MESSAGE_BYTES": "30000"} if part == "sums" else {}
    called = pool("mpich", 3).call(battery.run_on_nodes, nodes, part, timeout=DEADLINE, env=cut)
    reports = called.values
    battery.check_reports(reports)
    described = reports[0]["describe"]
    assert described["transports"][0] == chosen[0].rpartition(" ")[2]
    assert "shared-memory" not in described["transports"]
    assert described["nodes"] == [nodes.count(node) for node in sorted(set(nodes))]
    for report in reports:
        assert [report["chosen"][length] for length in ("64", str(1 << 22))] == chosen
