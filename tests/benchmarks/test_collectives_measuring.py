"""The commands that measure collectives: what ranks do and time, and what is made of that."""

import itertools
import queue
import random
import re
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import launchers
import mpiddp
from benchmarks.judge.guidelines import list_broken
from benchmarks.judge.slow_ranks import find_late_rank, find_slow_core
from benchmarks.measure import engine
from benchmarks.measure.collectives import contenders, measurement
from benchmarks.measure.collectives.cells import describe_overlap
from benchmarks.measure.collectives.measurement import WORKER, measure_run
from benchmarks.measure.collectives.options import check_memory
from benchmarks.measure.collectives.ranks import inputs, load, messages, torch_calls, worker
from benchmarks.measure.collectives.ranks.calls import CallSpec, Exchange, Prepared, do_nothing
from benchmarks.measure.collectives.tables import list_remarks
from benchmarks.measure.collectives.visits import LENGTH, CallVisit, CallVisitor, read_visit
from benchmarks.measure.launching import json_lines
from benchmarks.measure.launching.paired_jobs import make_mpi_program, make_torch_program
from benchmarks.measure.launching.srun import Srun
from benchmarks.measure.trials import WRONG, RefusedError
from benchmarks.records.collectives import ITEM_BYTES
from benchmarks.records.contenders import (
    BACKEND,
    GLOO,
    MPI,
    MPI_JOB,
    OWN,
    PERSISTENT,
    PREPARED,
    RING,
    TORCH_JOB,
    Contender,
    Task,
)
from benchmarks.records.schema import read_record
from measured import MPIRUN, K, answer_with, fake_jobs, make_plan
from mpiddp.errors import ConfigurationError

types = st.sampled_from(list(ITEM_BYTES))
operators = st.sampled_from(["sum", "product", "min", "max"])
count_wrong = partial(inputs.count_wrong, "all-reduce")
QUANTITIES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce")


