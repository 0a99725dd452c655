"""What Slurm says of a job, and how many ranks each of its nodes gets."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copies import write_program
from mpiddp.errors import ConfigurationError
from mpiddp.front import allocation
from mpiddp.front.allocation import Allocation, Node, Record
from mpiddp.front.job_layout import LayoutRequest, choose_layout

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("(null)", 0), ("gpu", 1), ("gres:gpu:2", 2),
        ("gpu:a100:1(IDX:0),gpu:h100:2(IDX:1,3),shard:7(IDX:0)", 3),
        ("gres/gpu:a100=4,gres/nvme=1", 4), ("gpumem:80", 0),
    ],
)  # fmt: skip
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
    # With --exclusive a job has all GPUs of its nodes, whatever it asked for.
    record = Record(3, 1, {"n1": 4, "n2": 4}, ("n1", "n2"))
    assert [node.gpus for node in allocation.read_allocation(record, variables).nodes] == [1, 1]


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"SLURM_NTASKS": "7"}, "SLURM_NTASKS is 7, but Slurm gave this job 2 tasks"),
        ({"SLURM_NTASKS": "x"}, "SLURM_NTASKS is 'x'"),
        ({"SLURM_CPUS_PER_TASK": "1.5"}, "SLURM_CPUS_PER_TASK is '1.5'"),
        ({"SLURM_CPUS_PER_GPU": "9999999999"}, "SLURM_CPUS_PER_GPU is '9999999999'"),
        ({"SLURM_HET_SIZE": "2"}, "one component"),
        ({"SLURM_JOB_CPUS_PER_NODE": "4"}, "the cores of 1"),
        ({"SLURM_JOB_CPUS_PER_NODE": "4x2"}, "Slurm counts as in"),
        ({"SLURM_JOB_NODELIST": ""}, "names 0 nodes"),
    ],
)
def test_what_contradicts_is_refused(changed, part):
    with pytest.raises(ConfigurationError, match=re.escape(part)):
        allocation.read_allocation(Record(2), {**VARIABLES, **changed})


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


def test_a_busy_slurm_is_asked_again(tmp_path, monkeypatch):
    """slurmctld answers nobody; its programs give up after MessageTimeout, which is short."""
    said = "slurm_load_jobs error: Socket timed out on send/recv operation"
    text = f"[ -e asked ] && exec echo answered\ntouch asked\necho '{said}' >&2\nexit 1"
    write_program(tmp_path / "scontrol", text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigurationError, match=f"{said}$"):
        allocation.ask("scontrol", "show", "job", seconds=0.5)
    (tmp_path / "asked").unlink()
    assert allocation.ask("scontrol", "show", "job") == "answered\n"


def test_slurm_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    text = "echo 'error: Invalid\njob id' >&2\nexit 1"
    program = write_program(tmp_path / "scontrol", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigurationError, match=r"Invalid job id$"):
        allocation.ask("scontrol", "show", "job")
    write_program(program, "exec sleep 60")
    with pytest.raises(ConfigurationError, match="gave no answer within"):
        allocation.ask("scontrol", "show", "job", seconds=0.2)
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="scontrol cannot be run"):
        allocation.ask("scontrol", "show", "job")


def make(*nodes: tuple[int, int], **more) -> Allocation:
    """An allocation of nodes, each with so many cores and GPUs."""
    named = enumerate(nodes, 1)
    return Allocation(tuple(Node(f"n{number}", *each) for number, each in named), **more)


FOUR = make((8, 0), (8, 0), (8, 0), (8, 0))
GPUS = make((8, 4), (8, 4))
UNEVEN = make((8, 1), (8, 2))
GIVEN = make((8, 0), (8, 0), tasks=6, tasks_per_node=(3, 3))


@pytest.mark.parametrize(
    ("given", "asked", "ranks", "cores"),
    [
        (FOUR, LayoutRequest(), (1, 1, 1, 1), 8),
        (FOUR, LayoutRequest(ranks=6), (2, 2, 1, 1), 4),
        (FOUR, LayoutRequest(ranks=8, nodes=2), (4, 4), 2),
        (FOUR, LayoutRequest(nodes=1, ranks_per_node=8), (8,), 1),
        (FOUR, LayoutRequest(ranks=8, ranks_per_node=2), (2, 2, 2, 2), 4),
        (GPUS, LayoutRequest(nodes=1), (4,), 2),
        (GPUS, LayoutRequest(ranks=10), (5, 5), 1),
        (UNEVEN, LayoutRequest(), (1, 2), 4),
        (make((8, 4), (8, 0)), LayoutRequest(), (4,), 2),
        # What was given to Slurm counts only where the front was told nothing.
        (GIVEN, LayoutRequest(ranks=2), (1, 1), 8),
        (GIVEN, LayoutRequest(), (3, 3), 2),
    ],
)
def test_a_request_is_fulfilled(given, asked, ranks, cores):
    layout = choose_layout(given, asked)
    assert (layout.ranks_of, layout.world, layout.cores) == (ranks, sum(ranks), cores)
    assert f" = {sum(ranks)} rank" in layout.describe_ranks()
    assert f"--ntasks={sum(ranks)}" in layout.srun_options()
    assert f"--nodes={len(ranks)}" in layout.srun_options()
    # Where Slurm could choose among the job's nodes, they are named.
    named = [word for word in layout.srun_options() if word.startswith("--nodelist=")]
    assert bool(named) == (len(ranks) < len(given.nodes) or len(set(ranks)) > 1)
    assert ("--gpus-per-node=4" in layout.srun_options()) == (given.nodes[0].gpus == 4)
    assert not named or set(named[0].partition("=")[2].split(",")) == set(layout.hosts)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (LayoutRequest(ranks=33), "33 ranks are more than this job's slots (8+8+8+8 on 4"),
        (LayoutRequest(ranks_per_node=9), "36 ranks are more"),
        (LayoutRequest(nodes=5), "--nodes 5, but this job has 4 nodes"),
        (LayoutRequest(ranks=7, ranks_per_node=2), "-n 7, but --ranks-per-node 2 on 4 nodes is 8"),
    ],
)
def test_a_request_that_cannot_be_fulfilled(asked, part):
    with pytest.raises(ConfigurationError, match=re.escape(part)):
        choose_layout(FOUR, asked)


@given(st.integers(1, 64), st.lists(st.integers(1, 16), min_size=1, max_size=6))
def test_ranks_are_spread_evenly_and_nowhere_beyond_the_cores(ranks, cores):
    given_cores = make(*((each, 0) for each in cores))
    if ranks > sum(cores):
        with pytest.raises(ConfigurationError):
            choose_layout(given_cores, LayoutRequest(ranks=ranks))
        return
    layout = choose_layout(given_cores, LayoutRequest(ranks=ranks))
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
        (FOUR, LayoutRequest(ranks=8), ("n2",), ("n1", "n3", "n4"), (2, 2, 2)),
        (FOUR, LayoutRequest(ranks_per_node=3), ("n1", "n4"), ("n2", "n3"), (3, 3)),
        # One that was spare takes the place.
        (FOUR, LayoutRequest(ranks=9, nodes=3), ("n1",), ("n2", "n3", "n4"), (3, 3, 3)),
        (FOUR, LayoutRequest(ranks=2), ("n1",), ("n2", "n3"), (1, 1)),
        (FOUR, LayoutRequest(ranks=2), ("n1", "n2", "n3"), ("n4",), (1,)),
        (UNEVEN, LayoutRequest(), ("n1",), ("n2",), (2,)),
        (GIVEN, LayoutRequest(), ("n1",), ("n2",), (3,)),
    ],
)
def test_nodes_that_were_lost_are_left_out(given, asked, without, hosts, ranks):
    layout = choose_layout(given, asked, without)
    assert (layout.hosts, layout.ranks_of, layout.world) == (hosts, ranks, sum(ranks))


@pytest.mark.parametrize("asked", [LayoutRequest(), LayoutRequest(ranks_per_node=1)])
def test_without_any_node_there_is_no_layout(asked):
    given = make((8, 1), (8, 1), cpus_per_gpu=2)
    with pytest.raises(ConfigurationError, match="no node of this job is left"):
        choose_layout(given, asked, ("n1", "n2"))


@pytest.mark.parametrize(
    ("given", "ranks", "cores", "note"),
    [
        (make((8, 0), cpus_per_task=4), 4, 2, "4 cores for each rank were asked for, 2 are there;"),
        (make((8, 0), cpus_per_task=2), 4, 2, ""),
        (make((8, 2), cpus_per_gpu=1), None, 1, ""),
        (make((8, 4), cpus_per_gpu=2), 2, 4, ""),
        (make((2, 4), (2, 4), tasks=8, tasks_per_node=(4, 4)), None, 1, "fewer cores than ranks"),
    ],
)
def test_cores_that_are_not_there_are_noted(given, ranks, cores, note):
    layout = choose_layout(given, LayoutRequest(ranks=ranks))
    assert layout.cores == cores and note in layout.note and bool(note) == bool(layout.note)
    assert ("--cpus-per-gpu" in layout.note) == note.endswith(";")
    assert ("--overcommit" in layout.srun_options()) == note.startswith("fewer")
