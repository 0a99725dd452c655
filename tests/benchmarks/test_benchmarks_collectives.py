"""The commands that measure collectives: command lines, statistics, tables, promises, real runs."""

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import documents
import launchers as launching
from benchmark_runs import check_drawing, record_benchmark
from benchmarks.judge.slow_links import list_slow
from benchmarks.judge.targets import Target
from benchmarks.measure import engine
from benchmarks.measure.collectives import tables
from benchmarks.measure.collectives import targets as collectives_targets
from benchmarks.measure.collectives.cells import CallGroup, find_probe
from benchmarks.measure.collectives.contenders import list_blocks
from benchmarks.measure.collectives.measurement import QUANTITIES, WORKER
from benchmarks.measure.collectives.visits import CallVisitor
from benchmarks.measure.launching import launchers, processes
from benchmarks.measure.launching.paired_jobs import start_jobs
from benchmarks.measure.launching.processes import RunError
from benchmarks.measure.trials import WRONG, Refusal, WrongResultError
from benchmarks.records import contenders
from benchmarks.records.collectives import find_rates
from benchmarks.records.contenders import MPI, MPI_JOB, TORCH_JOB, Contender, Task
from benchmarks.records.schema import Cell, read_record
from measured import (
    GLOO_ROW,
    MPI_ROW,
    MPIRUN,
    OWN_RING,
    PRIVATE_OWN,
    SHARED_OWN,
    K,
    M,
    make_cell,
    make_cells,
    make_group,
    make_plan,
)
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


def test_a_wrong_result_is_recorded_and_an_error_after_the_tables(monkeypatch, capsys, tmp_path):
    wrong = Refusal(
        quantity="all-reduce", contender=PRIVATE_OWN.label, at={"ranks": 2, "bytes": 8},
        reason="its result has 2 wrong elements", kind=WRONG,
    )  # fmt: skip
    fake_measuring(monkeypatch, make_cell(GLOO_ROW, 8, [[1.0]]), refusals=[wrong])
    path = tmp_path / "record.jsonl"
    with pytest.raises(WrongResultError, match=r"all-reduce, .*, 2 ranks, 8 B: .*2 w") as caught:
        engine.run(QUANTITIES["allreduce"], ["--ranks", "2", "--output", str(path)])
    assert caught.value.exit_code == 1 and wrong.reason in path.read_text()
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
    told = ["--ranks", "2", "--sizes", "1M", "--output", str(path), *words]
    engine.run(QUANTITIES["allreduce"], told)
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
    words += ["--iterations", "3", "--repetitions", "1", "--transports", "auto", "mpi", "--targets"]
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


def probe(name: str) -> contenders.Contender:
    return contenders.Contender(name, quantity="probe")


def test_rates_are_those_of_nccl_tests():
    assert find_rates("all-reduce", 4, 8_000_000, 1e-3) == pytest.approx((8.0, 12.0))
    assert find_rates("all-reduce", 2, 8_000_000, 1e-3) == pytest.approx((8.0, 8.0))
    for quantity in ("reduce-scatter", "all-gather"):
        assert find_rates(quantity, 4, 8_000_000, 1e-3) == pytest.approx((8.0, 6.0))
    for quantity in ("broadcast", "reduce", "point-to-point"):
        assert find_rates(quantity, 4, 8_000_000, 1e-3) == pytest.approx((8.0, 8.0))


def test_the_table_shows_what_ran_rates_ratios_and_why_it_ended():
    times = {
        (GLOO_ROW, M): [[8e-3] * 6],
        (MPI_ROW, M): [[4e-3] * 6],
        (PRIVATE_OWN, M): [[1e-3, 1e-3, 2e-3, 2e-3, 3e-3, 3e-3]],
    }
    left_out = Refusal(
        quantity="all-reduce", contender="plain ring", at={"bytes": M}, reason="it only adds"
    )
    found = make_group(times, left_out)
    found.cells[2].details.update(ran="direct over shared-memory", stopped="budget")
    for cell in found.cells:
        cell.at["busy"] = 3
    text = tables.format_run([found], make_plan())
    lines = text.splitlines()
    assert "all-reduce: 1 MiB of float32, sum, 3 busy on each node, 6 iterations" in lines
    row = next(line for line in lines if line.startswith("mpiddp auto"))
    # 2 ms: half a GB/s; the 5th of 100 lies a quarter from 1 ms to 1 ms.
    expected = "auto private direct over shared-memory 2 ms 1 ms – 3 ms 1 ms – 3 ms 0.524 0"
    assert row.split()[2:] == [*expected.split(), "4.00", "2.00", "1", "budget"]
    assert "left out: plain ring, all-reduce at 1 MiB: it only adds" in text
    assert "1 of 3 rows spent their budget" in text


