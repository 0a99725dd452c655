"""``benchmarks training-step``: the command line, tables, promises, drawing, real runs."""

import contextlib
import gc
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import documents
import launchers
from benchmark_runs import check_drawing, record_benchmark
from benchmarks.measure.baselines import ddp_step
from benchmarks.measure.engine import CellGroup, list_wrong, run
from benchmarks.measure.launching.srun import Srun
from benchmarks.measure.training_step import checks, contenders, loops, visits
from benchmarks.measure.training_step.synchronisations import (
    ALONE,
    BASE,
    DATA_PARALLEL,
    OWN_ALONE,
    OWN_BASE,
    LoopSpec,
    Synchronisation,
    parse_synchronisation,
    read_spec,
)
from benchmarks.measure.training_step.tables import STEP, tabulate
from benchmarks.measure.training_step.targets import CENTRAL, OWN, RING, SHARDED, judge
from benchmarks.measure.training_step.torch_job import make_step
from benchmarks.measure.training_step.traffic import (
    StepTraffic,
    add_up,
    list_pushes,
    list_transfers,
    read_traffic,
)
from benchmarks.measure.training_step.visits import (
    TOLERANCE,
    StepVisitor,
    TimedLink,
    TrainingVisit,
    find_problem,
    read_answers,
)
from benchmarks.measure.training_step.worker import StepBench
from benchmarks.measure.trials import RefusedError, Surroundings, WrongResultError
from benchmarks.records.contenders import MPI_JOB, TORCH_JOB
from benchmarks.records.schema import Cell
from benchmarks.records.workloads import Workload, build, draw_batch, parse_workload
from measured import MPIRUN
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.algorithms import gather_broadcast, one_shot, ring
from mpiddp.training.data.samples import Batch
from mpiddp.training.options.groups.straggler import Slowdown, Straggler

FRAMEWORKS = Synchronisation("framework")
MLP = Workload("mlp")


def test_transports_and_types_are_for_gradients_that_mpiddp_averages():
    words = ["--sync", "framework", "ring", "ring", "parameter-server"]
    more = ["--transports", "auto", "mpi", "--wire-dtype", "auto", "bfloat16"]
    plan = contenders.QUANTITY.parse([*words, *more]).plan
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
    # Who is alone waits for nobody.
    plan = make_plan(straggler="0=2")
    found = [plan.specify(MLP, each).straggler for each in (BASE, FRAMEWORKS)]
    assert found == [None, "0=2"]
    text = (
        "import sys; import benchmarks.measure.baselines.ddp_step\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('mpiddp', 'mpi4py')]"
    )
    launchers.run_python("-c", text).expect(0)


def make_visit(seconds: float, *, samples: float = 100.0) -> TrainingVisit:
    reading = StepTraffic(1e6, None, is_read=True)
    return TrainingVisit(
        steps=10, usual=seconds, compute=0.25 * seconds, update=0.125 * seconds,
        samples_per_second=samples, reading=reading, by_rank=(),
    )  # fmt: skip


def make_plan(workload: Workload = MLP, straggler: str | None = None):
    words = ["--models", str(workload)] + (["--straggler", straggler] if straggler else [])
    return contenders.QUANTITY.parse(words).plan


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
    return contenders.make_group(visitor, Surroundings(ranks=ranks, **around), link)


def find_row(text: str, name: str) -> str:
    (line,) = [each for each in text.splitlines() if each.startswith(f"{name}  ")]
    return " ".join(line[len(name) :].split())


def test_a_table_has_parts_speed_efficiency_and_bytes():
    traffic = {"each": 2048.0, "busiest": 4096}
    times = {BASE: [0.01] * 3, OWN_BASE: [0.01] * 3, FRAMEWORKS: [0.04] * 3}
    times |= {RING: [0.01, 0.02, 0.04], CENTRAL: [0.02] * 3}
    group = make(
        times, notes={RING: {"traffic": traffic, "overlap": "on"}},
        refusals={Synchronisation("one-shot"): "no room"},
        wrong={OWN: "the ranks' parameters differ"}, others_share=0.25,
    )  # fmt: skip
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
    (wrong,) = list_wrong([group])
    assert wrong == "training step, auto, mlp, 2 ranks: the ranks' parameters differ"


