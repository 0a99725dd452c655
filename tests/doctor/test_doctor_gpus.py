"""GPUs of a node and of the whole job."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpu_trees
from mpiddp.doctor.gpu import gpus
from mpiddp.doctor.gpu.gpus import Gpu
from mpiddp.launch.device.device import Placement
from mpiddp.launch.fabrics import read_table

ALL = frozenset(range(8))


def place(rank, visible, index, identity):
    return Placement(rank, tuple(range(visible)), index, identity, ALL)


def gpu(rank, name="NVIDIA H200", nccl="2.27.3", peers=True, near=ALL, speed=6e14):
    return Gpu(rank, name, nccl, peers, frozenset(near), speed)


def test_gpus_that_torch_does_not_see(tmp_path):
    gpu_trees.add_nvidia(tmp_path, 2)
    assert gpus.count_present(tmp_path) == 2
    gpu_trees.add_amd(tmp_path, range(1, 9))
    assert gpus.count_present(tmp_path) == 8
    blind = replace(place(0, 0, None, None), unseen="torch sees none of the 8 AMD GPUs")
    finding = gpus.judge_count("n1", [blind], [], 8)
    assert (finding.status, finding.found) == ("warn", blind.unseen)
    finding = gpus.judge_count("n1", [place(0, 0, None, None)], [], 2)
    assert (finding.status, finding.found) == ("warn", "2 GPUs here, but torch sees none")
    assert "torch.version.cuda" in finding.advice
    finding = gpus.judge_count("n1", [place(0, 0, None, None)], [], 0)
    assert (finding.status, finding.found) == ("skip", "no GPUs: ranks compute on the CPU")
    assert gpus.judge_place([], {}).status == "skip"


@pytest.mark.parametrize(
    ("versions", "status", "words"),
    [
        (("2.27.3",), "pass", "NCCL 2.27.3: nothing known against it"),
        (("2.29.2",), "warn", "NCCL 2.29.2: it may hang; 2.29.3 does not (https://"),
        (("2.27.3", "2.29.2"), "warn", "NCCL 2.27.3, NCCL 2.29.2: it may hang"),
        (("",), "skip", "no NCCL"),
    ],
)
def test_versions_that_are_known_to_be_bad(versions, status, words):
    rows = read_table().versions
    found = [gpu(rank, nccl=version) for rank, version in enumerate(versions)]
    finding = gpus.judge_nccl(found, rows, "x86_64")
    assert finding.status == status and words in finding.found
    # The numbers are NCCL's; RCCL has others of its own.
    other = [replace(each, library="RCCL") for each in found]
    assert gpus.judge_nccl(other, rows, "x86_64").status != "warn"


def test_one_gpu_for_each_rank():
    placements = [place(rank, 2, rank, f"GPU-{rank}") for rank in range(2)]
    finding = gpus.judge_count("n1", placements, [gpu(0), gpu(1)], 2)
    assert finding.status == "pass"
    assert finding.found == (
        "NVIDIA H200, one for each of 2 ranks (2 UUIDs), with access to each other's memory"
    )
    finding = gpus.judge_count("n1", placements, [gpu(0, peers=None), gpu(1, peers=None)], 2)
    assert "access" not in finding.found
    placements[0] = replace(placements[0], unseen="torch sees 2 of the 3 GPUs")
    assert "; torch sees 2 of" in gpus.judge_count("n1", placements, [gpu(0)], 2).found


@pytest.mark.parametrize(
    ("placements", "found_gpus", "words"),
    [
        ([place(0, 8, 0, "A")], [gpu(0)], "8 GPUs visible, 1 of them used"),
        ([place(0, 1, 0, "A"), place(1, 0, None, None)], [gpu(0)], "ranks 1 see no GPU"),
        # CUDA_VISIBLE_DEVICES=0 left set on a node of eight.
        ([place(0, 1, 0, "A")], [gpu(0, peers=None)], "8 GPUs here, 1 of them visible"),
        (
            [place(0, 8, 0, "A"), place(1, 8, 0, "A")],
            [gpu(0), gpu(1)],
            "ranks 0-1 share GPUs, as --allow-shared-gpu lets them",
        ),
        (
            [place(rank, 8, rank, f"GPU-{rank}") for rank in range(8)],
            [gpu(rank, peers=rank > 1) for rank in range(8)],
            "the GPUs of ranks 0-1 cannot read the memory of all others",
        ),
    ],
)
def test_gpus_that_are_idle_lacking_shared_or_apart(placements, found_gpus, words):
    finding = gpus.judge_count("n1", placements, found_gpus, 8)
    assert finding.status == "warn" and words in finding.found and finding.advice


def test_what_a_batch_system_keeps_for_others_is_not_idle():
    placements = [place(rank, 2, rank, f"GPU-{rank}") for rank in range(2)]
    cards = [gpu(0), gpu(1)]
    assert gpus.judge_count("n1", placements, cards, 8, are_allotted=True).status == "pass"
    assert gpus.judge_count("n1", placements, cards, 8).status == "warn"


def test_ranks_that_see_one_gpu_each_are_remarked_on():
    placements = [place(rank, 1, 0, f"GPU-{rank}") for rank in range(2)]
    finding = gpus.judge_count("n1", placements, [gpu(0, peers=None), gpu(1, peers=None)], 2)
    assert finding.status == "pass"
    assert "; each rank sees one GPU, which is its device 0" in finding.found
    idle = gpus.judge_count("n1", placements, [gpu(0, peers=None), gpu(1, peers=None)], 8)
    assert idle.status == "warn" and "; each rank sees one GPU" in idle.found
    # The same words on every node, so that nodes fold.
    assert "n1" not in finding.found


KINDS = st.tuples(st.sampled_from(["H200", "A100"]), st.sampled_from(["2.27.3", "2.21.5", ""]))


@given(st.lists(KINDS, min_size=1, max_size=6))
def test_kinds_are_compared_over_the_whole_job(kinds):
    cards = [gpu(rank, *kind) for rank, kind in enumerate(kinds)]
    finding = gpus.judge_kinds(cards, {rank: f"n{rank}" for rank in range(len(kinds))})
    assert finding.status == ("pass" if len(set(kinds)) == 1 else "warn")
    for name, nccl in kinds:
        assert name in finding.found and nccl in finding.found
    assert finding.found.count(": ") == len(set(kinds)) or len(set(kinds)) == 1
    assert ("of one kind" in finding.advice) == (len({name for name, _ in kinds}) > 1)
    assert ("same NCCL" in finding.advice) == (len({nccl for _, nccl in kinds}) > 1)


def test_nodes_without_gpus_are_another_kind():
    finding = gpus.judge_kinds([gpu(0, "H200")], {0: "n1"}, ["n2", "n3"])
    assert finding.status == "warn" and "--devices cuda" in finding.advice
    assert finding.found == "n[2-3]: no GPU; n1: H200, NCCL 2.27.3"


def test_ranks_far_from_their_gpus():
    cores = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
    near = [gpu(0, near={0, 1}), gpu(1, near={2, 3})]
    assert gpus.judge_place(near, cores).status == "pass"
    crossed = [gpu(0, near={2, 3}), gpu(1, near={0, 1})]
    finding = gpus.judge_place(crossed, cores)
    assert finding.status == "warn"
    assert "rank 0 runs on 0-1, its GPU is near 2-3" in finding.found
    assert "rank 1 runs on 2-3, its GPU is near 0-1" in finding.found
    unknown = [gpu(0, near=()), gpu(1, near=())]
    assert gpus.judge_place(unknown, cores).status == "skip"


def test_a_speed_is_that_of_the_quickest_products(monkeypatch):
    products = []

    class Event:
        """Each product takes 1 ms, in the first round 3 ms."""

        def __init__(self, enable_timing):
            self.at, self.is_over = None, False

        def record(self):
            self.at = len(products) + 2 * min(len(products), 10)

        def synchronize(self):
            self.is_over = True

        def elapsed_time(self, end):
            assert end.is_over
            return end.at - self.at

    monkeypatch.setattr(gpus, "find_module", lambda: SimpleNamespace(Event=Event))
    monkeypatch.setattr(torch, "mm", lambda left, right, out: products.append(left.shape))
    monkeypatch.setattr(gpus, "EDGE", 10)
    # 10 × 10 sums of 10 products each.
    assert gpus.measure_product(torch.device("cpu")) == pytest.approx(2000 / 1e-3)
    assert set(products) == {(10, 10)}


SPEEDS = st.lists(st.floats(1e12, 1e15), min_size=1, max_size=9)


@given(SPEEDS)
def test_exactly_the_slow_ones_are_named(speeds):
    cards = [gpu(rank, speed=speed) for rank, speed in enumerate(speeds)]
    hosts = {rank: f"n{rank}" for rank in range(len(speeds))}
    finding = gpus.judge_speed(cards, hosts)
    ordered = sorted(speeds)
    middle = (ordered[(len(speeds) - 1) // 2] + ordered[len(speeds) // 2]) / 2
    slow = {rank for rank, speed in enumerate(speeds) if speed < 0.8 * middle}
    named = {rank for rank in range(len(speeds)) if f"rank {rank} on n{rank} " in finding.found}
    assert named == slow and finding.status == ("warn" if slow else "pass")


def test_unlike_gpus_are_compared_with_their_own_kind():
    rows = [("H200", 6e14), ("H200", 6.1e14), ("T4", 4e13), ("T4", 4.1e13), ("H200", 3e14)]
    cards = [gpu(rank, name, speed=speed) for rank, (name, speed) in enumerate(rows)]
    hosts = {**dict.fromkeys(range(4), "n"), 4: "n9"}
    assert gpus.judge_speed(cards[:4], hosts).status == "pass"
    finding = gpus.judge_speed(cards, hosts)
    assert finding.status == "warn" and "but rank 4 on n9 300" in finding.found