def test_that_nothing_of_mpiddp_was_measured_is_told():
    own, why = contenders.Contender(contenders.OWN, buffer="gpu").label, "not every rank has a GPU"
    left_out = Refusal(quantity="all-reduce", contender=own, at={"bytes": 8}, reason=why)
    for rows, told in (([GLOO_ROW], True), ([GLOO_ROW, PRIVATE_OWN], False)):
        found = make_group({(row, 8): [[1.0]] for row in rows}, left_out)
        lines = tables.format_run([found], make_plan()).splitlines()
        assert (f"nothing of mpiddp was measured: {why}" in lines) == told


def test_what_stands_out_is_told():
    late = {"slow_rank": 1, "slow_rank_reason": "comes late, by 90 µs"}
    cells = [make_cell(row, 8, [[1.0]], **late) for row in (GLOO_ROW, MPI_ROW)]
    cells.append(make_cell(PRIVATE_OWN, 8, [[1.0]], guidelines=["loses to reduce + broadcast"]))
    slow, guideline = tables.list_remarks(cells)
    assert slow == "slow rank: rank 1 comes late, by 90 µs (in 2 of 3 rows)"
    assert guideline.endswith("all-reduce at 8 B loses to reduce + broadcast")


def test_the_quickest_copy_is_the_memory_bound():
    seconds = dict(zip(contenders.COPIES, (0.04, 0.02, 0.03), strict=True))
    times = {(probe(name), contenders.BOUND_BYTES): [[each] * 3] for name, each in seconds.items()}
    cells = make_cells({**times, (probe(contenders.EMPTY), 0): [[7e-8]]})
    copy = find_probe(cells, *contenders.COPIES)
    assert (copy.contender, copy.summary.median) == (contenders.COPIES[1], 0.02)
    assert find_probe(cells, contenders.LINK) is None
    # 67.1 MB in 20 ms
    bound, nothing = tables.list_limits(cells)
    assert "20 ms to read and write 64 MiB" in bound and "3.36 GB/s" in bound
    assert nothing == "an iteration of nothing takes 0.07 µs"


PAIRS = list(itertools.permutations(range(4), 2))


def test_the_matrix_has_a_row_for_each_node_that_sends():
    row = contenders.Contender(contenders.MPI, quantity="all-pairs")
    ends = [{"bytes": M, "from": source, "to": target} for source, target in PAIRS]
    cells = [
        replace(make_cell(row, M, [[1e-3 * (1 + at["from"])]] * 3), ranks=4, nodes=4, at=at)
        for at in ends
    ]
    lines = tables.format_matrix(cells, M).splitlines()
    assert " ".join(lines[1].split()) == "from \\ to node 0 node 1 node 2 node 3"
    assert " ".join(lines[3].split()) == "node 1 2 ms, 0.524 – 2 ms, 0.524 2 ms, 0.524"
    assert lines[-1].startswith("slow: node 3 → node 2 takes 4.0 times")


def test_a_slow_node_or_link_is_named_and_no_other():
    by_node = {pair: (3.0 if 2 in pair else 1.0,) * 3 for pair in PAIRS}
    (line,) = list_slow(by_node)
    assert line == "slow: node 2, whose links all take 3.0 times as long as usual (1 s), or more"
    one = {pair: (2.0 if pair == (3, 1) else 1.0,) * 3 for pair in PAIRS}
    (line,) = list_slow(one)
    assert line == "slow: node 3 → node 1 takes 2.0 times as long as usual (2 s, not 1 s)"
    assert list_slow(dict.fromkeys(PAIRS, (1.0, 1.4, 9.0))) == list_slow({}) == []
    # Quick ones that are less than a third make no others slow.
    assert list_slow({pair: (1.0 if pair[0] == 3 else 2.0,) * 3 for pair in PAIRS}) == []


def judge(times, ranks=2, cores=2, nodes=None) -> dict[str, Target]:
    found = collectives_targets.list_targets(make_cells(times, ranks, nodes), cores)
    return {target.text: target for target in found}


