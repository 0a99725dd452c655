"""``benchmarks training-step``: bytes, parts of a step, what contenders train, who is asked."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.measure.training_step import checks, loops, visits
from benchmarks.measure.training_step.contenders import QUANTITY
from benchmarks.measure.training_step.synchronisations import (
    BASE,
    BASES,
    LoopSpec,
    Synchronisation,
    parse_synchronisation,
    read_spec,
)
from benchmarks.measure.training_step.torch_job import make_step
from benchmarks.measure.training_step.traffic import (
    StepTraffic,
    add_up,
    list_pushes,
    list_transfers,
    read_traffic,
    subtract,
)
from benchmarks.measure.training_step.visits import (
    TOLERANCE,
    StepVisitor,
    TrainingVisit,
    find_problem,
    read_answers,
)
from benchmarks.measure.trials import RefusedError
from benchmarks.records.contenders import MPI_JOB, TORCH_JOB
from benchmarks.records.statistics import Series
from benchmarks.records.workloads import Workload, build, draw_batch, parse_workload
from measured import MPIRUN
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.algorithms import direct, gather_broadcast, one_shot, ring
from mpiddp.training.data.samples import Batch
from mpiddp.training.options.groups.straggler import Slowdown, Straggler
from mpiddp.training.records.network import read_counters

SMALL = Workload("mlp", 0.1)
counts = st.integers(0, 10_000)


def make_spec(contender: Synchronisation = BASE, workload: Workload = SMALL) -> LoopSpec:
    return LoopSpec(contender, workload, 4, 7)


# ---- bytes -------------------------------------------------------------------------------------


@given(st.integers(2, 9), counts)
def test_a_ring_sends_what_its_formula_says(ranks, count):
    traffic = add_up(list_transfers(ring(ranks), count, 4), [0] * ranks)
    # Each chunk is passed on n - 1 times to be added, and n - 1 times to be copied.
    assert sum(traffic["sent"]) == sum(traffic["received"]) == 2 * (ranks - 1) * 4 * count
    assert traffic["each"] == pytest.approx(2 * (ranks - 1) / ranks * 4 * count)
    # Chunks differ by one element.
    assert traffic["busiest"] - traffic["each"] <= 2 * (ranks - 1) * 4


@given(st.integers(2, 9), counts)
def test_the_root_of_a_gather_broadcast_is_busiest(ranks, count):
    traffic = add_up(list_transfers(gather_broadcast(ranks), count, 2), [0] * ranks)
    assert traffic["busiest"] == 2 * (ranks - 1) * count
    assert traffic["each"] == pytest.approx(2 * (ranks - 1) / ranks * 2 * count)


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


@given(st.integers(2, 6), counts)
def test_a_sharded_server_sends_what_direct_does(ranks, count):
    everyone, nodes = range(ranks), [0] * ranks
    pushed = add_up(list_pushes(count, 4, everyone, everyone), nodes)
    assert pushed == add_up(list_transfers(direct(ranks), count, 4), nodes)


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


def test_the_loopbacks_bytes_are_counted():
    before = read_counters()
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
        with left, right:
            left.sendall(bytes(50_000))
            assert len(right.recv(50_000, socket.MSG_WAITALL)) == 50_000
    assert subtract(before, read_counters())["lo"][0] >= 50_000


# ---- parts of a step ---------------------------------------------------------------------------


class Sleeps:
    """An update that takes a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps = self.begun = 0

    def begin_step(self) -> None:
        self.begun += 1

    def finish_step(self) -> None:
        self.steps += 1
        time.sleep(self.seconds)

    def settle(self) -> None: ...

    def close(self) -> None: ...


def make_loop(**changes) -> loops.StepLoop:
    module = build(SMALL, 0)
    given = {
        "model": module,
        "module": module,
        "update": Sleeps(0.01),
        "workers": (0,),
        "place": 0,
        "batch": Batch(*draw_batch(SMALL, 4, 0, 0)),
    }
    return loops.StepLoop(**{**given, **changes})


def test_a_step_is_timed_in_parts():
    quiet = []

    @contextlib.contextmanager
    def be_quiet():
        quiet.append(1)
        yield

    barriers = []
    loop = make_loop(quiet=be_quiet)
    found = loops.measure(loop, 6, lambda: barriers.append(loop.update.steps), counts=True)
    assert loop.update.steps == 6 + loops.WARM_UP
    # Half as many passes, all of them without synchronisation.
    assert len(quiet) == 3 and loop.update.begun == 9 + loops.WARM_UP
    assert found["samples"] == 24
    assert 0.06 <= found["update"] <= found["seconds"]
    assert found["compute"] > 0
    assert "lo" in found["interfaces"]
    # Nobody begins before all have come, and nobody leaves before all are done.
    assert barriers == [loops.WARM_UP] * 2 + [6 + loops.WARM_UP] * 2


