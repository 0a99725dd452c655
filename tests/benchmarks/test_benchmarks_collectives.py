"""The commands that measure collectives: their command lines, and real small runs."""

import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import documents
import launchers as launching
from benchmark_runs import check_drawing, record_benchmark
from benchmarks.measure import engine
from benchmarks.measure.collectives.cells import CallGroup
from benchmarks.measure.collectives.contenders import list_blocks
from benchmarks.measure.collectives.measurement import QUANTITIES, WORKER
from benchmarks.measure.collectives.visits import CallVisitor
from benchmarks.measure.launching import launchers, processes
from benchmarks.measure.launching.paired_jobs import start_jobs
from benchmarks.measure.launching.processes import RunError
from benchmarks.measure.trials import WRONG, Refusal, WrongResultError
from benchmarks.records.contenders import MPI, MPI_JOB, TORCH_JOB, Contender, Task
from benchmarks.records.schema import Cell, read_record
from measured import GLOO_ROW, MPI_ROW, MPIRUN, PRIVATE_OWN, K, M, make_cell
from mpiddp.collectives.tuning import write_table
from mpiddp.schedules.registry import names

COLLECTIVES = ("allreduce", "reduce-scatter", "all-gather", "broadcast", "reduce")


def test_sizes_algorithms_and_ranks_are_read_and_depend_on_the_command_and_the_launcher():
    plan = QUANTITIES["allreduce"].parse(["--sizes", "8K", "8", "8", "64MiB", "1K:16K:x4"]).plan
    assert plan.bytes == (8, K, 4 * K, 8 * K, 16 * K, 64 * M)
    assert QUANTITIES["allreduce"].parse(["--sizes", "1K:5K"]).plan.bytes == (K, 2 * K, 4 * K)
    assert QUANTITIES["point-to-point"].parse([]).plan.bytes[:3] == (1, 4, 16)
    plan = QUANTITIES["reduce"].parse(["--algorithms", "all", "ring", "ring:segments=4"]).plan
    assert plan.algorithms == ("auto", *names(), "ring:segments=4")
    srun = ["--launcher", "srun"]
    assert QUANTITIES["allreduce"].parse([]).plan.ranks == (2, 4)
    assert QUANTITIES["broadcast"].parse(srun).plan.ranks == (4, 8)
    assert QUANTITIES["point-to-point"].parse(srun).plan.ranks == (2,)
    assert QUANTITIES["all-pairs"].parse([*srun, "--nodes", "6"]).plan.ranks == (6,)
    assert QUANTITIES["all-pairs"].parse([]).plan.ranks == (4,)


def fake_measuring(monkeypatch, *cells: Cell, **more) -> None:
    group = CallGroup(ranks=2, cells=cells, **more)
    fake = replace(QUANTITIES["allreduce"], measure=lambda plan, launcher: iter([group]))
    monkeypatch.setitem(QUANTITIES, "allreduce", fake)
    monkeypatch.setattr(engine, "check_run", lambda *_, **__: MPIRUN)


def test_a_wrong_result_ends_with_an_error_after_the_tables(monkeypatch, capsys):
    wrong = Refusal(
        quantity="all-reduce", contender=PRIVATE_OWN.label, at={"ranks": 2, "bytes": 8},
        reason="its result has 2 wrong elements", kind=WRONG,
    )  # fmt: skip
    fake_measuring(monkeypatch, make_cell(GLOO_ROW, 8, [[1.0]]), refusals=[wrong])
    with pytest.raises(WrongResultError, match=r"all-reduce, .*, 2 ranks, 8 B: .*2 w") as caught:
        engine.run(QUANTITIES["allreduce"], ["--ranks", "2"])
    assert caught.value.exit_code == 1
    output = capsys.readouterr().out
    assert "8 B of float32" in output and "left out: mpiddp auto, auto, private" in output
    # So does what becomes wrong in a later round.
    fake_measuring(monkeypatch, make_cell(PRIVATE_OWN, 8, [[1.0]], wrong=3))
    with pytest.raises(WrongResultError, match=r"all-reduce, .*, 2 ranks, 8 B.*3 wrong"):
        engine.run(QUANTITIES["allreduce"], ["--ranks", "2"])