def test_efficiency_is_against_one_rank_with_the_same_update():
    alone, quick = (make_visit(1.0, samples=samples) for samples in (100.0, 160.0))
    several = make_visit(1.0, samples=240.0)
    visits_of = {BASE: alone, OWN_BASE: quick, FRAMEWORKS: several, RING: several, CENTRAL: several}
    visitor = make_visitor({row: [visit] for row, visit in visits_of.items()}, 4)
    found = {row: contenders.find_efficiency(visitor, row).estimate for row in visits_of}
    expected = {BASE: 1.0, OWN_BASE: 1.0, FRAMEWORKS: 0.6, RING: 0.375, CENTRAL: 0.375}
    assert found == pytest.approx(expected)


def test_what_others_send_meanwhile_is_left_out_of_what_is_read():
    readings = [StepTraffic(n, 2 * n, is_read=True) for n in (9e6, 1e6)]
    busy, quiet = (replace(make_visit(1.0), reading=each) for each in readings)
    visitor = make_visitor({FRAMEWORKS: [busy, quiet, busy]})
    assert contenders.find_traffic(visitor, FRAMEWORKS) == StepTraffic(1e6, 2e6, is_read=True)
    assert contenders.find_traffic(visitor, FRAMEWORKS, is_on_gpu=True) is None
    assert contenders.find_traffic(make_visitor({BASE: [busy]}), BASE) is None


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


SYNCS = (
    "framework", "auto", "parameter-server", "parameter-server:placement=dedicated",
    "parameter-server:servers=ranks,staleness=1",
)  # fmt: skip


def list_steps(record) -> list[Cell]:
    """The cells of whole steps."""
    return [cell for cell in record.cells if cell.quantity == STEP and "part" not in cell.at]


@pytest.mark.long
@pytest.mark.mpi
def test_all_contenders_are_measured_printed_and_written(tmp_path):
    drawing = tmp_path / "step.svg"
    arguments = documents.read_command("python -m benchmarks training-step")
    arguments += ["--sync", *SYNCS, "--transports", "auto", "mpi", "--straggler", "0=1.5"]
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
    arguments += ["--transports", "mpi", "--repetitions", "1", "--iterations", "3"]
    with pytest.raises(WrongResultError, match="ring transport=mpi, mlp") as caught:
        run(contenders.QUANTITY, arguments)
    assert "framework" not in str(caught.value)
    text = capsys.readouterr().out
    assert find_row(text, "framework") and "\nwrong: ring transport=mpi: after 2 steps" in text


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


SMALL = Workload("mlp", 0.1)
counts = st.integers(0, 10_000)


def make_spec(contender: Synchronisation = BASE, workload: Workload = SMALL) -> LoopSpec:
    return LoopSpec(contender, workload, 4, 7)


@given(st.integers(2, 9), counts)
def test_a_ring_sends_what_its_formula_says(ranks, count):
    traffic = add_up(list_transfers(ring(ranks), count, 4), [0] * ranks)
    # Each chunk is passed on n - 1 times to be added, and n - 1 times to be copied.
    assert sum(traffic["sent"]) == sum(traffic["received"]) == 2 * (ranks - 1) * 4 * count
    assert traffic["each"] == pytest.approx(2 * (ranks - 1) / ranks * 4 * count)
    # Chunks differ by one element.
    assert traffic["busiest"] - traffic["each"] <= 2 * (ranks - 1) * 4


def test_the_root_of_a_gather_broadcast_is_busiest():
    traffic = add_up(list_transfers(gather_broadcast(5), 1000, 2), [0] * 5)
    assert (traffic["busiest"], traffic["each"]) == (8000, pytest.approx(3200))


def test_a_nodes_link_carries_what_its_ranks_send_to_other_nodes():
    traffic = add_up(list_transfers(one_shot(4), 100, 4), [0, 1, 0, 1])
    assert traffic["sent"] == traffic["received"] == [1200] * 4
    # Two ranks, each to two ranks of the other node.
    assert traffic["node_sent"] == traffic["node_received"] == [1600, 1600]
    assert traffic["busiest"] == 1600