def test_what_servers_do_is_no_update_of_the_rank():
    found = loops.measure(make_loop(updates_here=False), 2, lambda: None, counts=False)
    assert found["update"] == 0


def test_a_rank_that_only_serves_takes_no_steps():
    loop = make_loop(place=None)
    loops.warm_up(loop, 3)
    assert loops.measure(loop, 4, lambda: None, counts=False) == {}
    assert loop.update.steps == 0


def test_a_straggler_computes_for_longer():
    slow = Slowdown(Straggler(0, 3.0), 0, (0,), 0, 0.02, torch.device("cpu"))
    found = loops.measure(make_loop(slowdown=slow, update=Sleeps(0)), 4, lambda: None, counts=False)
    assert found["seconds"] >= 4 * 0.04 and found["compute"] >= 4 * 0.04


def make_answer(seconds: float, compute: float, update: float, lo: int | None = None):
    counted = {} if lo is None else {"interfaces": {"lo": [lo, lo]}}
    times = {"samples": 40, "seconds": seconds, "compute": compute, "update": update}
    return {**times, **counted}


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


def test_exposed_communication_may_be_negative():
    visit = read_answers([make_answer(1.0, 0.9, 0.2, 0)], 1)
    assert visit.exposed == pytest.approx(-0.1)


# ---- what is trained ---------------------------------------------------------------------------


def test_the_mlp_has_67_megabytes_of_gradients_or_as_many_as_were_asked_for():
    usual = sum(each.numel() for each in build(Workload("mlp"), 0).parameters())
    assert 4e-6 * usual == pytest.approx(67, abs=0.5)
    for megabytes in (0.1, 4, 30):
        model = build(parse_workload(f"mlp:megabytes={megabytes}"), 0)
        found = 4e-6 * sum(each.numel() for each in model.parameters())
        assert found == pytest.approx(megabytes, rel=0.05)


@pytest.mark.parametrize("name", ["convnet", "resnet18", "mlp:megabytes=0.1"])
def test_every_model_takes_its_samples(name):
    workload = parse_workload(name)
    features, labels = draw_batch(workload, 3, 0, 1)
    outputs = build(workload, 0)(features)
    assert nn.functional.cross_entropy(outputs, labels).isfinite()
    other, _ = draw_batch(workload, 3, 0, 2)
    assert not torch.equal(features, other)
    assert torch.equal(features, draw_batch(workload, 3, 0, 1)[0])


def test_what_ranks_are_told_survives_json():
    spec = LoopSpec(parse_synchronisation("parameter-server:servers=2"), SMALL, 8, 3, "0=2")
    assert read_spec(json.loads(json.dumps(asdict(spec)))) == spec


class Averages:
    """An update by the average of several workers' gradients, times ``factor``."""

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

    def settle(self) -> None: ...

    def close(self) -> None: ...


def train(spec: LoopSpec, workers: int, factor: float = 1.0):
    module = build(spec.workload, spec.seed)
    update = Averages(module, spec, workers, factor)
    batch = Batch(*draw_batch(spec.workload, spec.batch_size, spec.seed, 0))
    loop = loops.StepLoop(module, module, update, tuple(range(workers)), 0, batch)
    return checks.take_checked_steps(spec, loop)


@pytest.mark.parametrize("name", ["convnet", "mlp:megabytes=0.1"])
def test_averages_train_what_one_process_with_all_samples_does(name):
    spec = make_spec(workload=parse_workload(name))
    expected = checks.compute_alone(spec, 3, torch.device("cpu"))["sample"]
    right = train(spec, 3)
    assert find_problem([right, right, {}], expected, is_narrow=False) == ""
    # The sum in place of the average, and one worker's own gradients.
    for wrong in (train(spec, 3, 3.0), train(spec, 1)):
        assert "way that one process" in find_problem([wrong], expected, is_narrow=False)


def test_dropout_is_left_out_of_a_check_and_of_nothing_else():
    module = build(Workload("convnet"), 0)
    with checks.without_dropout(module):
        assert [type(each) for each in module.modules() if not each.training] == [nn.Dropout]
    assert all(each.training for each in module.modules())


def make_found(way, digest="a"):
    return {"digest": digest, "sample": way}


def test_a_verdict_names_what_is_wrong():
    found = make_found([3.0, 4.0])
    expected = [3.0, 4.0 + 0.9 * 5 * TOLERANCE]
    assert find_problem([found, found], expected, is_narrow=False) == ""
    far = [3.0, 4.0 + 1.2 * 5 * TOLERANCE]
    assert "up to 0.02 would be rounding" in find_problem([found], far, is_narrow=False)
    assert find_problem([found], far, is_narrow=True) == ""
    assert "differ" in find_problem([found, make_found([3.0, 4.0], "b")], expected, is_narrow=False)
    assert "not finite" in find_problem([make_found([math.nan, 4.0])], expected, is_narrow=False)
    # Workers at their own pace have no other one's way to go.
    assert find_problem([found], None, is_narrow=False) == ""
    assert "not moved" in find_problem([make_found([0.0, 0.0])], None, is_narrow=False)


