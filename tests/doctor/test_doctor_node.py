"""Limits, shared memory, cores, threads and variables of one node; what jobs have left there."""

import os
import resource
import signal
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launchers
from mpiddp import environment
from mpiddp.doctor.node import cores, leftovers, limits, variables
from mpiddp.doctor.node.cores import RankCores
from mpiddp.doctor.node.limits import UNLIMITED, Limits
from mpiddp.launch.fabrics import NodeFabrics, Setting
from mpiddp.process.rank_process import read_stat
from mpiddp.wording import describe_size

GIB = 1 << 30


def make_limits(files=4096, locked=UNLIMITED, shared=8 * GIB, free=4 * GIB, infiniband=()):
    return Limits(files, 1 << 20, locked, shared, free, infiniband, 0, "")


@pytest.mark.parametrize(
    ("given_limits", "status", "words"),
    [
        (make_limits(locked=65536), "skip", "no fast network card"),
        (make_limits(infiniband=("mlx5_0",)), "pass", "unlimited, for mlx5_0"),
        (make_limits(locked=65536, infiniband=("mlx5_0", "mlx5_1")), "warn", "limited to 64 KiB"),
    ],
)
def test_locked_memory(given_limits, status, words):
    finding = limits.judge_locked_memory(given_limits)
    assert finding.status == status and words in finding.found
    assert ("ulimit -l unlimited" in finding.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("files", "size", "advised"),
    [
        # A process needs 256 files, and two more for each rank.
        *((264, 4, None), (263, 4, 4096), (1024, 1000, 4096), (1024, 2000, 4256)),
        (UNLIMITED, 10**6, None),
    ],
)
def test_open_files(files, size, advised):
    finding = limits.judge_open_files(make_limits(files), size)
    assert finding.status == ("warn" if advised else "pass")
    if advised:
        assert f"limited to {files}; {size} ranks" in finding.found
        assert f"ulimit -n {advised} " in finding.advice and str(1 << 20) in finding.advice


@pytest.mark.parametrize(
    ("shared", "free", "status", "words"),
    [
        (8 * GIB, 5 * GIB, "pass", "/dev/shm of 8 GiB, at least 4 GiB free"),
        (GIB, 256 << 20, "pass", "at least 256 MiB free"),
        # What a container has by default.
        (64 << 20, 64 << 20, "warn", "/dev/shm of 64 MiB has 64 MiB free"),
        (None, 0, "warn", "there is no /dev/shm"),
    ],
)
def test_shared_memory(shared, free, status, words):
    finding = limits.judge_shared_memory(make_limits(shared=shared, free=free))
    assert finding.status == status and words in finding.found
    assert ("--shm-size" in finding.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("size", "pattern", "ranks", "status", "words"),
    [
        (0, "core", 512, "pass", "none are written"),
        (UNLIMITED, "core", 512, "warn", "512 ranks write as many core files into their working"),
        (1 << 30, "core.%p", 4, "warn", "core files of up to 1 GiB into"),
        # To a program, and to a place of the node.
        (UNLIMITED, "|/usr/lib/systemd/systemd-coredump %P", 512, "pass", "systemd-coredump"),
        (UNLIMITED, "/var/crash/core.%p", 512, "pass", "/var/crash/core.%p"),
        (UNLIMITED, "core", 1, "pass", "written to core"),
    ],
)
def test_core_files(size, pattern, ranks, status, words):
    found = Limits(4096, 4096, UNLIMITED, GIB, GIB, (), size, pattern)
    finding = limits.judge_core_files(found, ranks)
    assert finding.status == status and words in finding.found
    assert ("ulimit -c 0" in finding.advice) == (status == "warn")


def test_limits_are_this_process(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    node = NodeFabrics({"InfiniBand": ("mlx5_0", "mlx5_1")})
    found = limits.find_limits(node, tmp_path)
    assert found.core_files == resource.getrlimit(resource.RLIMIT_CORE)[0]
    assert found.core_pattern == limits.CORE_PATTERN.read_text().strip()
    assert (found.open_files, found.hard_open_files) == (soft, hard)
    assert found.shared_memory >= found.free_shared_memory > 0
    assert found.infiniband == ("mlx5_0", "mlx5_1")
    absent = limits.find_limits(NodeFabrics(), tmp_path / "nowhere")
    assert (absent.shared_memory, absent.infiniband) == (None, ())


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (65536, "64 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5 TiB")],
)
def test_describe_size(size, text):
    assert describe_size(size) == text


# What earlier jobs have left

ORPHAN = """
import os, subprocess, sys
os.environ["MPIDDP_ATTEMPT_TOKEN"] = "gone"
nothing = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child = subprocess.Popen(["sleep", "1000"], start_new_session=True, **nothing)
print(child.pid, flush=True)
"""


