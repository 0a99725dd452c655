"""Who is where, under every launcher; and the trap in which every rank is 0 of 1."""

from __future__ import annotations

import dataclasses
import re

import pytest

import facts
import launchers
from mpiddp.errors import LaunchError
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi.world import Roster, World, check_size, find_oddities, solitary_world

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
FOUR = Launcher("slurm", "srun", 0, (4,), frozenset({"pmix"}))


def test_sizes_that_agree_pass():
    check_size(4, OPEN_MPI, FOUR)
    check_size(7, OPEN_MPI, None)
    # A heterogeneous step spans one component or all of them.
    for size in (4, 6):
        check_size(size, OPEN_MPI, dataclasses.replace(FOUR, sizes=(4, 6)))
    check_size(1, OPEN_MPI, dataclasses.replace(FOUR, sizes=()))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1, r"every process would be rank 0 of 1.*tart it with( the mpirun of .*)?: "),
        (
            2,
            r"srun started 4 processes.*Open MPI 5.0.11 sees 2: the environment mixes two launches",
        ),
    ],
)
def test_sizes_that_differ_are_refused(size, said):
    with pytest.raises(LaunchError, match=said):
        check_size(size, OPEN_MPI, FOUR)


def roster(*hostnames):
    return Roster(hostnames, (1,) * len(hostnames), tuple(range(len(hostnames))))


def test_one_process_alone_in_an_allocation_is_pointed_out(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    (oddity,) = find_oddities(solitary_world(), None, None)
    assert "one process alone in an allocation of 8 tasks" in oddity and "srun" in oddity
    # One that srun started alone was meant so.
    assert find_oddities(solitary_world(), dataclasses.replace(FOUR, sizes=(1,)), None) == []
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert find_oddities(solitary_world(), None, None) == []


def test_one_host_that_stands_for_several_nodes_is_pointed_out():
    world = World(0, 3, 0, 1, 0, 3, "n1", "n1")
    assert find_oddities(world, FOUR, roster("n1", "n2", "n3")) == []
    (oddity,) = find_oddities(world, FOUR, roster("n1", "n2", "n1"))
    assert "3 nodes" in oddity and "n1 stands for several" in oddity


# Real jobs


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(many, marks=pytest.mark.long) for many in (1, 4))]
)
def test_the_world_of_every_rank(recent_launcher, ranks):
    found, _ = facts.collect(recent_launcher.name, ranks)
    for rank, row in enumerate(found):
        host = row["gethostname"]
        assert row["world"] == {
            "rank": rank,
            "size": ranks,
            "local_rank": rank,
            "local_size": ranks,
            "node_rank": 0,
            "node_count": 1,
            "hostname": host,
            "master_hostname": host,
        }
        assert row["group"] == [rank, ranks, "gloo"]
        assert row["comm"] == [rank, ranks]


def test_a_process_started_by_hand_is_alone():
    ((row,), _) = facts.collect("alone", 1)
    world = row["world"]
    assert (world["rank"], world["size"], world["local_rank"], world["local_size"]) == (0, 1, 0, 1)
    assert (world["node_rank"], world["node_count"]) == (0, 1)
    assert row["comm"] is None and row["group"] == [0, 1, "gloo"]


def places(found):
    keys = ("node_rank", "node_count", "local_rank", "local_size")
    return [tuple(row["world"][key] for key in keys) for row in found]


@pytest.mark.mpi
def test_uneven_nodes():
    # Even ranks on one node, odd ones on the other: 0 and 2, and 1 by itself.
    variables = (("MPIR_CVAR_ODD_EVEN_CLIQUES", "1"),)
    found, result = facts.collect("mpich", 3, "lo", variables)
    assert places(found) == [(0, 2, 0, 2), (1, 2, 0, 1), (0, 2, 1, 2)]
    assert [row["set"]["LOCAL_WORLD_SIZE"] for row in found] == ["2", "1", "2"]
    assert [row["set"]["GROUP_RANK"] for row in found] == ["0", "1", "0"]
    host = found[0]["gethostname"]
    assert f"3 ranks on 2 nodes: {host}" in result.stderr
    assert f"{host} stands for several of them" in result.stderr
    assert "ranks per node  2 on 1, 1 on 1" in result.stderr