# ---- visits ------------------------------------------------------------------------------------

WAY = [1.0, 2.0]


class FakeJob:
    """Answers as two ranks would; ``odd`` has what some contenders' check finds."""

    def __init__(self, name: str, odd) -> None:
        self.name, self.odd, self.asked = name, odd, []

    def ask(self, command, what):
        if command["do"] == "compute alone":
            return [{"sample": WAY}, {}]
        contender = read_spec(command["spec"]).contender
        assert contender.job == self.name
        self.asked.append((command["do"], contender.name))
        if command["do"] == "check":
            found = {**make_found(WAY), "notes": {"elements": 3}}
            return [found, {**found, **self.odd.get(contender.sync, {})}]
        return [make_answer(1.0, 0.5, 0.1, 10), make_answer(1.0, 0.5, 0.1)]


def test_who_trains_something_else_is_not_timed():
    words = ["framework", "auto", "ring", "one-shot", "parameter-server:staleness=1"]
    plan = QUANTITY.parse(["--sync", *words, "--repetitions", "2", "--models", "mlp"]).plan
    odd = {"ring": {"digest": "b"}, "one-shot": {"refused": "no such way"}}
    jobs = {name: FakeJob(name, odd) for name in (MPI_JOB, TORCH_JOB)}
    visitor = StepVisitor(jobs, plan, 2, Workload("mlp"))
    admitted = visitor.admit([*BASES, *plan.contenders])
    series = visitor.visit_in_turns(admitted)
    wrong = {each.name: why for each, why in visitor.wrong.items()}
    assert wrong == {"ring": "the ranks' parameters differ"}
    assert {each.name for each in visitor.refusals} == {"one-shot"}
    names = [*(each.name for each in BASES), "framework", "auto", words[-1]]
    assert [each.name for each in admitted] == names
    assert all(isinstance(each, Series) and len(each.samples) == 2 for each in series.values())
    timed = {name for what, name in jobs[MPI_JOB].asked if what == "measure"}
    assert timed == {"alone-mpiddp", "auto", words[-1]}


class InterruptedJob(FakeJob):
    """Ctrl-C comes in the measurement after so many."""

    left = 0

    def __init__(self, name: str) -> None:
        super().__init__(name, {})
        self.greeting = {"device": "cpu", "gpus": 0}

    def ask(self, command, what):
        if command["do"] == "measure":
            if not InterruptedJob.left:
                raise KeyboardInterrupt
            InterruptedJob.left -= 1
        return super().ask(command, what)


@pytest.mark.parametrize(("measured", "rounds"), [(7, None), (8, 1), (12, 2)])
def test_an_interruption_keeps_the_whole_rounds(measured, rounds, monkeypatch):
    jobs = {name: InterruptedJob(name) for name in (MPI_JOB, TORCH_JOB)}
    start = contextlib.nullcontext(jobs)
    monkeypatch.setattr("benchmarks.measure.training_step.contenders.start_jobs", lambda *_: start)
    monkeypatch.setattr("benchmarks.measure.trials.count_others_seconds", lambda jobs: 0.0)
    words = ["--sync", "framework", "auto", "--repetitions", "9", "--ranks", "2", "--models", "mlp"]
    # Four contenders, each of which is measured once to be admitted.
    monkeypatch.setattr(InterruptedJob, "left", measured)
    groups = QUANTITY.measure(QUANTITY.parse(words).plan, MPIRUN)
    if rounds is not None:
        group = next(groups)
        assert {len(cell.samples) for cell in group.cells} == {rounds}
        assert group.divide("framework", "auto") is not None
    with pytest.raises(KeyboardInterrupt):
        next(groups)


@pytest.mark.parametrize(("device", "good"), [("cpu", False), ("cuda", True)])
def test_gpus_that_were_asked_for_must_be_there(device, good):
    greetings = [{"device": "cuda"}, {"device": device}]
    visits.check_device("auto", greetings)
    if good:
        visits.check_device("gpu", greetings)
    else:
        with pytest.raises(ConfigurationError, match="expected a GPU for every rank"):
            visits.check_device("gpu", greetings)


def test_a_link_is_probed_by_a_short_and_a_long_message():
    def ask(command, what):
        # 2 ms for a word there and back, 10 ns for each byte.
        seconds = 2e-3 + 1e-8 * command["bytes"] * (command["bytes"] > 100)
        return [[seconds] * 3, [9.0] * 3]

    link = visits.probe_link(SimpleNamespace(ask=ask))
    assert link.latency == pytest.approx(1e-3)
    assert link.megabits == pytest.approx(800)