def test_two_ranks_have_the_promised_speeds():
    quick, slow = [[1.0]] * 6, [[10.0]] * 6
    rows = {GLOO_ROW: slow, PRIVATE_OWN: quick, MPI_ROW: [[1.5]] * 6}
    times = {(row, size): rows[row] for row in rows for size in (8, 256 * K, M, 64 * M)}
    times |= {(probe(name), contenders.BOUND_BYTES): [[0.7]] for name in contenders.COPIES}
    times |= {(SHARED_OWN, 64 * M): quick}
    found = judge(times)
    by_gloo = found["mpiddp auto, auto, private: at least 4 × Gloo"]
    assert by_gloo.found == dict.fromkeys(["256 KiB", "1 MiB", "64 MiB"], 10) and by_gloo.met
    by_mpi = "mpiddp auto, auto, private: at least {} × MPI_Allreduce"
    at_all, at_most = (found[by_mpi.format(least)] for least in (1, 2))
    assert list(at_all.found) == ["1 MiB", "64 MiB"] and at_all.met
    assert list(at_most.found) == ["64 MiB"] and not at_most.met
    assert str(at_most).endswith(": 64 MiB 1.500: missed")
    latency = found["mpiddp auto, auto, private: at most 1.2 of MPI_Allreduce's time"]
    assert (latency.found, latency.met) == ({"8 B": pytest.approx(2 / 3)}, True)
    bound = found["mpiddp auto, auto, shared: at least 0.8 of the memory bound"]
    assert (bound.found, bound.met) == ({"64 MiB": pytest.approx(0.7)}, False)


def test_the_executor_is_measured_by_the_quicker_plain_ring():
    times = {(contenders.Contender(contenders.RING), size): [[3e-3]] * 6 for size in (8, M)}
    times |= {(contenders.Contender(contenders.PERSISTENT), size): [[1e-3]] * 6 for size in (8, M)}
    times |= {(OWN_RING, 8): [[1.0009e-3]] * 6, (OWN_RING, M): [[1.06e-3]] * 6}
    large, small = judge(times).values()
    assert small.met and small.found == {"8 B": pytest.approx(0.9)}
    assert not large.met and large.found == {"1 MiB": pytest.approx(1.06)}


def test_more_ranks_than_cores_are_never_slower():
    rows = {GLOO_ROW: 2.0, MPI_ROW: 1.0, PRIVATE_OWN: 1.5}
    times = {(row, 8): [[each]] * 6 for row, each in rows.items()}
    gloo, mpi = judge(times, ranks=4).values()
    assert (gloo.met, mpi.met) == (True, False)
    assert "(4 ranks, 2 cores)" in mpi.text
    assert judge(times, ranks=4, cores=4) == judge(times, ranks=4, nodes=2) == {}


def test_between_nodes_latency_is_judged_or_the_use_of_a_link_that_was_timed():
    prepared = contenders.Contender(contenders.PREPARED)
    rows = {MPI_ROW: 1.0, PRIVATE_OWN: 1.5, prepared: 0.9}
    times = {(row, 8): [[each]] * 6 for row, each in rows.items()}
    plain, quick = judge(times, ranks=4, nodes=4).values()
    assert (plain.met, quick.met) == (False, True)
    assert judge(times, ranks=8, nodes=4) == {}

    # 16 MB in 0.16 s: a ring of four carries 1 MiB, one and a half times, in 15.7 ms at best.
    size, best = 16_000_000, 1.5 * M / 1e8
    times = {(probe(contenders.LINK), size): [[0.16]], (GLOO_ROW, M): [[2 * best]] * 6}
    for slower, met in ((1.01, True), (1.03, False)):
        found = judge(times | {(PRIVATE_OWN, M): [[slower * best]] * 6}, ranks=4, nodes=4)
        by_gloo, bound = found.values()
        large = judge({(GLOO_ROW, 16 * M): [[1.0]] * 6, (PRIVATE_OWN, 16 * M): [[slower]] * 6}
                      | {(probe(contenders.LINK), size): [[0.16]]}, ranks=4, nodes=4)  # fmt: skip
        assert large["mpiddp auto, auto, private: at least 0.98 × Gloo"].met is met
        assert by_gloo.met and by_gloo.found == {"1 MiB": pytest.approx(2 / slower)}
        assert bound.met is met and bound.found == {"1 MiB": pytest.approx(1 / slower)}


def test_the_harness_is_judged_by_an_iteration_of_nothing_and_what_was_not_measured_is_not():
    for seconds, met in ((7e-8, True), (2e-6, False)):
        (target,) = judge({(probe(contenders.EMPTY), 0): [[seconds]]}).values()
        assert (target.met, target.found) == (met, {"": pytest.approx(1e6 * seconds)})
    assert judge({(GLOO_ROW, M): [[1.0]]}) == {}