@pytest.mark.parametrize(
    ("servers", "workers", "sent"),
    [
        # The only server answers three others; its own worker's part goes nowhere.
        ((3,), (0, 1, 2, 3), (400, 400, 400, 1200)),
        ((3,), (0, 1, 2), (400, 400, 400, 1200)),
        # A quarter to each of three servers, and to each of three workers.
        ((0, 1, 2, 3), (0, 1, 2, 3), (600, 600, 600, 600)),
        # Two dedicated servers: halves of two workers' gradients, and of two workers' weights.
        ((2, 3), (0, 1), (400, 400, 400, 400)),
    ],
)
def test_servers_answer_what_workers_push(servers, workers, sent):
    traffic = add_up(list_pushes(100, 4, servers, workers), [0, 0, 0, 0])
    assert traffic["sent"] == traffic["received"] == list(sent)
    assert traffic["busiest"] == max(sent)


def test_interfaces_tell_what_a_step_sent():
    alone = read_traffic([{"lo": (4000, 4000), "eth0": (9, 9)}], 10, 2)
    assert alone == StepTraffic(200, None, is_read=True)
    two = [
        {"lo": (50, 50), "eth0": (100, 300), "docker0": (7, 7)},
        {"lo": (0, 0), "eth0": (250, 100)},
    ]
    # 50 inside the first node, 100 and 250 between; the first one's link took 300.
    assert read_traffic(two, 10, 4) == StepTraffic(10, 30, is_read=True)
    assert read_traffic([{"lo": (0, 0)}, {}], 1, 2) == StepTraffic(0, 0, is_read=True)


class Update:
    def settle(self) -> None: ...

    def close(self) -> None: ...


class Sleeps(Update):
    """It takes a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = self.begun = 0

    def begin_step(self) -> None:
        self.begun += 1

    def finish_step(self) -> None:
        self.steps += 1
        time.sleep(self.seconds)


def make_loop(**changes) -> loops.StepLoop:
    module = build(SMALL, 0)
    given = {"model": module, "module": module, "update": Sleeps(0.01), "workers": (0,),
             "place": 0, "batch": Batch(*draw_batch(SMALL, 4, 0, 0))}  # fmt: skip
    return loops.StepLoop(**{**given, **changes})


def test_a_step_is_timed_in_parts():
    quiet = []

    @contextlib.contextmanager
    def be_quiet():
        quiet.append(1)
        yield

    barriers, collects = [], set()
    loop = make_loop(quiet=be_quiet)

    def meet():
        barriers.append(loop.update.steps)
        collects.add(gc.isenabled())

    found = loops.measure(loop, 6, meet, counts=True)
    # Garbage is not collected meanwhile, but afterwards.
    assert collects == {False} and gc.isenabled()
    assert loop.update.steps == 6 + loops.WARM_UP
    # Half as many passes, all of them without synchronisation.
    assert len(quiet) == 3 and loop.update.begun == 9 + loops.WARM_UP
    assert found["samples"] == 24
    assert 0.06 <= found["update"] <= found["seconds"] and found["compute"] > 0
    assert "lo" in found["interfaces"]
    # Nobody begins before all have come, and nobody leaves before all are done.
    assert barriers == [loops.WARM_UP] * 2 + [6 + loops.WARM_UP] * 2


def test_what_servers_do_is_no_update_of_the_rank_and_a_server_takes_no_steps():
    found = loops.measure(make_loop(updates_here=False), 2, lambda: None, counts=False)
    assert found["update"] == 0
    loop = make_loop(place=None)
    loops.warm_up(loop, 3)
    assert loops.measure(loop, 4, lambda: None, counts=False) == {}
    assert loop.update.steps == 0


def test_a_straggler_computes_for_longer():
    slow = Slowdown(Straggler(0, 3.0), 0, (0,), 0, 0.02, torch.device("cpu"))
    found = loops.measure(make_loop(slowdown=slow, update=Sleeps(0)), 4, lambda: None, counts=False)
    assert found["seconds"] >= 4 * 0.04 and found["compute"] >= 4 * 0.04


def make_answer(seconds: float, compute: float, update: float, lo: int | None = None):
    times = {"samples": 40, "seconds": seconds, "compute": compute, "update": update}
    return times | ({} if lo is None else {"interfaces": {"lo": [lo, lo]}})


def test_the_slowest_rank_counts_in_each_part():
    answers = [make_answer(2.0, 0.5, 0.3, 3000), make_answer(1.0, 0.8, 0.1), {}]
    visit = read_answers(answers, 5)
    assert visit == TrainingVisit(
        steps=5, usual=0.4, compute=0.16, update=0.06, samples_per_second=40.0,
        reading=StepTraffic(200, None, is_read=True), by_rank=(),
    )  # fmt: skip
    # Who never waits goes on at its own pace.
    assert read_answers(answers, 5, has_bound=False).samples_per_second == 60.0
    assert visit.exposed == pytest.approx(0.18)
    with pytest.raises(RefusedError, match="not here"):
        read_answers([{"refused": "not here"}, {}], 5)


@pytest.mark.parametrize(
    ("text", "megabytes"), [("mlp", 67), ("mlp:megabytes=0.1", 0.1), ("mlp:megabytes=30", 30)]
)
def test_the_mlp_has_as_many_megabytes_of_gradients_as_were_asked_for(text, megabytes):
    found = 4e-6 * sum(each.numel() for each in build(parse_workload(text), 0).parameters())
    assert found == pytest.approx(megabytes, rel=0.05)


@pytest.mark.parametrize("name", ["convnet", "resnet18", "mlp:megabytes=0.1"])
def test_every_model_takes_its_samples(name):
    workload = parse_workload(name)
    features, labels = draw_batch(workload, 2, 0, 1)
    outputs = build(workload, 0)(features)
    assert nn.functional.cross_entropy(outputs, labels).isfinite()
    assert not torch.equal(features, draw_batch(workload, 2, 0, 2)[0])
    assert torch.equal(features, draw_batch(workload, 2, 0, 1)[0])
    assert set(draw_batch(workload, 200, 0, 1)[1].tolist()) == set(range(10))
    # Images are as large as MNIST's and CIFAR-10's.
    assert workload.shape[1:] == {"convnet": (28, 28), "resnet18": (32, 32)}.get(name, ())


def test_what_ranks_are_told_survives_json():
    spec = LoopSpec(parse_synchronisation("parameter-server:servers=2"), SMALL, 8, 3, "0=2")
    assert read_spec(json.loads(json.dumps(asdict(spec)))) == spec


class Averages(Update):
    """By the average of several workers' gradients, times ``factor``."""

    def __init__(
        self, module: nn.Module, spec: LoopSpec, workers: int, factor: float = 1.0
    ) -> None:
        self.step = make_step(module)
        self.module, self.factor = module, factor
        places = range(1, workers)
        self.others = [draw_batch(spec.workload, spec.batch_size, spec.seed, p) for p in places]

    def begin_step(self) -> None:
        self.step.begin_step()
        for features, labels in self.others:
            nn.functional.cross_entropy(self.module(features), labels).backward()

    def finish_step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad *= self.factor / (1 + len(self.others))
        self.step.finish_step()


