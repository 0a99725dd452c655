"""What collective calls mean, and what they say to those who make mistakes."""

from __future__ import annotations

import re
import threading
from collections import defaultdict

import pytest
import torch

import launchers
import meanings
import mistakes
import mpiddp
from mpiddp.collectives.bootstrap import ensure_communicator

SIZE = 3


@pytest.mark.parametrize(
    "name",
    [
        "openmpi",
        pytest.param("mpich", marks=pytest.mark.long),
        pytest.param("impi", marks=launchers.marks_of("impi")),
    ],
)
@pytest.mark.mpi
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


@pytest.mark.mpi
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


CONTIGUOUS = r"expected a contiguous tensor, found one of shape .*: call \.contiguous\(\) first"
SUMMED = r"expected a tensor of float64, float32, int64, int32, float16, bfloat16, found "
SAID = {
    "transposed": CONTIGUOUS,
    "sparse, like one before": r"expected a dense tensor, found one of layout torch.sparse_coo",
    "transposed, like one before": CONTIGUOUS,
    "leaf, like one before": r"a leaf that requires grad cannot be changed in place: .*",
    "negative, like one before": r"expected a tensor whose memory holds its values: call .*",
    "meta": r"expected a CPU or CUDA tensor, found one on meta",
    "no tensor": r"expected a torch tensor, found list",
    "conjugate": r"expected a tensor whose memory holds its values: call .*resolve_conj.*",
    "operator of torch for an algorithm": r"'max' is no algorithm, but an operator: op='max'",
    "input and output": r"algorithm: expected a name, found a tensor: a call has one tensor, .*",
    "operator of torch": r"op: expected ReduceOp.SUM, AVG, PRODUCT, MIN, MAX, found ReduceOp.BAND",
    "list of names": r"algorithm: expected a name, found \['ring'\]",
    "name for a rank": r"src or dst: expected the number of a rank, found '0'",
    "name for a type": r"reduction_dtype: expected a torch type, found 'float64'",
    "shape of halves": r"shape: expected integers, found 2.5",
    "algorithm": r"no algorithm is called 'rong' \(did you mean ring\?\); there are .*\bring\b.*",
    "server": r"central leaves out the buffers of 1 of \d ranks, which only serve: use "
    r"gather-broadcast or direct, which include them",
    "transport": r"no transport is called 'pigeon'; there are auto, .*\bmpi\b.*",
    "operator": r"no operator is called 'median'; there are sum, average, product, min, max",
    "bool": SUMMED + "bool",
    "int8": SUMMED + "int8",
    "complex128 moved": r"expected elements of 1, 2, 4 or 8 bytes, found complex128",
    "integer average": r"an average of int64 is no integer: .*",
    "integers widely": r"reduction_dtype must be int32 or a wider .*, found float64",
    "root too high": r"src must be 0 to 2, found 9",
    "no root": r"ring has no single root, so it makes no reduce; binomial-tree, for example, does",
    "no all-reduce": r"ScheduleError: double on 3 ranks is no all-reduce: step 1: the contribution "
    r"of rank 1 is added twice",
    **{
        f"another on each rank, {transport}": r"the schedule of drawn must be the same on all "
        r"ranks, but it differs from rank 0's on rank 1: rank 0 has \d+, rank 1 has \d+"
        for transport in ("mpi", "torch")
    },
    "no half": r"ScheduleError: lopsided on 3 ranks cannot be halved: its first 1 of 3 steps are "
    r"no reduce: at the end rank 0's sum of chunk 0 lacks rank 2",
    "operator for an algorithm": r"'average' is no algorithm, but an operator: op='average'",
    "two lengths": r"dtype: expected a torch type, found 3; a shape is one argument, as \(4, 3\)",
    "root that equals one": r"src or dst: expected the number of a rank, found 0\.0",
    "name for a type, shared": r"dtype: expected a torch type, found 'float32'; .*",
    "negative shape": r"expected lengths >= 0, found \(3, -1\)",
    "wait": r"MPIDDP_WAIT on rank 0: expected spin, yield, sleep, found 'doze'",
    "wait differs": r"MPIDDP_WAIT must be the same .*rank 0 has 'spin', rank 1 has 'sleep'",
    "wait of one": r"MPIDDP_WAIT must be the same .*rank 0 has '', rank 1 has 'yield'",
    "no message bytes": r"MPIDDP_MESSAGE_BYTES: expected bytes >= 8, found '0'",
    "message bytes differ": r"MPIDDP_MESSAGE_BYTES must be the same .*4096.*4098.*",
}


@pytest.mark.mpi
def test_mistakes_are_said_in_one_line_on_every_rank(pool):
    wanted = {**SAID, "shared memory": "nothing was said"}
    for report in pool("openmpi", SIZE).call(mistakes.run).values:
        assert report.keys() == wanted.keys()
        odd = {
            case: report[case] for case in wanted if not re.fullmatch(wanted[case], report[case])
        }
        assert odd == {}


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


@pytest.mark.mpi
def test_the_first_call_may_be_that_of_two_threads(pool):
    assert pool("openmpi", 2).call(begin_in_two_threads).values == [(1, [2.0] * 3)] * 2


HUGE = (1 << 29) + 12345
"""Elements of four bytes: more bytes than MPI, and one copy between processes, count."""
PART = 1 << 24


def add_huge_tensors(session: mpiddp.Session) -> dict[str, bool]:
    """The same tensor summed over each transport; whether all of it was right afterwards."""
    rank, size = session.world.rank, session.world.size
    # Its period divides no length at which anything is cut.
    period = 251
    values = torch.arange(period).repeat(PART // period + 2).to(torch.float32)
    tensor = torch.empty(HUGE)
    parts = [
        (part, values[start % period :][: len(part)])
        for start, part in zip(range(0, HUGE, PART), tensor.split(PART), strict=True)
    ]
    for part, expected in parts:
        torch.add(expected, rank, out=part)
    scale, offset, right = 1, 0, {}
    for transport in ("shared-memory", "mpi", "torch"):
        mpiddp.all_reduce(tensor, transport=transport)
        scale, offset = scale * size, offset * size if offset else sum(range(size))
        right[transport] = all(
            torch.equal(part, expected.mul(scale).add_(offset)) for part, expected in parts
        )
    return right


@pytest.mark.long
@pytest.mark.mpi
def test_tensors_longer_than_mpi_counts_are_summed(pool):
    expected = {"shared-memory": True, "mpi": True, "torch": True}
    assert pool("openmpi", 2).call(add_huge_tensors, timeout=500).values == [expected] * 2