def test_a_process_whose_launcher_has_gone_and_its_memory_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr("mpiddp.launch.launcher.leftovers.MEMORY", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    segment = tmp_path / "sm_segment.node1.0.1.0"
    segment.write_bytes(bytes(8192))
    os.utime(segment, (0, 0))
    process = int(launchers.run_python("-c", ORPHAN).stdout)
    try:
        found = leftovers.find_leftovers()
        assert process in found.processes and os.getpid() not in found.processes
        assert (found.files, found.size) == ((str(segment),), 8192)
        monkeypatch.setattr(leftovers, "SHOWN", len(found.processes))
        finding = leftovers.judge_leftovers(found)
        assert finding.status == "warn" and "whose launcher has gone" in finding.found
        assert str(process) in finding.advice and f"rm -r {segment}" in finding.advice
        # In a container a launcher may be process 1: its children are a running job's.
        monkeypatch.setattr(leftovers, "_read_command", lambda _: "mpirun -n 2 python train.py")
        is_below_first = read_stat(process)[1] == "1"
        assert (process in leftovers.find_leftovers().processes) is not is_below_first
    finally:
        os.kill(process, signal.SIGKILL)


GONE, UNUSED = " whose launcher has gone", " of a killed MPI (1 KiB)"
ADVICE = ". If nothing of yours needs them: "


@pytest.mark.parametrize(
    ("processes", "files", "text"),
    [
        ((), "", "no processes, shared memory or directories of earlier jobs"),
        ((7,), "a", f"1 process{GONE} and 1 file or directory{UNUSED}{ADVICE}kill 7; rm -r a"),
        ((), "abcd", f"4 files and directories{UNUSED}{ADVICE}rm -r a b c d"),
        ((1, 2, 3, 4, 5), "", f"5 processes{GONE}{ADVICE}kill 1 2 3 4, and so on"),
    ],
)
def test_what_is_left_behind_is_told(processes, files, text):
    finding = leftovers.judge_leftovers(leftovers.Leftovers(processes, tuple(files), 1024))
    assert finding.text == text
    assert (finding.status == "warn") == bool(finding.advice)


# Cores and threads

MASKS = st.lists(st.frozensets(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5)


def bind(*masks, threads=None):
    return [RankCores(rank, frozenset(mask), threads) for rank, mask in enumerate(masks)]


@given(MASKS)
def test_a_crowd_is_found_exactly_where_there_is_one(masks):
    crowd = cores.find_crowd(dict(enumerate(masks)))
    can_all_have_one = any(len(set(choice)) == len(masks) for choice in product(*masks))
    assert (crowd is None) == can_all_have_one
    if crowd is not None:
        ranks, theirs = crowd
        # The proof: these ranks have these cores only, and are more than they.
        assert frozenset().union(*(masks[rank] for rank in ranks)) == frozenset(theirs)
        assert len(theirs) < len(ranks)


@pytest.mark.parametrize(
    ("masks", "status", "found"),
    [
        (({0}, {0}), "warn", "ranks 0-1 have only core 0 between them"),
        # Rank 2 is free to go elsewhere, and is not named.
        (({3}, {3}, {0, 1, 2, 3}), "warn", "ranks 0-1 have only core 3 between them"),
        (({0, 1}, {0, 1}, {0, 1}), "warn", "ranks 0-2 have only cores 0-1 between them"),
        (({0},), "pass", "1 core for 1 rank"),
        (({0, 1, 2, 3}, {0, 1, 2, 3}), "pass", "4 cores for 2 ranks, shared by all"),
        (({0, 1}, {2, 3}), "pass", "4 cores for 2 ranks, bound to 2 each"),
        (({0}, {1, 2}), "pass", "3 cores for 2 ranks, bound to 1 to 2 each"),
    ],
)
def test_cores(masks, status, found):
    finding = cores.judge_cores(bind(*masks))
    assert (finding.status, finding.found) == (status, found)
    assert ("--cpus-per-task" in finding.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("masks", "threads", "status", "words"),
    [
        (({0, 1, 2, 3},) * 2, None, "pass", "2 per rank (mpiddp's choice)"),
        (({0, 1, 2, 3},) * 2, "2", "pass", "2 per rank (OMP_NUM_THREADS)"),
        (({0, 1, 2, 3},) * 2, "4", "warn", "8 threads of 2 ranks on 4 cores"),
        # More ranks than cores is said once, by the check of cores.
        (({0},) * 2, None, "pass", "1 per rank"),
        (({0, 1, 2, 3},) * 2, "2,4", "pass", "2 per rank (OMP_NUM_THREADS)"),
        (({0, 1, 2, 3},) * 2, "many", "pass", "mpiddp's choice"),
    ],
)
def test_threads(masks, threads, status, words):
    finding = cores.judge_threads(bind(*masks, threads=threads))
    assert finding.status == status and words in finding.found
    if status == "warn":
        assert "gives each rank 2" in finding.advice


def test_a_quota_counts_as_cores():
    masks = ({0, 1, 2, 3},) * 4
    bindings = [RankCores(rank, frozenset(mask), None, 2.0) for rank, mask in enumerate(masks)]
    finding = cores.judge_cores(bindings)
    assert finding.status == "warn" and "4 ranks have the time of 2 cores" in finding.found
    assert cores.judge_threads(bindings[:2]).found == "1 per rank (mpiddp's choice)"
    finding = cores.judge_threads([replace(each, threads="2") for each in bindings[:2]])
    assert finding.status == "warn" and "4 threads of 2 ranks on 2 cores" in finding.found


# Variables: names, and the values of the harmless ones alone

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
            NODE, {"NCCL_CROSS_NIC": "0", "NCCL_IB_DISABLE": "1"}, 1, "warn",
            "NCCL_IB_DISABLE=1: it goes over TCP. Unset NCCL_IB_DISABLE",
        ),
    ],
)  # fmt: skip
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