def train_checked(spec: LoopSpec, workers: int, factor: float = 1.0):
    module = build(spec.workload, spec.seed)
    update = Averages(module, spec, workers, factor)
    batch = Batch(*draw_batch(spec.workload, spec.batch_size, spec.seed, 0))
    loop = loops.StepLoop(module, module, update, tuple(range(workers)), 0, batch)
    return checks.take_checked_steps(spec, loop)


def test_averages_train_what_one_process_with_all_samples_does():
    for spec in (make_spec(), make_spec(workload=Workload("convnet"))):
        expected = checks.compute_alone(spec, 3, torch.device("cpu"))["sample"]
        right = train_checked(spec, 3)
        assert find_problem([right, right, {}], expected, is_narrow=False) == ""
    # One worker's own gradients, and the sum in place of the average.
    wrong = train_checked(spec, 1)
    assert "way that one process" in find_problem([wrong], expected, is_narrow=False)
    expected = checks.compute_alone(make_spec(), 3, torch.device("cpu"))["sample"]
    wrong = train_checked(make_spec(), 3, 3.0)
    assert "way that one process" in find_problem([wrong], expected, is_narrow=False)


def make_found(way, digest="a"):
    return {"digest": digest, "sample": way}


def test_a_verdict_names_what_is_wrong():
    found = make_found([3.0, 4.0])
    expected = [3.0, 4.0 + 0.9 * 5 * TOLERANCE]
    assert find_problem([found, found], expected, is_narrow=False) == ""
    far = [3.0, 4.0 + 1.2 * 5 * TOLERANCE]
    assert "up to 0.02 would be rounding" in find_problem([found], far, is_narrow=False)
    assert find_problem([found], far, is_narrow=True) == ""
    assert "way that one process" in find_problem([found], [3.0, 2.0], is_narrow=True)
    assert "differ" in find_problem([found, make_found([3.0, 4.0], "b")], expected, is_narrow=False)
    assert "not finite" in find_problem([make_found([math.nan, 4.0])], expected, is_narrow=False)
    # Workers at their own pace have no other one's way to go.
    assert find_problem([found], None, is_narrow=False) == ""
    assert "not moved" in find_problem([make_found([0.0, 0.0])], None, is_narrow=False)


