"""Calls of real ranks: what they compute and mean, and what they say of mistakes."""

import re
import threading
from collections import defaultdict

import pytest
import torch

import battery
import launchers
import meanings
import mistakes
import mpiddp
from mpiddp.collectives.bootstrap import ensure_communicator

SIZE = 3


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
    reports = pool(name, size).call(battery.run, *parts, timeout=140.0, env=variables).values
    battery.check_reports(reports)
    described = reports[0]["describe"]
    assert sorted(described["transports"]) == sorted(battery.TRANSPORTS[1:])
    assert described["transports"][0] == "shared-memory"
    assert described["nodes"] == [size] and described["notes"] == []
    assert described["single_copy"] is True and described["wait"] == wait


@pytest.mark.parametrize(
    ("nodes", "part", "first"),
    [([0, 1, 0], "sums", "shared-memory+mpi"), ([0, 1, 2], "moves", "mpi")],
    ids=str,
)
def test_calls_between_nodes_are_exact(nodes, part, first, pool):
    """On uneven nodes in cyclic order, and on nodes of one rank each."""
    cut = {"MPIDDP_MESSAGE_BYTES": "30000"} if part == "sums" else {}
    called = pool("mpich", 3).call(battery.run_on_nodes, nodes, part, timeout=140.0, env=cut)
    battery.check_reports(called.values)
    described = called.values[0]["describe"]
    assert described["transports"][0] == first
    assert "shared-memory" not in described["transports"]
    assert described["nodes"] == [nodes.count(node) for node in sorted(set(nodes))]


@pytest.mark.parametrize(
    "name",
    [
        "openmpi",
        pytest.param("mpich", marks=pytest.mark.long),
        pytest.param("impi", marks=launchers.marks_of("impi")),
    ],
)
def test_what_calls_mean(name, pool):
    reports = pool(name, SIZE).call(meanings.run).values
    # Nobody leaves a barrier before the last one has come.
    for times in zip(*(report["times"] for report in reports), strict=True):
        assert max(came for came, _ in times) <= min(left for _, left in times)
    for report in reports:
        for transport, done in report["done"].items():
            assert done == sorted(done) and len(done) == 12, transport
    # What one rank adds, another one may not add in another way.
    rounded = defaultdict(set)
    for report in reports:
        for call, bits in report["rounded"]:
            rounded[call].add(bits)
    assert len(rounded) > 50
    assert {call for call, bits in rounded.items() if len(bits) > 1} == set()


def test_what_is_a_number_on_one_rank_has_the_same_bits_on_all(pool):
    """Of NaNs, ranks may keep different payloads: all were put in by some rank."""
    first, *others = pool("openmpi", SIZE).call(meanings.add_nans).values
    payloads = {f"{rank + 1:x}" for rank in range(SIZE)}
    for other in others:
        for (call, bits), (_, found) in zip(first, other, strict=True):
            assert len(bits) == len(found)
            for mine, theirs in zip(bits, found, strict=True):
                assert mine == theirs or {mine, theirs} <= payloads, call
    assert any(value in payloads for _, bits in first for value in bits)


ALONE = """
import os, torch, mpiddp
try:
    mpiddp.all_reduce(torch.ones(3))
except mpiddp.errors.ConfigurationError as error:
    print(error, flush=True)
# Nobody catches what is raised outside of a session: it is a plain exception.
if os.fork() == 0:
    mpiddp.init().close()
    mpiddp.shared_empty(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
mpiddp.init().close()
with mpiddp.init(timeout=30) as session:
    for op in ("sum", "average", "product", "min", "max"):
        for transport in ("auto", "mpi", "torch", "shared-memory"):
            tensor = torch.tensor([3.0, -2.0])
            assert mpiddp.all_reduce(tensor, "auto", transport, op) is tensor
            assert tensor.tolist() == [3.0, -2.0]
    assert mpiddp.all_reduce(tensor, "ring", async_op=True).wait() is tensor
    assert mpiddp.reduce_scatter(tensor).tolist() == [3.0, -2.0]
    assert mpiddp.all_gather(tensor) is mpiddp.broadcast(tensor) is mpiddp.reduce(tensor) is tensor
    shared = mpiddp.shared_empty((2, 2), torch.float64)
    assert mpiddp.all_reduce(shared).tolist() == [[0.0, 0.0]] * 2
    mpiddp.barrier()
    assert mpiddp.describe_collectives()["nodes"] == [1]
    try:
        mpiddp.all_reduce(torch.ones(2, 3).t())
    except mpiddp.errors.ConfigurationError as error:
        print(error)
    mpiddp.broadcast(tensor, src=1)
"""


def test_one_rank_alone_needs_no_mpi_and_a_call_without_a_session_is_a_mistake():
    result = launchers.run("alone", 1, ["-c", ALONE]).expect(2)
    outside, inside = result.stdout.splitlines()
    assert outside == "there is no session: call mpiddp.init() first"
    assert inside.startswith("expected a contiguous tensor")
    plain, _, reported = result.stderr.partition(f"ConfigurationError: {outside}\n")
    assert "Traceback" in plain
    said = "mpiddp: src must be 0 to 0, found 1 (called at <string>:30)"
    assert reported.strip().splitlines()[-1] == said
    assert "Traceback" not in reported


def test_mistakes_are_said_in_one_line_on_every_rank(pool):
    patterns = [pattern for _, pattern in (*mistakes.VARIABLES, *mistakes.CALLS)]
    for said in pool("openmpi", SIZE).call(mistakes.run).values:
        for each, pattern in zip(said, patterns, strict=True):
            assert re.match(pattern, each) and "\n" not in each, (pattern, each)


def begin_in_two_threads(session: mpiddp.Session) -> tuple[int, list[float]]:
    """How often the collectives are made by two threads that both come first; a sum over MPI."""
    before, session.collectives = session.collectives, None
    both, found, tensor = threading.Barrier(2), [], torch.ones(3)

    def begin() -> None:
        both.wait()
        found.append(ensure_communicator())

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mpiddp.all_reduce(tensor, transport="mpi")
    session.collectives = before or session.collectives
    return len(set(found)), tensor.tolist()


def test_the_first_call_may_be_that_of_two_threads(pool):
    assert pool("openmpi", 2).call(begin_in_two_threads).values == [(1, [2.0] * 3)] * 2


HUGE = (1 << 29) + 12345
"""Elements of four bytes: more bytes than MPI, and one copy between processes, count."""


def add_huge_tensors(session: mpiddp.Session) -> list[bool]:
    """Whether all of a tensor is right that was summed over a transport, for each."""
    tensor, right = torch.empty(HUGE), []
    for transport in ("shared-memory", "mpi", "torch"):
        tensor.fill_(session.world.rank + 1)
        mpiddp.all_reduce(tensor, transport=transport)
        right.append(all(bool((part == 3).all()) for part in tensor.split(1 << 24)))
    return right


@pytest.mark.long
def test_tensors_longer_than_mpi_counts_are_summed(pool):
    assert pool("openmpi", 2).call(add_huge_tensors, timeout=500).values == [[True] * 3] * 2