# Every rank is 0 of 1

INIT = "import mpiddp; mpiddp.init(timeout=90)"


def mix(name: str, library: str) -> launchers.Launcher:
    """The launcher ``name``, whose ranks load the MPI library of another launcher."""
    return dataclasses.replace(launchers.find(name), libmpi=launchers.find(library).libmpi)


def expect_refusal(result: launchers.Result, *words: str) -> None:
    """One message in all the output, on one line, which holds ``words``."""
    lines = facts.messages(result)
    assert len(lines) == 1, str(result)
    # torchrun has a traceback of its own, in which nothing of ours stands.
    assert f'File "{launchers.ROOT / "mpiddp"}/' not in result.output
    for word in ("every process would be rank 0 of 1", *words):
        assert word in lines[0]


@pytest.mark.mpi
def test_mpich_under_open_mpis_mpirun():
    result = launchers.run(mix("openmpi", "mpich"), 2, ["-c", INIT]).expect(3)
    command = f"Start it with: {launchers.find('mpich').mpirun} -n 2 python -c"
    expect_refusal(result, "Open MPI's mpirun started 2 processes", "MPICH 5.", command)


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
}
PMIX_2 = {"PMI_FD": "99", "PMI_RANK": "0", "PMI_SIZE": "2"}


@pytest.mark.mpi
def test_srun_with_another_process_manager():
    result = launchers.run(mix("alone", "openmpi"), 1, ["-c", INIT], env={**STEP, **PMIX_2})
    found = (
        "srun started 2 processes",
        "tart it with: ",
        "Open MPI 5.",
        "expected pmix, found pmi",
    )
    expect_refusal(result.expect(3), *found)


@pytest.mark.mpi
def test_only_the_first_rank_speaks_where_mpi_cannot_say_who_that_is():
    env = {**STEP, "SLURM_PROCID": "1"}
    result = launchers.run(mix("alone", "mpich"), 1, ["-c", INIT], env=env).expect(3)
    assert result.output == ""


def run_refused(row, ranks, arguments, folder, **env) -> launchers.Result:
    """Run a launch that is refused, and see that MPI leaves nothing of its own behind."""
    memory = folder / "memory"
    memory.mkdir()
    places = {"OMPI_MCA_btl_sm_backing_directory": str(memory)}
    with launchers.start(row, ranks, arguments, env={**places, **env}) as job:
        result = job.wait()
        left = [path for path in (*job._scratch.rglob("*"), *memory.iterdir()) if path.is_file()]
    # Ours, and torchrun's.
    assert not [p for p in left if p.name not in ("stdout", "stderr") and "torche" not in str(p)]
    return result


@pytest.mark.mpi
def test_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(INIT)
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    result = run_refused(mix("alone", "openmpi"), 1, arguments, tmp_path).expect(1)
    found = ("torchrun started 2 processes", "Open MPI 5.", "Start it with: ", "-n 2 python")
    expect_refusal(result, *found)
    # torchrun's own report of what its workers ended with.
    assert re.search(r"exitcode\s*: 3", result.stderr)


@pytest.mark.parametrize("library", ["openmpi", pytest.param("mpich", marks=pytest.mark.long)])
@pytest.mark.mpi
def test_what_is_only_known_once_mpi_is_up_leaves_nothing_either(library, tmp_path):
    # JSM brings a library of its own, which is believed: this one is not it.
    env = {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}
    result = run_refused(mix("alone", library), 1, ["-c", INIT], tmp_path, **env).expect(3)
    expect_refusal(result, "IBM JSM (jsrun) started 2 processes")


def test_contradicting_variables_are_one_message():
    env = {**STEP, "SLURM_PROCID": "5"}
    result = launchers.run("alone", 1, ["-c", INIT], env=env).expect(3)
    assert result.stderr.count("SLURM_PROCID") == 1 and "Traceback" not in result.output