WAY = [1.0, 2.0]


class InterruptedJob:
    """Answers as two ranks would; Ctrl-C comes in the measurement after so many."""

    left = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.greeting = {"device": "cpu", "gpus": 0}

    def ask(self, command, what):
        if command["do"] == "let go":
            return [{}, {}]
        if command["do"] == "compute alone":
            return [{"sample": WAY}, {}]
        assert read_spec(command["spec"]).contender.job == self.name
        if command["do"] == "check":
            return [{**make_found(WAY), "notes": {"elements": 3}}] * 2
        if not InterruptedJob.left:
            raise KeyboardInterrupt
        InterruptedJob.left -= 1
        return [make_answer(1.0, 0.5, 0.1, 10), make_answer(1.0, 0.5, 0.1)]


@pytest.mark.parametrize(("measured", "rounds"), [(7, None), (12, 2)])
def test_an_interruption_keeps_the_whole_rounds(measured, rounds, monkeypatch):
    jobs = {name: InterruptedJob(name) for name in (MPI_JOB, TORCH_JOB)}
    start = contextlib.nullcontext(jobs)
    monkeypatch.setattr("benchmarks.measure.training_step.contenders.start_jobs", lambda *_: start)
    monkeypatch.setattr("benchmarks.measure.trials.count_others_seconds", lambda jobs: 0.0)
    words = ["--sync", "framework", "auto", "--repetitions", "9", "--ranks", "2", "--models", "mlp"]
    # Four contenders, each of which is measured once to be admitted.
    monkeypatch.setattr(InterruptedJob, "left", measured)
    groups = contenders.QUANTITY.measure(contenders.QUANTITY.parse(words).plan, MPIRUN)
    if rounds is not None:
        group = next(groups)
        assert {len(cell.samples) for cell in group.cells} == {rounds}
        assert group.divide("framework", "auto") is not None
    with pytest.raises(KeyboardInterrupt):
        next(groups)
    # To the end, the share of the cores is told, where all ranks are here.
    monkeypatch.setattr(InterruptedJob, "left", 1000)
    plan = contenders.QUANTITY.parse(words).plan
    for launcher, share in ((MPIRUN, 0.0), (Srun(Path("srun"), "", 2, False), None)):
        (group,) = contenders.QUANTITY.measure(plan, launcher)
        assert group.others_share == share


@pytest.mark.parametrize(("workers", "met"), [((0,), 0), ((0, 1), 1)])
def test_one_rank_waits_for_no_other_and_gpus_count_if_each_has_one(workers, met, monkeypatch):
    calls, rank = Mock(), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    monkeypatch.setattr(torch.distributed, "barrier", calls.barrier)
    monkeypatch.setattr(torch.distributed, "init_process_group", calls.join)
    monkeypatch.setattr(torch.cuda, "set_device", calls.choose)
    monkeypatch.setattr(loops, "measure", lambda loop, steps, barrier, counts: barrier())
    spec = make_plan().specify(MLP, BASE)
    StepBench(Mock())._measure(spec, make_loop(workers=workers), 1)
    assert calls.barrier.call_count == met
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 + met)
    assert ddp_step.join().type == ("cuda" if met else "cpu")
    assert calls.join.call_args.args == ("nccl" if met else "gloo",)


def test_gpus_that_were_asked_for_must_be_there():
    visits.check_device("gpu", [{"device": "cuda"}, {"device": "cuda"}])
    visits.check_device("auto", [{"device": "cuda"}, {"device": "cpu"}])
    with pytest.raises(ConfigurationError, match="expected a GPU for every rank"):
        visits.check_device("gpu", [{"device": "cuda"}, {"device": "cpu"}])


def test_a_link_is_probed_by_a_short_and_a_long_message():
    def ask(command, what):
        # 2 ms for a word there and back, 10 ns for each byte.
        seconds = 2e-3 + 1e-8 * command["bytes"] * (command["bytes"] > 100)
        return [[seconds] * 3, [9.0] * 3]

    link = visits.probe_link(SimpleNamespace(ask=ask))
    assert link.latency == pytest.approx(1e-3)
    assert link.megabits == pytest.approx(800)
