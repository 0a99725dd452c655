"""On which cores the ranks of a node run where no launcher has bound them."""

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import launchers
from facts import messages
from mpiddp.launch.device.binding import (
    Topology,
    bind_threads,
    choose_masks,
    find_allotted_cpus,
    find_near_cpus,
    read_topology,
)
from mpiddp.launch.device.device import Placement, choose_cores
from mpiddp.launch.summary import describe_cores
from mpiddp.process.cpus import find_cpus


def span(low: int, high: int) -> frozenset[int]:
    return frozenset(range(low, high + 1))


def make_topology(nodes: list[int], threads: int = 1) -> Topology:
    """NUMA nodes of so many cores; the second threads of all cores come after the first ones."""
    total = sum(nodes)
    cores = [frozenset(range(core, total * threads, total)) for core in range(total)]
    edges = [0, *itertools.accumulate(nodes)]
    parts = [cores[low:high] for low, high in itertools.pairwise(edges)]
    return Topology(tuple(frozenset().union(*part) for part in parts), tuple(cores))


# Two sockets of 4 cores with 2 threads each: CPUs 0-3 and 8-11, 4-7 and 12-15.
SOCKETS = make_topology([4, 4], 2)
LEFT, RIGHT = span(0, 3) | span(8, 11), span(4, 7) | span(12, 15)
ALL = LEFT | RIGHT
FREE = frozenset[int]()


def choose(near, topology=SOCKETS, allotted=ALL, kind="cores"):
    found = choose_masks(topology, allotted, near, kind)
    return None if found is None else [sorted(mask) for mask in found]


def test_ranks_share_the_numa_nodes_and_their_cores():
    assert choose([FREE] * 4) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    # A rank is on one node, even where shares are not alike then.
    assert choose([FREE] * 3) == [[0, 1, 8, 9], [2, 3, 10, 11], sorted(RIGHT)]
    assert choose([FREE] * 8) == [[core, core + 8] for core in range(8)]


def test_ranks_are_near_their_gpus():
    # GPUs 0 and 1 hang on the right socket.
    halves = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert choose([RIGHT, RIGHT, LEFT, LEFT]) == halves[2:] + halves[:2]
    # A virtual machine that does not tell: near is everything.
    assert choose([ALL] * 2) == [sorted(LEFT), sorted(RIGHT)]


def test_a_control_group_is_kept():
    # Slurm gave cores of one socket, the GPUs are on both.
    allotted = span(0, 3) | span(8, 11)
    assert choose([LEFT, RIGHT], allotted=allotted) == [[0, 1, 8, 9], [2, 3, 10, 11]]
    # One core near GPUs 0 to 2, three that are far: near is no good for three ranks.
    allotted = frozenset({0, 8, 4, 12, 5, 13, 6, 14})
    assert choose([LEFT] * 3, allotted=allotted) == [[0, 8], [4, 12], [5, 6, 13, 14]]


def test_nobody_is_bound_to_a_single_core_unasked():
    assert choose([FREE] * 5, kind="auto") is None
    # Two threads are no two cores.
    assert choose([FREE] * 2, allotted=frozenset({0, 8, 1}), kind="auto") is None
    # Near their GPUs they would have one each.
    assert choose([LEFT] * 3, kind="auto") is None


def test_nobody_is_bound_in_vain():
    assert choose([FREE] * 4, kind="none") is None
    assert choose([FREE]) is None
    assert choose([FREE] * 9, kind="numa") is None
    assert choose([FREE] * 3, kind="numa") == [sorted(LEFT)] * 2 + [sorted(RIGHT)]


@given(
    nodes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    threads=st.integers(1, 2),
    ranks=st.integers(2, 9),
    data=st.data(),
)
def test_shares_are_fair_whatever_the_machine(nodes, threads, ranks, data):
    topology = make_topology(nodes, threads)
    cpus = frozenset().union(*topology.nodes)
    allotted = data.draw(st.frozensets(st.sampled_from(sorted(cpus)), min_size=1))
    near = data.draw(
        st.lists(st.sampled_from([FREE, *topology.nodes]), min_size=ranks, max_size=ranks)
    )
    masks = choose_masks(topology, allotted, near, "cores")
    cores = [core & allotted for core in topology.cores if core & allotted]
    if ranks > len(cores):
        assert masks is None
        return
    assert masks is not None and len(masks) == ranks
    for mask in masks:
        # Whole cores of one node that the ranks may use.
        assert mask and mask <= allotted
        assert any(mask <= node for node in topology.nodes)
        assert all(core <= mask for core in cores if core & mask)
    for one, other in itertools.combinations(masks, 2):
        assert not one & other


