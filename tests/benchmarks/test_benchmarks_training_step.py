"""``benchmarks training-step``: the command line, tables, promises, drawing, real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

import documents
import launchers
from benchmark_runs import check_drawing, record_benchmark
from benchmarks.measure.engine import CellGroup, list_wrong, run
from benchmarks.measure.training_step import contenders
from benchmarks.measure.training_step.contenders import (
    QUANTITY,
    find_efficiency,
    find_traffic,
    make_group,
)
from benchmarks.measure.training_step.synchronisations import (
    ALONE,
    BASE,
    DATA_PARALLEL,
    OWN_ALONE,
    OWN_BASE,
    Synchronisation,
    parse_synchronisation,
)
from benchmarks.measure.training_step.tables import STEP, tabulate
from benchmarks.measure.training_step.targets import CENTRAL, OWN, RING, SHARDED, judge
from benchmarks.measure.training_step.traffic import StepTraffic
from benchmarks.measure.training_step.visits import StepVisitor, TimedLink, TrainingVisit
from benchmarks.measure.trials import Surroundings, WrongResultError
from benchmarks.records.contenders import MPI_JOB, TORCH_JOB
from benchmarks.records.schema import Cell
from benchmarks.records.workloads import Workload, parse_workload

FRAMEWORKS = Synchronisation("framework")
MLP = Workload("mlp")

# ---- the command line --------------------------------------------------------------------------


def test_transports_and_types_are_for_gradients_that_mpiddp_averages():
    words = ["--sync", "framework", "ring", "ring", "parameter-server"]
    more = ["--transports", "auto", "mpi", "--wire-dtype", "auto", "bfloat16"]
    plan = QUANTITY.parse([*words, *more]).plan
    assert [contender.name for contender in plan.contenders] == [
        "framework", "ring", "ring wire_dtype=bfloat16", "ring transport=mpi",
        "ring transport=mpi,wire_dtype=bfloat16", "parameter-server",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ranks", "servers", "workers", "in_step"),
    [
        ("parameter-server", 4, 1, 4, True),
        ("parameter-server:servers=ranks", 4, 4, 4, True),
        ("parameter-server:servers=2,placement=dedicated,staleness=3", 4, 2, 2, False),
        ("parameter-server:staleness=unlimited", 4, 1, 4, False),
    ],
)
def test_servers_are_written_as_they_are_named(text, ranks, servers, workers, in_step):
    contender = parse_synchronisation(text)
    assert (contender.name, contender.job) == (text, MPI_JOB)
    assert contender.count_servers(ranks) == servers
    assert contender.count_workers(ranks) == workers
    assert contender.is_in_step == in_step
    configuration = contender.configure(ranks, 8, 0)
    assert (configuration.servers, configuration.staleness) == (servers, contender.staleness)


def test_the_frameworks_job_holds_what_is_not_mpiddps_and_knows_nothing_of_it():
    for name in ("framework", "framework-fused", ALONE, DATA_PARALLEL):
        assert Synchronisation(name).job == TORCH_JOB
        # They are told nothing of mpiddp's, but the same optimizer.
        assert Synchronisation(name).configure(2, 8, 0).sync == "framework"
    assert OWN_BASE.job == MPI_JOB and not OWN_BASE.averages
    assert OWN_BASE.configure(1, 8, 0).sync == "framework"
    # Who is alone waits for nobody.
    plan = make_plan(straggler="0=2")
    found = [plan.specify(MLP, each).straggler for each in (BASE, FRAMEWORKS)]
    assert found == [None, "0=2"]
    text = (
        "import sys; import benchmarks.measure.baselines.ddp_step\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('mpiddp', 'mpi4py')]"
    )
    launchers.run_python("-c", text).expect(0)


# ---- made-up groups --------------------------------------------------------------------------


def make_visit(seconds: float, *, samples: float = 100.0) -> TrainingVisit:
    reading = StepTraffic(1e6, None, is_read=True)
    return TrainingVisit(
        steps=10, usual=seconds, compute=0.25 * seconds, update=0.125 * seconds,
        samples_per_second=samples, reading=reading, by_rank=(),
    )  # fmt: skip


def make_plan(workload: Workload = MLP, straggler: str | None = None):
    words = ["--models", str(workload)] + (["--straggler", straggler] if straggler else [])
    return QUANTITY.parse(words).plan


def make_visitor(visits, ranks: int = 2, *, workload: Workload = MLP, straggler=None, **more):
    """A visitor that has made these visits, by contender, round by round."""
    visitor = StepVisitor({}, make_plan(workload, straggler), ranks, workload)
    visitor.visits.update({row: list(enumerate(each)) for row, each in visits.items()})
    for name, found in more.items():
        getattr(visitor, name).update(found)
    return visitor


def make(times, ranks: int = 2, **more) -> CellGroup:
    """A group with these seconds of a step, by contender: a list of rounds."""
    usual = {"nodes": None, "link": None, "framework": {"device": "cpu"}, "others_share": None}
    around = {name: more.pop(name, value) for name, value in usual.items()}
    link = around.pop("link")
    visits = {row: list(map(make_visit, rounds)) for row, rounds in times.items()}
    visitor = make_visitor(visits, ranks, **more)
    return make_group(visitor, Surroundings(ranks=ranks, **around), link)


def find_row(text: str, name: str) -> str:
    (line,) = [each for each in text.splitlines() if each.startswith(f"{name}  ")]
    return " ".join(line[len(name) :].split())


def test_a_table_has_parts_speed_efficiency_and_bytes():
    traffic = {"each": 2048.0, "busiest": 4096}
    times = {BASE: [0.01] * 3, OWN_BASE: [0.01] * 3, FRAMEWORKS: [0.04] * 3}
    times |= {RING: [0.01, 0.02, 0.04], CENTRAL: [0.02] * 3}
    group = make(
        times,
        notes={RING: {"traffic": traffic, "overlap": "on"}},
        refusals={Synchronisation("one-shot"): "no room"},
        wrong={OWN: "the ranks' parameters differ"},
        others_share=0.25,
    )
    text = tabulate([group], make_plan())
    # 20 ms; by rounds 4, 2 and 1 times as quick as the framework's; half of what one rank does.
    expected = "20.0 15.0–30.0 5.00 12.5 2.50 100 50% 2.00 on 2 KiB 4 KiB"
    assert find_row(text, "ring") == expected
    expected = "40.0 40.0–40.0 10.0 25.0 5.00 100 50% 1 – ~976.6 KiB –"
    assert find_row(text, "framework") == expected
    assert find_row(text, "parameter-server").split()[4] == "servers"
    assert find_row(text, "alone").split()[6] == "100%"
    assert "left out: one-shot: no room" in text
    assert "wrong: auto: the ranks' parameters differ" in text
    assert "other programs took 25% of the cores" in text
    assert list_wrong([group]) == [
        "training step, auto, mlp, 2 ranks: the ranks' parameters differ"
    ]


def test_efficiency_is_against_one_rank_with_the_same_update():
    alone, quick = (make_visit(1.0, samples=samples) for samples in (100.0, 160.0))
    several = make_visit(1.0, samples=240.0)
    visits_of = {BASE: alone, OWN_BASE: quick, FRAMEWORKS: several, RING: several, CENTRAL: several}
    visitor = make_visitor({row: [visit] for row, visit in visits_of.items()}, 4)
    found = {row: find_efficiency(visitor, row).estimate for row in visits_of}
    expected = {BASE: 1.0, OWN_BASE: 1.0, FRAMEWORKS: 0.6, RING: 0.375, CENTRAL: 0.375}
    assert found == pytest.approx(expected)


def test_what_others_send_meanwhile_is_left_out_of_what_is_read():
    busy, quiet = (
        replace(make_visit(1.0), reading=StepTraffic(n, 2 * n, is_read=True)) for n in (9e6, 1e6)
    )
    visitor = make_visitor({FRAMEWORKS: [busy, quiet, busy]})
    assert find_traffic(visitor, FRAMEWORKS) == StepTraffic(1e6, 2e6, is_read=True)
    assert find_traffic(visitor, FRAMEWORKS, is_on_gpu=True) is None
    assert find_traffic(make_visitor({BASE: [busy]}), BASE) is None


def test_a_record_has_every_visit_and_its_parts():
    group = make({FRAMEWORKS: [2.0, 4.0], OWN: [1.0, 1.0]})
    cells = {(cell.contender, cell.at.get("part"), cell.unit): cell for cell in group.cells}
    theirs = cells["framework", None, "s"]
    assert theirs.samples == (2.0, 4.0) and theirs.at == {"model": "mlp", "batch": 8}
    assert theirs.details["bytes"]["is_read"]
    assert cells["framework", "exposed", "s"].samples == (1.25, 2.5)
    assert {(name, part) for name, part, unit in cells if unit == "s"} == {
        (name, part)
        for name in ("framework", "auto")
        for part in (None, "compute", "exposed", "update")
    }
    assert cells["auto", None, "samples/s"].quantity == "training speed"


# ---- promises ----------------------------------------------------------------------------------


def judge_speed(speed: float, ranks: int = 2, **more):
    times = {FRAMEWORKS: [speed] * 6, OWN: [1.0] * 6}
    plan = make_plan(straggler=more.get("straggler"))
    targets = judge([make(times, ranks, **more)], plan)
    return [(*target.found.values(), target.met) for target in targets]


def test_the_large_mlp_is_promised_to_be_much_quicker_and_others_not_to_be_slower():
    assert judge_speed(2.5) == [(2.5, True)]
    assert judge_speed(2.4) == judge_speed(2.4, nodes=1) == [(2.4, False)]
    for workload in map(parse_workload, ("convnet", "resnet18", "mlp:megabytes=4")):
        assert judge_speed(1.0, workload=workload) == [(1.0, True)]
        assert judge_speed(0.9, 4, workload=workload) == [(0.9, False)]
        assert judge_speed(0.9, 3, workload=workload) == []
    nothing = [judge_speed(2.4, 4), judge_speed(1.0, straggler="0=2")]
    nothing += [judge_speed(1.0, framework={"device": "cuda"})]
    assert [*nothing, judge([make({OWN: [1.0]})], make_plan())] == [[]] * 4


def judge_nodes(central: float, sharded: float = 1.0, **more):
    """Four nodes, links of 8 Mbit/s, buckets of 400 kB in all; ``compute`` and update are 0.375."""
    notes = {
        RING: {"elements": 100_000, "buckets": [{"elements": 60_000}, {"elements": 40_000}]},
        CENTRAL: {"elements": 100_000},
    }
    given = {"nodes": 4, "notes": notes, "link": TimedLink(0.0, 1e-6)}
    given["workload"] = Workload("convnet")
    times = {RING: [1.0] * 6, CENTRAL: [central] * 6, SHARDED: [sharded] * 6}
    return judge([make(times, 4, **{**given, **more})], make_plan())


def test_the_central_server_is_promised_to_be_as_slow_as_the_model_says():
    # Of the ring 2 * 3/4 * 0.4 s, of the server 2 * 3 * 0.4 s; each besides 0.375 s.
    predicted = (0.375 + 2.4) / (0.375 + 0.6)
    for factor, met in ((1.0, True), (1.14, True), (0.86, True), (1.16, False), (0.84, False)):
        target = judge_nodes(factor * predicted)[1]
        assert target.found[""] == pytest.approx(factor, rel=1e-3)
        assert target.met == met


def test_the_sharded_server_is_promised_to_take_a_tenth_more_than_the_ring_at_most():
    for sharded, met in ((1.1, True), (1.2, False)):
        target = judge_nodes(2.0, sharded)[0]
        assert (target.found, target.met) == ({"": sharded}, met)
        assert "8 Mbit/s" in str(target)
    assert judge_nodes(2.0, link=None) == []
    assert judge_nodes(2.0, nodes=2) == []


# ---- the command ---------------------------------------------------------------------------------


def test_wrong_training_ends_with_an_error_after_the_tables(capsys):
    wrong = make({FRAMEWORKS: [1.0]}, wrong={OWN: "the ranks' parameters differ"})
    quantity = replace(QUANTITY, measure=lambda *_: iter([wrong]))
    with pytest.raises(WrongResultError, match="auto, mlp, 2 ranks") as caught:
        run(quantity, ["--ranks", "2"])
    assert caught.value.exit_code == 1
    assert "mlp on 2 ranks of this machine" in capsys.readouterr().out


# ---- real runs ---------------------------------------------------------------------------------

SYNCS = (
    "framework",
    "auto",
    "parameter-server",
    "parameter-server:placement=dedicated",
    "parameter-server:servers=ranks,staleness=1",
)


def list_steps(record) -> list[Cell]:
    """The cells of whole steps."""
    return [cell for cell in record.cells if cell.quantity == STEP and "part" not in cell.at]


@pytest.mark.long
@pytest.mark.mpi
def test_all_contenders_are_measured_printed_and_written(tmp_path):
    drawing = tmp_path / "step.svg"
    arguments = documents.read_command("python -m benchmarks training-step")
    arguments += ["--sync", *SYNCS, "--transports", "auto", "mpi"]
    arguments += ["--straggler", "0=1.5"]
    # Variables of an outer launch must not reach the ranks.
    arguments = ["training-step", *arguments, "--output", str(drawing)]
    printed, found = record_benchmark(tmp_path / "step.jsonl", *arguments, PMIX_RANK="7")
    assert [line["kind"] for line in found.others] == ["group", "end"]
    rows = {cell.contender: cell.details for cell in list_steps(found)}
    assert list(rows) == [ALONE, OWN_ALONE, *SYNCS[:2], "auto transport=mpi", *SYNCS[2:]]
    assert all(len(cell.samples) == 2 and min(cell.samples) > 0 for cell in list_steps(found))
    assert all(row["steps"] == [5, 5] for row in rows.values())
    ranks = {cell.contender: len(cell.by_rank) for cell in list_steps(found)}
    assert ranks == {**dict.fromkeys(rows, 2), ALONE: 0, OWN_ALONE: 0, SYNCS[3]: 0}
    workers = {name: row["workers"] for name, row in rows.items()}
    assert workers[ALONE] == workers[OWN_ALONE] == workers[SYNCS[3]] == 1 and workers[SYNCS[4]] == 2
    # What mpiddp sends is counted: on two ranks, half of the gradients there and half back, or all
    # there and all back.
    size = 4 * rows["auto"]["notes"]["elements"]
    for name in ("auto", "auto transport=mpi", *SYNCS[2:]):
        assert rows[name]["bytes"]["each"] == pytest.approx(size, rel=1e-3), name
    assert sum(each["elements"] for each in rows["auto"]["notes"]["buckets"]) * 4 == size
    # Gloo's bytes pass through the interface, which others may use as well.
    assert rows["framework"]["bytes"]["is_read"] and rows["framework"]["bytes"]["each"] >= size
    assert "straggler 0=1.5" in printed
    check_drawing(drawing)


WRONG_WORKER = """
import sys
import torch
from benchmarks.measure.training_step import worker
from mpiddp.collectives.communicator import Communicator

