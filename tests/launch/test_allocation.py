"""What Slurm says of a job, and how many ranks and cores are made of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher import allocation
from mpiddp.launch.launcher.allocation import Allocation, Node, Record, Request
from mpiddp.launch.launcher.hostnames import expand_hostnames, fold_hostnames

RECORDED = Path(__file__).parents[1] / "recorded"


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_slurms_counts_are_read(counts):
    groups = [(value, len(list(same))) for value, same in itertools.groupby(counts)]
    text = ",".join(f"{value}(x{times})" if times > 1 else f"{value}" for value, times in groups)
    assert allocation.expand_counts(text) == tuple(counts)


@pytest.mark.parametrize("text", ["four", "4(x2", "4x2", "-1"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ConfigurationError, match="Slurm counts as in"):
        allocation.expand_counts(text)


HOSTS = st.lists(
    st.builds(
        "{}{:0{}d}{}".format,
        st.sampled_from(("node", "gpu-a", "r1n")),
        st.integers(0, 300),
        st.sampled_from((1, 3)),
        st.sampled_from(("", "-ib", ".cluster")),
    ),
    min_size=1,
    max_size=20,
    unique=True,
)


@given(HOSTS)
def test_host_lists_are_read_as_they_are_written(hosts):
    assert sorted(expand_hostnames(fold_hostnames(hosts))) == sorted(hosts)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("", 0),
        ("(null)", 0),
        ("gpu", 1),
        ("gpu:2", 2),
        ("gpu:2(IDX:0-1)", 2),
        ("gres:gpu:2", 2),
        ("gres/gpu:a100:2", 2),
        ("gres/gpu=3", 3),
        ("gpu:a100:1(IDX:0),gpu:h100:2(IDX:1,3),shard:7(IDX:0)", 3),
        ("gres/gpu:a100=4,gres/nvme=1", 4),
        ("gpumem:80", 0),
    ],
)
def test_gpus_are_counted(text, gpus):
    assert allocation.read_gpus(text) == gpus


# As `scontrol show job -d` prints it: 22.05 on the virtual cluster, the others put together from
# the documentation of those releases.
@pytest.mark.parametrize(
    ("release", "job", "expected"),
    [
        ("22_05", "1", Record(2, 2, {"node1": 2, "node2": 2}, ("node1", "node2"))),
        (
            "23_11",
            "5170",
            Record(3, 4, dict.fromkeys(("gpu001", "gpu002", "gpu007"), 4),
                   ("gpu001", "gpu002", "gpu007")),
        ),
        ("24_11", "90211", Record(2, None, {"n08": 1, "n09": 2}, ("n08", "n09"))),
    ],
)  # fmt: skip
def test_the_record_of_several_releases(release, job, expected):
    text = (RECORDED / f"scontrol_job_{release}.txt").read_text()
    assert allocation.read_record(text, job) == expected


def test_a_record_that_is_not_this_jobs_says_nothing():
    text = (RECORDED / "scontrol_job_24_11.txt").read_text()
    assert allocation.read_record(text, "9021") == Record(None, None, {}, ())
    assert allocation.read_record("", "1") == Record(None, None, {}, ())


def test_no_count_of_tasks_is_no_contradiction():
    # Slurm may say NumTasks=0 where nobody gave a count.
    text = "JobId=7 JobName=x\n   NumNodes=4 NumCPUs=4 NumTasks=0 CPUs/Task=1 ReqB:S:C:T=0:0:*:*\n"
    assert allocation.read_record(text, "7").tasks is None


VARIABLES = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4,2"}


def test_an_allocation_is_put_together():
    record = Record(3, None, {"n1": 2}, ("n1", "n2"))
    variables = {
        **VARIABLES, "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_GPU": "2",
    }  # fmt: skip
    assert allocation.read_allocation(record, variables) == Allocation(
        (Node("n1", 4, 2), Node("n2", 2, 1)), 3, (2, 1), None, 2
    )


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"SLURM_NTASKS": "7"}, "SLURM_NTASKS is 7, but Slurm gave this job 2 tasks"),
        ({"SLURM_NTASKS": "x"}, "SLURM_NTASKS is 'x'"),
        ({"SLURM_CPUS_PER_TASK": "1.5"}, "SLURM_CPUS_PER_TASK is '1.5'"),
        ({"SLURM_CPUS_PER_GPU": "9999999999"}, "SLURM_CPUS_PER_GPU is '9999999999'"),
        ({"SLURM_HET_SIZE": "2"}, "one component"),
        ({"SLURM_JOB_CPUS_PER_NODE": "4"}, "the cores of 1"),
        ({"SLURM_JOB_NODELIST": ""}, "names 0 nodes"),
    ],
)
def test_what_contradicts_is_refused(changed, part):
    with pytest.raises(ConfigurationError) as caught:
        allocation.read_allocation(Record(2), {**VARIABLES, **changed})
    assert part in str(caught.value)


def make(*nodes: tuple[int, int], **more) -> Allocation:
    """An allocation of nodes, each with so many cores and GPUs."""
    named = enumerate(nodes, 1)
    return Allocation(tuple(Node(f"n{number}", *each) for number, each in named), **more)


FOUR = make((8, 0), (8, 0), (8, 0), (8, 0))
GPUS = make((8, 4), (8, 4))
UNEVEN = make((8, 1), (8, 2))


@pytest.mark.parametrize(
    ("given", "asked", "ranks", "cores"),
    [
        (FOUR, Request(), (1, 1, 1, 1), 8),
        (FOUR, Request(ranks=8), (2, 2, 2, 2), 4),
        (FOUR, Request(ranks=6), (2, 2, 1, 1), 4),
        (FOUR, Request(ranks=3), (1, 1, 1), 8),
        (FOUR, Request(ranks=8, nodes=2), (4, 4), 2),
        (FOUR, Request(nodes=3), (1, 1, 1), 8),
        (FOUR, Request(ranks_per_node=4), (4, 4, 4, 4), 2),
        (FOUR, Request(nodes=1, ranks_per_node=8), (8,), 1),
        (FOUR, Request(ranks=8, ranks_per_node=2), (2, 2, 2, 2), 4),
        (GPUS, Request(), (4, 4), 2),
        (GPUS, Request(nodes=1), (4,), 2),
        (GPUS, Request(ranks=4), (2, 2), 4),
        (GPUS, Request(ranks=10), (5, 5), 1),
        (UNEVEN, Request(), (1, 2), 4),
        (UNEVEN, Request(ranks=3), (1, 2), 4),
        (make((8, 0), (2, 0)), Request(ranks=10), (8, 2), 1),
        # What was given to Slurm counts only where the front was told nothing.
        (make((8, 0), (8, 0), tasks=6, tasks_per_node=(3, 3)), Request(ranks=2), (1, 1), 8),
        (make((8, 0), (8, 0), tasks=6, tasks_per_node=(3, 3)), Request(), (3, 3), 2),
    ],
)
def test_a_request_is_fulfilled(given, asked, ranks, cores):
    layout = allocation.choose_layout(given, asked)
    assert (layout.ranks_of, layout.world, layout.cores) == (ranks, sum(ranks), cores)
    assert f"--ntasks={sum(ranks)}" in layout.srun_options()
    assert f"--nodes={len(ranks)}" in layout.srun_options()
    # Where Slurm could choose among the job's nodes, they are named.
    named = [word for word in layout.srun_options() if word.startswith("--nodelist=")]
    assert bool(named) == (len(ranks) < len(given.nodes) or len(set(ranks)) > 1)
    assert not named or set(named[0].partition("=")[2].split(",")) == set(layout.hosts)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (Request(ranks=33), "33 ranks are more than this job's slots (8+8+8+8 cores on 4 nodes)"),
        (Request(ranks=17, nodes=2), "(8+8 cores on 2 nodes)"),
        (Request(ranks_per_node=9), "36 ranks are more"),
        (Request(nodes=5), "--nodes 5, but this job has 4 nodes"),
        (Request(ranks=7, ranks_per_node=2), "-n 7, but --ranks-per-node 2 on 4 nodes is 8"),
    ],
)
def test_a_request_that_cannot_be_fulfilled(asked, part):
    with pytest.raises(ConfigurationError) as caught:
        allocation.choose_layout(FOUR, asked)
    assert part in str(caught.value)


@given(st.integers(1, 64), st.lists(st.integers(1, 16), min_size=1, max_size=6))
def test_ranks_are_spread_evenly_and_nowhere_beyond_the_cores(ranks, cores):
    given_cores = make(*((each, 0) for each in cores))
    if ranks > sum(cores):
        with pytest.raises(ConfigurationError):
            allocation.choose_layout(given_cores, Request(ranks=ranks))
        return
    layout = allocation.choose_layout(given_cores, Request(ranks=ranks))
    used = dict(zip(layout.hosts, layout.ranks_of, strict=True))
    full = [used.get(node.host, 0) for node in given_cores.nodes]
    assert sum(full) == ranks
    assert all(there <= node.cores for there, node in zip(full, given_cores.nodes, strict=True))
    # Where two nodes differ by more than one, the lesser is full.
    least = [
        there for there, node in zip(full, given_cores.nodes, strict=True) if there < node.cores
    ]
    assert not least or max(full) <= min(least) + 1


@pytest.mark.parametrize(
    ("given", "asked", "without", "hosts", "ranks"),
    [
        (FOUR, Request(), ("n2",), ("n1", "n3", "n4"), (1, 1, 1)),
        (FOUR, Request(ranks=8), ("n2",), ("n1", "n3", "n4"), (2, 2, 2)),
        (FOUR, Request(ranks_per_node=3), ("n1", "n4"), ("n2", "n3"), (3, 3)),
        # One that was spare takes the place.
        (FOUR, Request(ranks=9, nodes=3), ("n1",), ("n2", "n3", "n4"), (3, 3, 3)),
        (GPUS, Request(), ("n1",), ("n2",), (4,)),
        (UNEVEN, Request(), ("n1",), ("n2",), (2,)),
        (make((8, 0), (8, 0), tasks=5, tasks_per_node=(3, 2)), Request(), ("n1",), ("n2",), (2,)),
    ],
)
def test_nodes_that_were_lost_are_left_out(given, asked, without, hosts, ranks):
    layout = allocation.choose_layout(given, asked, without)
    assert (layout.hosts, layout.ranks_of, layout.world) == (hosts, ranks, sum(ranks))


def test_nodes_without_ranks_are_not_used():
    layout = allocation.choose_layout(make((8, 4), (8, 0)), Request())
    assert (layout.hosts, layout.ranks_of, layout.world) == (("n1",), (4,), 4)
    assert {"--nodes=1", "--nodelist=n1", "--gpus-per-node=4"} <= set(layout.srun_options())


@pytest.mark.parametrize("asked", [Request(), Request(ranks_per_node=1)])
@pytest.mark.parametrize("cpus_per_gpu", [None, 2])
def test_without_any_node_there_is_no_layout(asked, cpus_per_gpu):
    given = make((8, 1), (8, 1), cpus_per_gpu=cpus_per_gpu)
    with pytest.raises(ConfigurationError, match="no node of this job is left"):
        allocation.choose_layout(given, asked, ("n1", "n2"))


def test_the_states_of_nodes():
    # As `scontrol --oneliner show node` prints them.
    text = (
        "NodeName=n1 Arch=x86_64 CPUAlloc=4 State=ALLOCATED ThreadsPerCore=1\n"
        "NodeName=n2 CPUAlloc=0 State=DOWN* ThreadsPerCore=1\n"
        "NodeName=n3 CPUAlloc=4 State=ALLOCATED+DRAIN+NOT_RESPONDING ThreadsPerCore=1\n"
    )
    states = allocation.read_states(text)
    lost = [host for host in sorted(states) if states[host] & allocation.LOST_STATES]
    assert lost == ["n2", "n3"]


def test_slurm_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'error: Unable to contact\nslurm controller' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigurationError, match=r"Unable to contact slurm controller$"):
        allocation.ask("scontrol", "show", "job")
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(allocation, "ANSWER_SECONDS", 0.2)
    with pytest.raises(ConfigurationError, match="gave no answer within"):
        allocation.ask("scontrol", "show", "job")
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="scontrol cannot be run"):
        allocation.ask("scontrol", "show", "job")
