"""``benchmarks allreduce``: the command line, and real small runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

import documents
import launchers as launching
from benchmark_runs import run_benchmark
from benchmarks.collectives import command as allreduce
from benchmarks.collectives.contenders import MPI, WORKER, Cell, Contender
from benchmarks.common import results
from benchmarks.common.trials import WrongResultError
from benchmarks.launching import launchers, processes
from benchmarks.launching.paired_jobs import MPI_JOB, TORCH_JOB, start_jobs
from benchmarks.launching.processes import RunError
from benchmarks.launching.srun import find_srun
from groups import GLOO_ROW, MPI_ROW, PRIVATE_OWN, K, M, make_group
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import names

# ---- the command line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "6"], "expected whole elements of 4 bytes"),
        (["--sizes", "12", "--type", "float64"], "whole elements of 8 bytes (float64), found 12"),
        (["--sizes", "0"], "found 0"),
        (["--type", "float8"], "found 'float8'"),
        (["--buffers", "public"], "found 'public'"),
    ],
)
@pytest.mark.usefixtures("writable")
def test_bad_input_is_refused_before_anything_is_measured(arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        allreduce.check(allreduce.parse(arguments))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_algorithms_are_those_that_are_registered():
    plan = allreduce.parse(["--algorithms", "all", "ring", "ring:segments=4"]).plan
    assert plan.algorithms == ("auto", *names(), "ring:segments=4")


def test_the_usual_ranks_depend_on_the_launcher():
    assert allreduce.parse([]).plan.ranks == (2, 4)
    assert allreduce.parse(["--launcher", "srun"]).plan.ranks == (4, 8)
    assert allreduce.parse(["--sizes", "8K", "8", "8"]).plan.sizes == (8, 8 * K)


def test_a_wrong_sum_ends_with_an_error_after_the_tables(monkeypatch, capsys):
    wrong = make_group({(PRIVATE_OWN, 8): [[1.0]]}, wrong={Cell(PRIVATE_OWN, 8): 2})
    monkeypatch.setattr(allreduce, "measure", lambda *_: wrong)
    mpirun = launchers.Mpirun(Path("mpirun"), launchers.command.OPEN_MPI, "5.0.11", None)
    monkeypatch.setattr(allreduce, "check", lambda _: mpirun)
    with pytest.raises(WrongResultError, match=r"private at 8 B .*: 2 wrong") as caught:
        allreduce.main(["--ranks", "2"])
    assert caught.value.exit_code == 1
    assert "8 B of float32" in capsys.readouterr().out


@pytest.mark.parametrize("options", [(), ("--targets",)])
def test_targets_are_judged_only_on_request(monkeypatch, capsys, tmp_path, options):
    group = make_group({(GLOO_ROW, M): [[4.0]], (PRIVATE_OWN, M): [[1.0]]})
    monkeypatch.setattr(allreduce, "measure", lambda *_: group)
    mpirun = launchers.Mpirun(Path("mpirun"), launchers.command.OPEN_MPI, "5.0.11", None)
    monkeypatch.setattr(allreduce, "check", lambda _: mpirun)
    allreduce.main(["--ranks", "2", "--json", str(tmp_path / "record"), *options])
    text = "target: mpiddp auto, auto, private: at least 4 × Gloo: 1 MiB 4.000: met"
    assert (text in capsys.readouterr().out) == bool(options)
    assert ("targets" in json.loads((tmp_path / "record").read_text())) == bool(options)


# ---- real runs ---------------------------------------------------------------------------------

RINGS = """
import numpy
from mpi4py import MPI
from benchmarks.baselines import mpi_all_reduce, plain_ring

comm = MPI.COMM_WORLD
for dtype in ("float32", "float64", "int32", "int64"):
    for count in (1, 2, 3, 7, 1000, 100_003):
        mine = numpy.arange(count).astype(dtype) * (comm.rank + 1)
        expected = numpy.arange(count).astype(dtype) * sum(range(1, comm.size + 1))
        for prepare in (plain_ring.prepare, plain_ring.prepare_persistent, mpi_all_reduce.prepare):
            buffer = mine.copy()
            made = prepare(comm, buffer)
            call, free = made if isinstance(made, tuple) else (made, lambda: None)
            call()
            assert (buffer == expected).all(), (prepare, dtype, count)
            buffer[:] = mine
            call()
            assert (buffer == expected).all(), "called again"
            free()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_the_plain_rings_sum(recent_launcher, ranks, tmp_path):
    script = tmp_path / "rings.py"
    script.write_text(RINGS)
    launching.run(recent_launcher, ranks, [script], timeout=60).expect(0)


def find_ranks(mark: str) -> list[psutil.Process]:
    """The processes that torchrun or mpirun started, without those beside the ranks."""
    ranks = (each for each in processes.find_marked(mark) if WORKER in each.cmdline())
    return [each for each in ranks if {"RANK", "OMPI_COMM_WORLD_RANK"} & each.environ().keys()]


def count_cpu_seconds(ranks) -> float:
    return sum(sum(rank.cpu_times()[:2]) for rank in ranks)