def write_machine(root, nodes, siblings):
    for number, text in enumerate(nodes):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n")
    for cpu, text in siblings.items():
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        if text:
            (folder / "thread_siblings_list").write_text(f"{text}\n")
    (root / "devices/system/cpu/cpufreq").mkdir()


def test_the_machine_is_read_from_the_system(tmp_path):
    # Eleven nodes, so that their names do not sort; one of memory alone; CPU 5 on none of them.
    nodes = ["0,3", "1-2,4", *[""] * 8, "6"]
    pairs = {0: "0,3", 3: "0,3", 1: "1-2", 2: "1-2", 4: "4", 5: "", 6: ""}
    write_machine(tmp_path, nodes, pairs)
    found = read_topology(tmp_path)
    assert found.nodes == ({0, 3}, {1, 2, 4}, {6}, {5})
    assert found.cores == ({0, 3}, {1, 2}, {4}, {5}, {6})
    empty = tmp_path / "empty"
    (empty / "devices/system/cpu/cpu0").mkdir(parents=True)
    assert read_topology(empty) == Topology((frozenset({0}),), (frozenset({0}),))


def test_near_cpus_are_read_from_the_system(tmp_path):
    folder = tmp_path / "bus/pci/devices/0000:c1:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("0-3,8,10-11\n")
    assert find_near_cpus("0000:c1:00.0", tmp_path) == {0, 1, 2, 3, 8, 10, 11}
    assert find_near_cpus("0000:c2:00.0", tmp_path) == find_near_cpus(None) == frozenset()
    (folder / "local_cpulist").write_text("\n")
    assert find_near_cpus("0000:c1:00.0", tmp_path) == frozenset()


def test_a_bound_process_knows_what_it_could_have():
    everything = find_cpus()
    try:
        bind_threads({min(everything)})
        assert find_cpus() == {min(everything)} == os.sched_getaffinity(0)
        assert find_allotted_cpus() == everything
        assert find_cpus() == {min(everything)}
    finally:
        bind_threads(everything)


def place(rank, cores=ALL, index=None, near=FREE):
    gpus = () if index is None else (index,)
    return Placement(rank, gpus, index, None, cores, allotted=ALL, near=near)


def test_what_a_launcher_has_bound_stays_bound(monkeypatch):
    monkeypatch.setattr("mpiddp.launch.device.device.read_topology", lambda: SOCKETS)
    assert choose_cores([place(0), place(1)], "cores") == [LEFT, RIGHT]
    assert choose_cores([place(0), place(1, cores=LEFT)], "cores") is None
    assert choose_cores([place(0, LEFT), place(1, LEFT)], "numa") is None
    # Nobody knows where the second one's GPU is.
    assert choose_cores([place(0, index=0, near=LEFT), place(1, index=1)], "cores") is None
    near = [place(0, index=0, near=RIGHT), place(1, index=1, near=LEFT)]
    assert choose_cores(near, "cores") == [RIGHT, LEFT]


def test_masks_are_shown_folded():
    assert describe_cores([span(0, 3), LEFT]) == "0-3 | 0-3,8-11 by local rank"
    many = [frozenset({core}) for core in range(9)]
    assert describe_cores([span(0, 7)] * 2, [2.0] * 2) == "0-7, shared; time of 2 of them (quota)"
    assert describe_cores([span(0, 7)] * 2, [8.0] * 2) == "0-7, shared"
    assert describe_cores(many) == "0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | … by local rank"


SHOW = """
import os, threading, mpiddp
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.options import Options
from mpiddp.launch.startup import start
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
with start(Options(timeout=60, bind="cores"), FailureHandler()) as session:
    masks = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
    if session.world.rank == 0:
        print(os.environ["OMP_NUM_THREADS"])
    print("inside", session.world.rank, *masks)
stop.set()
thread.join()
print("after", tuple(sorted(os.sched_getaffinity(0))))
"""


@pytest.mark.mpi
def test_ranks_get_cores_of_their_own_until_the_session_ends():
    everything = find_allotted_cpus()
    result = launchers.run("mpich", 2, ["-c", SHOW]).expect(0)
    masks = choose_masks(read_topology(), everything, [FREE] * 2, "cores") or [everything] * 2
    lines = result.stdout.splitlines()
    for rank, mask in enumerate(masks):
        assert f"inside {rank} {tuple(sorted(mask))}" in lines
    assert lines.count(f"after {tuple(sorted(everything))}") == 2
    assert str(max(1, len(frozenset().union(*masks)) // 2)) in lines
    assert f"cores           {describe_cores(masks)}\n" in result.stderr
    assert messages(result) == ["mpiddp: started"]