make = Communicator.make

def make_and_double(self, call, tensor):
    make(self, call, tensor)
    tensor.mul_(2)

Communicator.make = make_and_double
worker.main()
"""


@pytest.mark.mpi
def test_gradients_that_are_no_average_are_noticed(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_worker.py").write_text(WRONG_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(contenders, "WORKER", "wrong_worker")
    arguments = ["--ranks", "2", "--models", "mlp:megabytes=0.1", "--sync", "framework", "ring"]
    with pytest.raises(WrongResultError, match="ring transport=mpi, mlp") as caught:
        run(
            QUANTITY, [*arguments, "--transports", "mpi", "--repetitions", "1", "--iterations", "3"]
        )
    assert "framework" not in str(caught.value)
    text = capsys.readouterr().out
    assert find_row(text, "framework") and "\nwrong: ring transport=mpi: after 2 steps" in text


@pytest.mark.slurm
@pytest.mark.long
def test_servers_are_compared_with_the_cost_model_on_a_cluster(slurm_cluster, tmp_path):
    arguments = ["--launcher", "srun", "--nodes", "2", "--ranks", "2", "--link", "--sync"]
    arguments += ["framework", "ring", "parameter-server", "parameter-server:servers=ranks"]
    arguments += ["--models", "mlp:megabytes=1", "--repetitions", "1", "--iterations", "3"]
    arguments = ["training-step", *arguments, "--targets"]
    variables = slurm_cluster.environment()
    printed, found = record_benchmark(tmp_path / "step.jsonl", *arguments, **variables)
    assert found.others[0]["nodes"] == 2 and found.others[0]["link"]["seconds_per_byte"] > 0
    rows = {cell.contender: cell.details for cell in list_steps(found)}
    size = 4 * rows["ring"]["notes"]["elements"]
    # What interfaces read and what is counted say the same of the ring, but for headers.
    assert rows["ring"]["bytes"]["each"] == pytest.approx(size, rel=1e-3)
    assert size <= rows["ring"]["read"][0]["busiest"] < 1.2 * size
    assert rows["framework"]["bytes"]["busiest"] >= size
    assert "by the cost model" in printed
    assert slurm_cluster.ask("squeue", "-h") == ""