def check_turns(jobs, ranks) -> None:
    """While one job measures, the other one uses no processor time."""
    for name, other, row in ((MPI_JOB, TORCH_JOB, MPI_ROW), (TORCH_JOB, MPI_JOB, GLOO_ROW)):
        spec = row.specify(16 * M, "float32", 50)
        before, begin = count_cpu_seconds(ranks[other]), time.monotonic()
        jobs[name].ask({"do": "measure", "spec": spec}, "measuring")
        seconds = time.monotonic() - begin
        assert seconds > 0.1
        # Two ticks of the clock by which CPU time is counted.
        assert count_cpu_seconds(ranks[other]) - before < 0.1 * seconds + 0.02, other


@pytest.mark.mpi
def test_one_job_knows_no_mpi_each_sleeps_while_the_other_measures_and_a_lost_rank_ends_both():
    mpirun, marks = launchers.find_mpirun(None, {}), []

    def use_jobs():
        with start_jobs(WORKER, 2, mpirun, 60) as jobs:
            marks.extend(job.mark for job in jobs.values())
            ranks = {name: find_ranks(job.mark) for name, job in jobs.items()}
            assert [len(each) for each in ranks.values()] == [2, 2]
            for rank in ranks[TORCH_JOB]:
                assert "libmpi.so" not in Path(f"/proc/{rank.pid}/maps").read_text()
            check_turns(jobs, ranks)
            named = {each.environ()["OMPI_COMM_WORLD_RANK"]: each for each in ranks[MPI_JOB]}
            named["1"].kill()
            spec = Contender(MPI).specify(64, "float32", 10)
            jobs[MPI_JOB].ask({"do": "measure", "spec": spec}, "measuring")

    with pytest.raises(RunError, match=r"allreduce\.worker mpi .*\(measuring\)"):
        use_jobs()
    assert [processes.find_marked(mark) for mark in marks] == [[], []]


@pytest.mark.mpi
def test_all_contenders_are_measured_printed_and_written(tmp_path):
    record, drawing = tmp_path / "allreduce.json", tmp_path / "allreduce.svg"
    arguments = documents.read_command("python -m benchmarks allreduce")
    arguments += ["--warm-up", "0", "--iterations", "5", "--deadline", "60"]
    arguments += ["--transports", "auto", "mpi", "--targets"]
    # Variables of an outer launch must not reach the ranks.
    answer = run_benchmark(
        "allreduce", *arguments, "--json", str(record), "--plot", str(drawing), PMIX_RANK="7"
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    content = json.loads(record.read_text())
    assert (content["benchmark"], content["schema"]) == ("allreduce", results.SCHEMA)
    (group,) = content["groups"]
    cells = {(each["name"], each["over"], each["buffer"], each["bytes"]) for each in group["cells"]}
    # Gloo, MPI, two plain rings; auto, ring and two parameter servers on two transports and two
    # kinds of buffers; and two that are prepared.
    assert len(cells) == len(group["cells"]) == 2 * (4 + 4 * 2 * 2 + 2)
    assert {"mpiddp central", "mpiddp direct"} <= {each["name"] for each in group["cells"]}
    for cell in group["cells"]:
        assert [len(visit) for visit in cell["nanoseconds"]] == [5, 5]
        assert cell["wrong"] == 0 < cell["seconds"]["low"] <= cell["seconds"]["median"]
    assert group["collectives"]["wait"]
    assert content["targets"]
    assert group["limits"]["copy"] and group["limits"]["peer_read"]
    assert "target: mpiddp auto, auto, shared: at least 8 × Gloo: 256 KiB" in answer.stdout
    assert "at most 1 µs more than the plain ring" in answer.stdout
    assert "central: The last rank is the parameter server, no worker" in answer.stdout
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_jobs_share_the_nodes_of_a_cluster(slurm_cluster, tmp_path):
    record = tmp_path / "allreduce.json"
    arguments = ["--launcher", "srun", "--nodes", "2", "--ranks", "4", "--link"]
    arguments += ["--sizes", "8", "--repetitions", "1", "--warm-up", "0", "--iterations", "3"]
    arguments += ["--algorithms", "auto", "--buffers", "private"]
    answer = run_benchmark(
        "allreduce", *arguments, "--json", str(record), **slurm_cluster.environment()
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    (group,) = json.loads(record.read_text())["groups"]
    assert group["nodes"] == 2 and group["limits"]["link"]["median"] > 0
    assert {"Gloo", "MPI_Allreduce", "mpiddp auto"} <= {each["name"] for each in group["cells"]}
    assert slurm_cluster.ask("squeue", "-h") == ""


# A job of benchmark.sbatch measures so, too (test_jobs.py).
@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.timeout(120)
def test_both_jobs_are_steps_on_the_same_nodes(slurm_cluster, monkeypatch):
    for name, value in slurm_cluster.environment().items():
        monkeypatch.setenv(name, value)
    srun = find_srun("srun", 2, (2,))
    with start_jobs(WORKER, 2, srun, 60) as jobs:
        places = [
            {key: value for key, value in job.greeting.items() if key.startswith("slurm")}
            for job in jobs.values()
        ]
    assert places[0] == places[1]
    assert all(places[0].values())
    assert slurm_cluster.ask("squeue", "-h") == ""