def run_collective(quantity: str, operator: str, tensors: list[torch.Tensor]) -> None:
    """The collective on all ranks' tensors, in place, as torch computes it."""
    ranks, count = len(tensors), len(tensors[0])
    stacked = torch.stack(tensors)
    reduce = {"sum": torch.sum, "product": torch.prod, "min": torch.amin, "max": torch.amax}
    reduced = reduce[operator](stacked, 0).to(tensors[0].dtype)
    parts = [slice(count * rank // ranks, count * (rank + 1) // ranks) for rank in range(ranks)]
    for rank, tensor in enumerate(tensors):
        if quantity == "all-reduce" or (quantity == "reduce" and rank == 0):
            tensor.copy_(reduced)
        elif quantity == "reduce-scatter":
            tensor[parts[rank]] = reduced[parts[rank]]
        elif quantity == "all-gather":
            for source, part in enumerate(parts):
                tensor[part] = stacked[source][part]
        elif quantity == "broadcast":
            tensor.copy_(stacked[0])


@given(st.sampled_from(QUANTITIES), operators, types, st.integers(2, 9), st.integers(0, 9000))
@settings(max_examples=15)
def test_results_are_known_exactly_in_every_type(quantity, operator, name, ranks, count):
    dtype = getattr(torch, name)
    tensors = [torch.empty(count, dtype=dtype) for _ in range(ranks)]
    for rank, tensor in enumerate(tensors):
        inputs.fill(tensor, rank, ranks, operator)
    run_collective(quantity, operator, tensors)
    for rank, tensor in enumerate(tensors):
        wrong = inputs.count_wrong(quantity, tensor, rank, ranks, operator)
        assert wrong == 0
    # Every rank has its turn to double, so that a rank which is left out is missed.
    assert set(abs(inputs.get_result(ranks, None, "product"))) == {2}


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("operator", ["sum", "product", "min", "max"])
def test_a_collective_that_does_nothing_is_noticed(quantity, operator):
    noticed = 0
    for rank in range(3):
        tensor = torch.empty(3000)
        inputs.fill(tensor, rank, 3, operator)
        noticed += inputs.count_wrong(quantity, tensor, rank, 3, operator)
    assert noticed > 500


def test_an_average_may_be_rounded_in_the_contenders_own_way():
    tensors = [torch.empty(5000) for _ in range(3)]
    for rank, tensor in enumerate(tensors):
        inputs.fill(tensor, rank, 3, "average")
    for mean in (sum(tensors) / 3, sum(tensors) * (1 / 3), sum(each / 3 for each in tensors)):
        assert count_wrong(mean, 0, 3, "average") == 0
    assert count_wrong(sum(tensors), 0, 3, "average") > 3000


@given(st.integers(2, 64), st.sets(st.integers(0, 8191), min_size=1, max_size=9), st.integers(1, 6))
@settings(max_examples=8)
def test_every_wrong_element_is_counted(ranks, places, power):
    values = [torch.empty(8192) for _ in range(ranks)]
    for rank, tensor in enumerate(values):
        inputs.fill(tensor, rank, ranks)
    tensor = torch.stack(values).sum(0)
    # Chunks in each other's place.
    assert count_wrong(tensor.roll(8192 >> power), 0, ranks) > 1000
    tensor[list(places)] += 1
    assert count_wrong(tensor, 0, ranks) == len(places)


def test_dedicated_servers_contribute_nothing():
    tensor = torch.empty(100)
    inputs.fill(tensor, 1, 2)
    assert count_wrong(tensor, 1, 2, members=(1,)) == 0
    calls = FakeCalls(members=(0,))
    for calls.rank in (0, 1):
        assert worker.measure(calls, make_spec(20_000, 1))["wrong"] == 0


@pytest.fixture
def server():
    with json_lines.listen("127.0.0.1") as listening:
        yield listening


def address_of(server) -> str:
    return f"127.0.0.1:{json_lines.get_port(server)}"


def test_only_who_knows_the_token_gets_a_line(server):
    for text in (b"wrong!\n1\n", b"secret2\n1\n", b"sec\n", b"secret 1\n", b""):
        with socket.create_connection(server.getsockname()) as stranger:
            stranger.sendall(text)
    theirs = json_lines.connect([address_of(server)], "secret", "hello", 5)
    [(ours, greeting)] = json_lines.accept(server, "secret", 1, 5)
    assert greeting == "hello"
    ours.send({"do": "end"})
    assert theirs.receive() == {"do": "end"}
    theirs.close()
    assert ours.receive() is None
    ours.close()


def test_addresses_are_tried_until_one_answers(server):
    with json_lines.listen("127.0.0.1") as closed:
        nobody = address_of(closed)
    theirs = json_lines.connect([nobody, address_of(server)], "secret", None, 5)
    theirs.close()
    with pytest.raises(OSError, match=nobody):
        json_lines.connect([nobody], "secret", None, 5)


def test_waiting_for_nobody_ends_and_half_a_line_is_none(server, monkeypatch):
    looks = []
    with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
        json_lines.accept(server, "secret", 1, 0.3, lambda: looks.append(1))
    assert looks
    left, right = socket.socketpair()
    line = json_lines.JsonLine(left)
    right.sendall(b'{"times": [1')
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 9)
    with pytest.raises(ValueError, match="more than 9 bytes"):
        line.receive(5)
    monkeypatch.undo()
    right.sendall(b'{"times": [1')
    right.close()
    assert line.receive() is None
    line.close()


def make_spec(size: int, iterations: int, **more) -> CallSpec:
    return CallSpec("x", bytes=size, type="float32", iterations=iterations, **more)


class FakeCalls:
    """A rank that sums with nobody, and remembers what happened in which order."""

    rank, size = 0, 1

    def __init__(self, seconds=0.0, wrong=False, members=None) -> None:
        self.events: list[str] = []
        self.seconds, self.wrong, self.members = seconds, wrong, members
        self.tensor = torch.empty(5000)

    def prepare(self, spec):
        if spec.transport == "none":
            raise ConfigurationError("no such way")
        return Prepared(
            self.call, self.note("barrier"), self.tensor, self.members, self.note("close")
        )

    def note(self, what):
        return lambda: self.events.append(what)

    def call(self):
        self.events.append("call")
        time.sleep(self.seconds)
        if self.wrong:
            self.tensor[7] += 1

    def describe(self):
        return {"wait": "spin", "local_rank": self.rank}

    def broadcast(self, value):
        return value


def test_each_timed_call_is_behind_a_barrier_and_the_sum_is_checked_first():
    calls, begin = FakeCalls(seconds=0.01), time.perf_counter()
    found = worker.measure(calls, make_spec(20_000, 3))
    assert calls.events == ["call", *["barrier", "call"] * 4, "barrier", "close"]
    assert found["wrong"] == 0 and len(found["times"]) == 3
    times = [found["checked"], *found["times"]]
    assert min(times) >= 10_000_000 and sum(times) <= 1e9 * (time.perf_counter() - begin)
    assert not calls.tensor.any()


def test_wrong_elements_are_counted_and_refusals_passed_on():
    wrong = worker.measure(FakeCalls(wrong=True), make_spec(20_000, 1))
    assert wrong["wrong"] == 1
    refused = worker.measure(FakeCalls(), make_spec(4, 1, transport="none"))
    assert refused == {"refused": "no such way"}


def make_wire(rank: int, queues, *, loses: bool) -> SimpleNamespace:
    """MPI for rank ``rank`` of two that are threads; it may receive the last byte wrong."""

    def send(array, other):
        queues[other].put(array.copy())

    def receive(array, other):
        array[:] = queues[rank].get(timeout=60)
        if loses and len(array):
            array[-1] ^= 1

    def exchange(source, other, send_tag, target, sender, tag):
        send(source, other)
        receive(target, sender)

    return SimpleNamespace(
        Send=send, Recv=receive, Sendrecv=exchange, Get_rank=lambda: rank, Barrier=do_nothing
    )


def count_lost(prepare, size: int, loser: int | None, **more) -> list[int]:
    """Wrong bytes on ranks 0 and 1 after a checked call; ``loser`` receives a wrong one."""
    queues, found = [queue.SimpleQueue() for _ in range(2)], [-1, -1]

    def run(rank: int) -> None:
        wire = make_wire(rank, queues, loses=rank == loser)
        spec = make_spec(size, 1, pairs=((0, 1),), **more)
        found[rank] = worker.check(prepare(wire, spec), spec, rank, 2)[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("size", [1, 8, 10_000])
def test_a_message_that_arrives_wrong_is_noticed_in_each_direction(size):
    exchange = partial(count_lost, messages.prepare_exchange, size)
    for way in ({"is_mutual": False}, {"is_mutual": True}):
        lost = [exchange(loser, **way) for loser in (None, 0, 1)]
        assert lost == [[0, 0], [1, 0], [0, 1]]
    sent, received = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    silent = Prepared(do_nothing, do_nothing, exchange=Exchange(sent, received, 1))
    assert worker.check(silent, make_spec(size, 1), 0, 2)[0] == size
    # The answer to a longer message is empty.
    assert count_lost(messages.prepare_pairs, size, 1) == [0, 1]
    assert count_lost(messages.prepare_pairs, size, 0) == [int(size <= 8), 0]


def test_a_pair_whose_messages_are_wrong_is_named_and_not_timed(monkeypatch):
    def answer(spec):
        is_bad = [2, 0] in [list(pair) for pair in spec["pairs"]]
        return [{**each, "wrong": 5 * is_bad * (rank == 0)}
                for rank, each in enumerate(answer_with(9, 9, 9))]  # fmt: skip

    with fake_jobs(monkeypatch, answer, ranks=3):
        groups = list(measure_run(3, MPIRUN, make_plan(command="all-pairs")))
    (refusal,) = [each for group in groups for each in group.refusals]
    assert refusal.kind == WRONG and refusal.reason == "its result has 5 wrong elements 2→0"
    found = {(cell.at["from"], cell.at["to"]) for group in groups for cell in group.cells}
    assert found == {*itertools.permutations(range(3), 2)} - {(2, 0)}


def test_a_round_trip_is_two_messages(monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", itertools.count(0, 1000).__next__)
    _, times = worker.time_iterations(Prepared(do_nothing, do_nothing, messages=2), 2)
    assert times == [500, 500]
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for is_mutual, count in ((False, 2), (True, 1)):
        spec = make_spec(8, 1, is_mutual=is_mutual)
        assert torch_calls.prepare_exchange(spec, torch.device("cpu"), None).messages == count


def find_barrier(session) -> bool:
    """Whether calls of mpiddp over MPI are timed behind its own barrier."""
    from benchmarks.measure.collectives.ranks.mpi_calls import MpiCalls  # In a rank: it starts MPI.

    spec = replace(make_spec(8, 1, quantity="point-to-point", transport="mpi"), maker=OWN)
    return MpiCalls(session).prepare(spec).barrier is mpiddp.barrier


def test_ranks_that_sleep_do_not_wait_in_mpis_barrier_which_spins(pool):
    assert pool("openmpi", 2).call(find_barrier).values == [True, True]


def test_caches_are_swept_before_each_barrier(monkeypatch):
    calls = FakeCalls()
    monkeypatch.setattr(worker, "make_sweep", lambda: calls.note("sweep"))
    worker.measure(calls, make_spec(20_000, 2, cold=True))
    timed = ["sweep", "barrier", "call"]
    assert calls.events == ["call", "barrier", "call", *timed, *timed, "barrier", "close"]
    worker.measure(calls, make_spec(20_000, 2))
    assert calls.events.count("sweep") == 2


def test_a_sweep_is_longer_than_the_last_cache(monkeypatch, tmp_path):
    (tmp_path / "index3").mkdir()
    (tmp_path / "index3" / "size").write_text("64K\n")
    monkeypatch.setattr(load, "CACHES", tmp_path)
    assert load.find_last_cache() == 64 * K
    assert load.make_sweep()().nbytes == 2 * 64 * K


class Nap:
    """In the place of something to compute. Nothing but what is said to take time takes any."""

    now = 0.0

    def __init__(self, device):
        self.seconds = 0.0

    @classmethod
    def pass_until(cls, now):
        cls.now = max(cls.now, now)

    def set_seconds(self, seconds):
        self.seconds = seconds
        return 3

    def set_count(self, count):
        assert count == 3

    def compute(self):
        self.pass_until(self.now + self.seconds)

    def wait(self):
        pass


def test_what_overlaps_is_timed_alone_and_together(monkeypatch):
    monkeypatch.setattr(worker, "Kernel", Nap)
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter_ns=lambda: round(Nap.now * 1e9))
    monkeypatch.setattr(worker, "time", clock)
    calls = FakeCalls()

    def start():
        return partial(Nap.pass_until, Nap.now + 0.03)

    overlapped = Prepared(lambda: start()(), do_nothing, start=start)
    found = worker.time_overlap(calls, overlapped, 5)
    assert [set(found[name]) for name in ("alone", "compute", "times")] == [{30_000_000}] * 3
    with pytest.raises(ConfigurationError, match="no call that goes on"):
        worker.time_overlap(calls, Prepared(do_nothing, do_nothing), 1)
    # Of a call of 2 s beside a computation of 3 s, half takes time.
    visit = CallVisit(((4.0,),), compute=3.0, alone=2.0)
    assert describe_overlap([visit]) == {"compute": 3.0, "alone": 2.0, "hidden": 0.5}


def test_ranks_compute_for_about_the_time_of_a_call(monkeypatch):
    """If a product takes 0.1 ms, ten of them are as long as a call of 1 ms."""
    products = []
    monkeypatch.setattr(torch, "mm", lambda *_, **__: products.append(1))
    monkeypatch.setattr(load, "perf_counter", itertools.count(0, 1e-4).__next__)
    kernel = load.Kernel(None)
    assert kernel.set_seconds(1e-3) == 10
    products.clear()
    kernel.set_count(3)
    kernel.compute()
    kernel.wait()
    assert len(products) == 3


def test_busy_processes_end_with_the_rank_that_started_them():
    program = (
        "import os, subprocess, sys\n"
        "words = [sys.executable, '-S', '-c', sys.argv[1], str(os.getpid())]\n"
        "print(subprocess.Popen(words, stdout=subprocess.DEVNULL).pid)"
    )
    words = [sys.executable, "-S", "-c", program, load.BUSY]
    done = launchers.execute(*words).expect(0)
    launchers.until(lambda: not launchers.is_alive(int(done.stdout)), "the end of what is busy")


def test_the_slowest_rank_counts_in_each_iteration_and_ranks_are_kept_apart():
    answers = answer_with(0, 0)
    answers[0]["times"], answers[1]["times"], answers[1]["wrong"] = [1000, 5000], [3000, 2000], 2
    visit = read_visit(answers)
    assert visit.seconds == (pytest.approx(3e-6), pytest.approx(5e-6)) and visit.wrong == (0, 2)
    assert visit.by_rank == tuple(map(pytest.approx, ((1e-6, 5e-6), (3e-6, 2e-6))))
    with pytest.raises(RefusedError, match="not here"):
        read_visit([{"refused": "not here"}, {"refused": "not here"}])


def test_what_sums_wrongly_or_cannot_is_not_timed(monkeypatch):
    def answer(spec):
        if spec["maker"] == RING:
            return [{"refused": "not here"}] * 2
        return answer_with(3_000_000, 3_000_000, wrong=3 if spec["maker"] == MPI else 0)

    plan = make_plan("--algorithms", "auto", "--buffers", "private", "--repetitions", "2")
    with fake_jobs(monkeypatch, answer) as jobs:
        begun, group, ended = measure_run(2, MPIRUN, plan)
    makers = [cell.details["maker"] for cell in group.cells]
    assert makers == [GLOO, BACKEND, PERSISTENT, OWN, PREPARED]
    refusals = {each.contender: each for each in group.refusals}
    assert refusals["plain ring"].reason == "not here"
    assert refusals["MPI_Allreduce"].kind == WRONG
    # One look, two rounds of as many iterations as fit.
    asked = [spec for spec in jobs[TORCH_JOB].asked if spec["maker"] == GLOO]
    assert [spec["iterations"] for spec in asked] == [LENGTH.fewest, 10, 10]
    assert begun.facts["ranks"] == ended.facts["ranks"] == 2 and not group.facts
    assert ended.facts["first_calls"] == dict.fromkeys([GLOO, MPI, *makers[1:]], 5e-9)


def test_an_interruption_keeps_and_writes_what_was_measured(monkeypatch, tmp_path, capsys):
    def answer(spec):
        if spec["bytes"] == 64 and spec["iterations"] != LENGTH.fewest:
            answer.visits += 1
            if answer.visits > 9:
                raise KeyboardInterrupt
        return answer_with(1000, 1000)

    answer.visits = 0
    path = tmp_path / "record.jsonl"
    monkeypatch.setattr(engine, "check_run", lambda *_, **__: MPIRUN)
    words = ["--sizes", "8", "64", "--ranks", "2", "--algorithms", "auto", "--repetitions", "3"]
    words += ["--buffers", "private", "--output", str(path)]
    with fake_jobs(monkeypatch, answer), pytest.raises(KeyboardInterrupt):
        engine.run(measurement.QUANTITIES["allreduce"], words)
    record = read_record(path)
    assert not record.is_complete and "node[1-2]" not in path.read_text()
    whole, cut = ([cell for cell in record.cells if cell.at["bytes"] == n] for n in (8, 64))
    assert [cell.details["stopped"] for cell in whole] == ["rounds"] * 7
    assert sum(len(cell.samples) for cell in cut) == 9
    assert {cell.details["stopped"] for cell in cut} == {"interrupted"}
    assert "all-reduce: 8 B of float32, sum" in capsys.readouterr().out


class Planted(CallVisitor):
    """Visits without ranks: each takes a second of a clock, and its time is drawn."""

    def __init__(self, draw, *words: str) -> None:
        self.now, self.step, self.draw = 0.0, 1.0, draw
        super().__init__({}, make_plan(*words), 2, clock=lambda: self.now)

    def measure(self, key, iterations):
        self.now += self.step
        return CallVisit(((self.draw(key, self.now),) * iterations,) * 2)


TASK, OTHER = (Task(Contender(maker), 8, operator="sum") for maker in (MPI, GLOO))


def run_planted(draw, *words: str) -> Planted:
    visitor = Planted(draw, "--budget", "40", *words)
    visitor.visit_in_turns(visitor.admit([TASK, OTHER]))
    return visitor


def test_what_has_two_modes_spends_its_budget_and_the_others_go_no_further():
    modes = itertools.cycle([1, 2])
    visitor = run_planted(lambda key, now: next(modes) if key == TASK else 1)
    assert (visitor.judge(TASK), visitor.judge(OTHER)) == ("budget", "interval")
    # One second each, the look included.
    assert len(visitor.list_samples(TASK)) == 39 and len(visitor.list_samples(OTHER)) == 6


def test_a_drift_is_no_interval_and_at_least_three_rounds_are_measured():
    visitor = run_planted(lambda key, now: 1 + now / 10)
    assert {visitor.judge(key) for key in (TASK, OTHER)} == {"budget"}
    visitor = run_planted(lambda key, now: now, "--budget", "0.1")
    assert [len(visitor.list_samples(key)) for key in (TASK, OTHER)] == [3, 3]


def draw_ranks(generator, ranks: int, late: float = 0.0) -> list[list[float]]:
    """Iterations of an all-reduce, by rank: the last one comes late, and waits so much less."""
    base = [[generator.uniform(100e-6, 140e-6) for _ in range(9)] for _ in range(ranks)]
    return [[each + late for each in times] for times in base[:-1]] + [base[-1]]


@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
@settings(max_examples=8)
def test_a_rank_that_comes_late_is_named_and_equal_ranks_are_not(seed, ranks):
    generator = random.Random(seed)
    assert find_late_rank([draw_ranks(generator, ranks) for _ in range(20)]) is None
    visits = [draw_ranks(generator, ranks, 150e-6) for _ in range(20)]
    found = find_late_rank(visits)
    assert found is not None and found.rank == ranks - 1
    assert 100 < float(re.search(r"by (\d+) µs", found.reason)[1]) < 200
    # One that is late now and then, or by less than a wake-up, is not.
    assert find_late_rank([visits[0], *(draw_ranks(generator, ranks) for _ in range(19))]) is None
    assert find_late_rank([draw_ranks(generator, ranks, 10e-6) for _ in range(20)]) is None


@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
@settings(max_examples=8)
def test_a_slow_core_is_named_and_equal_ones_are_not(seed, ranks):
    generator = random.Random(seed)

    def draw(*slow: float) -> list[float]:
        """Loops per second; the ranks share some cores in turn."""
        shares = [generator.choice([1, 1, 0.5]) for _ in range(ranks - len(slow))]
        return [1e7 * share * generator.uniform(0.97, 1.03) for share in (*shares, *slow)]

    assert find_slow_core([draw() for _ in range(40)]) is None
    found = find_slow_core([draw(0.3) for _ in range(40)])
    assert found is not None and found.rank == ranks - 1 and "slow core" in found.reason
    assert find_slow_core([draw(0.3) for _ in range(5)]) is None


def test_a_planted_straggler_is_named_in_the_cells_and_the_table(monkeypatch):
    plan = make_plan("--repetitions", "12", "--buffers", "private")
    with fake_jobs(monkeypatch, lambda _: answer_with(400_000, 90_000, 410_000), ranks=3):
        cells = [cell for group in measure_run(3, MPIRUN, plan) for cell in group.cells]
    assert {cell.details["slow_rank"] for cell in cells} == {1}
    assert next(list_remarks(cells)).startswith("slow rank: rank 1 comes late, by 310 µs")


NARROW = (1.0, 1.004, 0.99, 1.01, 0.996, 1.002)


def make_times(**seconds: float):
    """Rounds of tasks, by the quantity's name with underscores and, behind two, its bytes."""
    times = {}
    for name, value in seconds.items():
        quantity, _, size = name.partition("__")
        quantity = quantity.replace("_", "-")
        task = Task(
            Contender(MPI, quantity=quantity), int(size or 64),
            operator="" if quantity in ("broadcast", "all-gather") else "sum",
        )  # fmt: skip
        times[task] = tuple(value * each for each in NARROW)
    return times


@pytest.mark.parametrize(
    ("seconds", "broken"),
    [
        ({"all_reduce": 3.2, "reduce": 1, "broadcast": 2}, ["reduce + broadcast"]),
        ({"all_reduce": 3.02, "reduce": 1, "broadcast": 2}, []),
        ({"all_reduce": 9, "reduce_scatter": 1, "all_gather": 2}, ["reduce-scatter + all-gather"]),
        ({"all_reduce": 9, "reduce": 1}, []),
        ({"all_reduce": 9, "all_reduce__16": 2}, ["4 calls of 16 B"]),
        ({"all_reduce": 9, "all_reduce__48": 2, "all_reduce__128": 1}, []),
        ({"all_gather": 3, "all_reduce": 2}, ["all-reduce"]),
        ({"broadcast": 3, "all_reduce": 4}, []),
    ],
)
def test_a_collective_must_not_lose_to_what_replaces_it(seconds, broken):
    times = make_times(**seconds)
    found = list_broken(next(iter(times)), times)
    assert [re.search(r"loses to (.*): ", text)[1] for text in found] == broken


def test_a_guideline_needs_intervals_of_the_same_contender():
    times = make_times(all_reduce=9, reduce=1, broadcast=1)
    task = next(iter(times))
    assert list_broken(task, {key: rounds[:3] for key, rounds in times.items()}) == []
    gloo = {replace(k, contender=replace(k.contender, maker=GLOO)): v for k, v in times.items()}
    assert list_broken(task, {**gloo, task: times[task]}) == []


def test_contenders_are_the_product_of_what_is_asked_for():
    words = ("--algorithms", "auto", "ring", "--transports", "mpi", "torch")
    rows = contenders.list_contenders("all-reduce", make_plan(*words), nccl=False)
    assert [row.maker for row in rows[:4]] == [GLOO, MPI, RING, PERSISTENT]
    # The last one is the ring over MPI once more, prepared as the plain ring is.
    assert len(rows) == 4 + 2 * 2 * 2 + 1 == len({row.label for row in rows})
    assert rows[-1] == Contender(PREPARED, MPI_JOB, "ring", "mpi")
    plan = make_plan("--algorithms", "auto", "--buffers", "gpu", command="broadcast")
    with_nccl = contenders.list_contenders("broadcast", plan, nccl=True)
    assert [row.name for row in with_nccl] == ["Gloo", "NCCL", "MPI_Bcast", "mpiddp auto"]
    assert "torch.distributed over mpiddp" not in [row.name for row in with_nccl]
    plan = make_plan("--algorithms", "auto", "--buffers", "private", command="reduce")
    own = contenders.list_contenders("reduce", plan, nccl=False)
    assert [row.maker for row in own] == [GLOO, MPI, BACKEND, OWN]
    assert [row.job for row in with_nccl] == [TORCH_JOB, TORCH_JOB, MPI_JOB, MPI_JOB]


def test_guidelines_measure_what_a_collective_can_be_replaced_by():
    plan = make_plan("--guidelines", "--operators", "max")
    (block,) = contenders.list_blocks(plan, [0, 0], nccl=False)
    assert {task.contender.quantity for task in block} == {
        "all-reduce", "reduce", "broadcast", "reduce-scatter", "all-gather",
    }  # fmt: skip
    assert {task.operator for task in block if task.contender.quantity == "broadcast"} == {""}
    assert {task.operator for task in block if task.contender.quantity == "reduce"} == {"max"}


@given(st.integers(2, 17))
def test_every_ordered_pair_meets_once_in_rounds_of_disjoint_pairs(ranks):
    rounds = contenders.list_rounds(range(ranks))
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == list(itertools.permutations(range(ranks), 2))
    for each in rounds:
        ends = [end for pair in each for end in pair]
        assert len(set(ends)) == len(ends)
    assert len(rounds) == 2 * (ranks - 1 + ranks % 2)


@pytest.mark.parametrize(("nodes", "senders"), [([0, 0, 1, 1, 2], {0, 2, 4}), ([0, 0], {0, 1})])
def test_all_pairs_are_those_of_nodes_if_there_are_several(nodes, senders):
    (rounds,) = contenders.list_blocks(make_plan(command="all-pairs"), nodes, nccl=False)
    assert {end for task in rounds for pair in task.pairs for end in pair} == senders


def test_messages_go_one_way_and_both_and_whole_elements_are_added():
    plan = make_plan("--sizes", "1", "4", command="point-to-point")
    one, four = contenders.list_blocks(plan, [0, 0], nccl=False)
    ways = itertools.product([GLOO, MPI, OWN], [False, True])
    assert [(task.contender.maker, task.is_mutual) for task in one] == list(ways)
    assert four[-1].contender.quantity == "reduction" and len(four) == len(one) + 1


def test_what_does_not_fit_is_refused_before_it_is_allocated():
    plan = replace(make_plan(), sizes=((8, 1 << 30),))
    # Two kinds of buffers and five more, on each of four ranks.
    check_memory(plan, 8, 2, 28 << 30)
    with pytest.raises(ConfigurationError, match=r"1 GiB on 4 ranks of a node needs 28 GiB .*27 G"):
        check_memory(plan, 8, 2, 27 << 30)


def test_the_framework_is_started_without_mpi_on_the_same_nodes():
    srun = Srun(Path("/usr/bin/srun"), "22.05.8", 2, False)
    ours = make_mpi_program(WORKER, 4, srun).command
    greeting = {"slurm_job": "7", "slurm_nodes": "node[1-2]"}
    theirs = make_torch_program(WORKER, 4, srun, greeting).command
    assert ours[1] == theirs[1] == "--overlap"
    assert {"--jobid=7", "--nodelist=node[1-2]", "--mpi=none", "--ntasks=2"} <= set(theirs)
    # A torchrun for each node starts its ranks, and has a core for each.
    assert "--cpus-per-task=2" in theirs and theirs[theirs.index("static") + 2] == "2"
    assert theirs[-2:] == (WORKER, TORCH_JOB)
    assert ours[-1] == MPI_JOB and "--mpi=pmix" in ours
    assert measurement.list_runs(make_plan(), srun)[0][1] == srun
    runs = measurement.list_runs(make_plan(command="point-to-point"), srun)
    assert [(ranks, each.nodes) for ranks, each in runs] == [(2, 1), (2, 2)]
    assert len(contenders.list_probes(machine=True, link=True)) == 6
    assert len(contenders.list_probes(machine=False, link=True)) == 1
    # But for what is tuned, both have the same settings.
    both = make_mpi_program(WORKER, 2, MPIRUN), make_torch_program(WORKER, 2, MPIRUN, {})
    one, other = ({*each.environment.items()} for each in both)
    assert {name for name, _ in one ^ other} == set(MPIRUN.tuned)