@pytest.mark.parametrize("words", [(), ("--targets",)])
def test_targets_are_judged_only_on_request(monkeypatch, capsys, tmp_path, words):
    cells = make_cell(GLOO_ROW, M, [[4.0]] * 6), make_cell(PRIVATE_OWN, M, [[1.0]] * 6)
    fake_measuring(monkeypatch, *cells)
    path = tmp_path / "record.jsonl"
    engine.run(
        QUANTITIES["allreduce"], ["--ranks", "2", "--sizes", "1M", "--output", str(path), *words]
    )
    text = "target: mpiddp auto, auto, private: at least 4 × Gloo: 1 MiB 4.000: met"
    assert (text in capsys.readouterr().out) == bool(words)
    record = read_record(path)
    assert record.cells == cells and record.is_complete
    assert ("targets" in [line["kind"] for line in record.others]) == bool(words)


RINGS = """
import numpy
from mpi4py import MPI
from benchmarks.measure.baselines import mpi_collectives, plain_ring

comm = MPI.COMM_WORLD
for dtype in ("float32", "float64", "int32", "int64"):
    for count in (1, 2, 3, 7, 1000, 100_003):
        mine = numpy.arange(count).astype(dtype) * (comm.rank + 1)
        expected = numpy.arange(count).astype(dtype) * sum(range(1, comm.size + 1))
        for prepare in (plain_ring.prepare, plain_ring.prepare_persistent, mpi_collectives.prepare):
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


@pytest.mark.by_default("openmpi")
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_the_plain_rings_sum(either_launcher, ranks, tmp_path):
    script = tmp_path / "rings.py"
    script.write_text(RINGS)
    launching.run(either_launcher, ranks, [script], timeout=60).expect(0)


def find_ranks(mark: str) -> list[psutil.Process]:
    """The processes that torchrun or mpirun started, without those beside the ranks."""
    ranks = (each for each in processes.find_marked(mark) if WORKER in each.cmdline())
    return [each for each in ranks if {"RANK", "OMPI_COMM_WORLD_RANK"} & each.environ().keys()]


def count_cpu_seconds(ranks) -> float:
    return sum(sum(rank.cpu_times()[:2]) for rank in ranks)


def check_turns(jobs, ranks) -> None:
    """While one job measures, the other one uses no processor time."""
    for name, other, row in ((MPI_JOB, TORCH_JOB, MPI_ROW), (TORCH_JOB, MPI_JOB, GLOO_ROW)):
        spec = Task(row, 16 * M, operator="sum").specify(50)
        before, begin = count_cpu_seconds(ranks[other]), time.monotonic()
        jobs[name].ask({"do": "measure", "spec": spec}, "measuring")
        seconds = time.monotonic() - begin
        assert seconds > 0.1
        # Two ticks of the clock by which CPU time is counted.
        assert count_cpu_seconds(ranks[other]) - before < 0.1 * seconds + 0.02, other


@pytest.mark.long
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
            spec = Task(Contender(MPI), 64, operator="sum").specify(10)
            jobs[MPI_JOB].ask({"do": "measure", "spec": spec}, "measuring")

    with pytest.raises(RunError, match=r"ranks\.worker mpi .*\(measuring\)"):
        use_jobs()
    assert [processes.find_marked(mark) for mark in marks] == [[], []]


CHECKED = {
    "allreduce": "--sizes 4100 --operators sum average product min max",
    "reduce-scatter": "--sizes 20 4096 --operators sum max",
    "all-gather": "--sizes 40 4096 --types float32 int64",
    "broadcast": "--sizes 4100 --algorithms auto binomial-tree",
    "reduce": "--sizes 4100 --types bfloat16 --operators sum max",
    "point-to-point": "--sizes 3 4K --transports mpi torch shared-memory",
    "all-pairs": "--sizes 8 4K",
}
OVERLAPPED = {"allreduce": "--sizes 4K --overlap", "reduce": "--sizes 4K --cold"}
REFUSED = {
    "MPI has no average", "the plain ring only adds", "NumPy has no bfloat16",
    "it has no call that goes on while ranks compute", "it needs 2 parts of one length",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.mpi
def test_every_collective_of_every_contender_is_exact():
    mpirun, refused, ran = launchers.find_mpirun(None, {}), set(), {}
    with start_jobs(WORKER, 2, mpirun, 60) as jobs:
        for name, text in [*CHECKED.items(), *OVERLAPPED.items()]:
            usual = ["--algorithms", "auto", "--buffers", "private"] if name in COLLECTIVES else []
            plan = QUANTITIES[name].parse([*usual, *text.split()]).plan
            visitor = CallVisitor(jobs, plan, 2)
            for block in list_blocks(plan, [0, 0], nccl=False):
                for task in visitor.admit(block):
                    ran.setdefault((name, task.contender.maker), task)
            assert not any(visitor.wrong.values()), visitor.wrong
            refused |= set(visitor.refusals.values())
    assert refused == REFUSED
    for name in COLLECTIVES:
        assert {maker for command, maker in ran if command == name} >= {"gloo", "mpi", "mpiddp"}


@pytest.mark.mpi
def test_all_contenders_are_measured_printed_and_written(tmp_path):
    drawing = tmp_path / "allreduce.svg"
    words = documents.read_command("python -m benchmarks allreduce", "performance.md")
    words += ["--iterations", "3", "--repetitions", "1"]
    words += ["--transports", "auto", "mpi", "--targets"]
    table = tmp_path / "table.json"
    write_table(table, {}, [])
    # Variables of an outer launch must not reach the ranks, which run in another directory.
    variables = {"PMIX_RANK": "7", "MPIDDP_TUNING": os.path.relpath(table, launching.ROOT)}
    words = ["allreduce", *words, "--output", str(drawing)]
    printed, record = record_benchmark(tmp_path / "allreduce.jsonl", *words, **variables)
    assert record.benchmark == "allreduce" and record.is_complete
    cells = [cell for cell in record.cells if cell.quantity == "all-reduce"]
    # Gloo, MPI, mpiddp's backend, two plain rings; auto, ring and two parameter servers on two
    # transports and two kinds of buffers; and two that are prepared.
    assert len({cell.key for cell in cells}) == len(cells) == 2 * (5 + 4 * 2 * 2 + 2)
    for cell in cells:
        assert (len(cell.samples), cell.summary.count) == (1, 3)
        assert [times.count for times in cell.by_rank] == [3, 3]
        assert cell.details["wrong"] == 0 < cell.summary.low <= cell.summary.median
        assert max(times.median for times in cell.by_rank) <= cell.summary.maximum
    ran = {(cell.contender, cell.at["bytes"]): cell.details["ran"] for cell in cells}
    assert ran["mpiddp auto, mpi, private", 8] == "recursive-doubling over mpi"
    assert ran["mpiddp auto, mpi, private", 256 * K] == "ring over mpi"
    assert ran["mpiddp central, auto, shared", 8] == "central over shared-memory"
    probes = {cell.contender for cell in record.cells if cell.quantity == "probe"}
    assert {"peer read", "copy by torch", "nothing"} <= probes
    told = [line for line in record.others if line["kind"] == "group"]
    assert len(told) == 2 and str(table) in told[0]["collectives"]["tuning"]
    assert "target: mpiddp auto, auto, shared: at least 8 × Gloo: 256 KiB" in printed
    assert "at most 1 µs more than the plain ring" in printed
    assert "less than 1 µs of an iteration of nothing: 0." in printed
    assert "central: The last rank is the parameter server, no worker" in printed
    check_drawing(drawing)


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.parametrize("name", QUANTITIES)
def test_two_jobs_share_the_nodes_of_a_cluster(slurm_cluster, tmp_path, name):
    words = [name, "--launcher", "srun", "--nodes", "2", "--sizes", "16"]
    words += ["--repetitions", "1", "--iterations", "3"]
    if name in COLLECTIVES:
        words += ["--ranks", "4", "--algorithms", "auto", "--buffers", "private"]
    words += ["--link"] if name == "allreduce" else []
    variables = slurm_cluster.environment()
    _, record = record_benchmark(tmp_path / "record.jsonl", *words, **variables)
    cells = [cell for cell in record.cells if cell.quantity != "probe"]
    assert name == "point-to-point" or {cell.nodes for cell in cells} == {2}
    makers = {cell.details["maker"] for cell in cells}
    assert makers == ({"mpi"} if name == "all-pairs" else makers | {"gloo", "mpi", "mpiddp"})
    if name == "point-to-point":
        assert {cell.at["link"] for cell in cells if "link" in cell.at} == {"node", "network"}
    assert slurm_cluster.ask("squeue", "-h") == ""
