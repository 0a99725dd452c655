"""What Slurm says of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from copies import write_program
from mpiddp.errors import ConfigurationError
from mpiddp.front import allocation
from mpiddp.front.allocation import Allocation, Node, Record

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("(null)", 0),
        ("gpu", 1),
        ("gres:gpu:2", 2),
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
        ({"SLURM_JOB_CPUS_PER_NODE": "4x2"}, "Slurm counts as in"),
        ({"SLURM_JOB_NODELIST": ""}, "names 0 nodes"),
    ],
)
def test_what_contradicts_is_refused(changed, part):
    with pytest.raises(ConfigurationError) as caught:
        allocation.read_allocation(Record(2), {**VARIABLES, **changed})
    assert part in str(caught.value)


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
    text = "echo 'error: Unable to contact\nslurm controller' >&2\nexit 1"
    program = write_program(tmp_path / "scontrol", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigurationError, match=r"Unable to contact slurm controller$"):
        allocation.ask("scontrol", "show", "job")
    write_program(program, "exec sleep 60")
    with pytest.raises(ConfigurationError, match="gave no answer within"):
        allocation.ask("scontrol", "show", "job", seconds=0.2)
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="scontrol cannot be run"):
        allocation.ask("scontrol", "show", "job")
