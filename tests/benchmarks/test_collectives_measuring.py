"""``benchmarks allreduce``: what ranks sum and time, the lines to them, and what is asked."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.collectives import command as allreduce
from benchmarks.collectives import report as allreduce_report
from benchmarks.collectives.contenders import (
    GLOO,
    MPI,
    PERSISTENT,
    PREPARED,
    RING,
    WORKER,
    Cell,
    Contender,
    list_contenders,
    list_probes,
)
from benchmarks.collectives.measurement import LENGTH, Visit, Visitor, find_slowest
from benchmarks.collectives.ranks import inputs as allreduce_inputs
from benchmarks.collectives.ranks import worker as allreduce_worker
from benchmarks.collectives.ranks.calls import CallSpec, Prepared
from benchmarks.common.trials import RefusedError
from benchmarks.launching import json_lines, launchers, worker_loop
from benchmarks.launching.paired_jobs import (
    MPI_JOB,
    TORCH_JOB,
    make_mpi_program,
    make_torch_program,
)
from benchmarks.launching.srun import Srun
from groups import PRIVATE_OWN, make_group, make_plan
from mpiddp.errors import ConfigurationError

# ---- inputs ------------------------------------------------------------------------------------

types = st.sampled_from(list(allreduce.ITEM_BYTES))


@given(types, st.integers(1, 64), st.integers(0, 3 * allreduce_inputs.PERIOD))
@settings(max_examples=40, deadline=None)
def test_inputs_sum_exactly_in_every_type(name, ranks, count):
    dtype = getattr(torch, name)
    total = torch.zeros(count, dtype=dtype)
    for rank in range(ranks):
        values = torch.empty(count, dtype=dtype)
        allreduce_inputs.fill(values, rank, ranks)
        total += values
    assert allreduce_inputs.count_wrong(total, ranks) == 0


@given(st.integers(2, 64), st.sets(st.integers(0, 9999), min_size=1, max_size=9))
@settings(max_examples=20, deadline=None)
def test_every_wrong_element_is_counted(ranks, places):
    tensor = make_sum(10_000, ranks)
    tensor[list(places)] += 1
    assert allreduce_inputs.count_wrong(tensor, ranks) == len(places)


def make_sum(count: int, ranks: int) -> torch.Tensor:
    inputs = [torch.empty(count) for _ in range(ranks)]
    for rank, values in enumerate(inputs):
        allreduce_inputs.fill(values, rank, ranks)
    return torch.stack(inputs).sum(0)


@given(st.integers(2, 64), st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_chunks_in_each_others_place_are_noticed(ranks, power):
    tensor = make_sum(8192, ranks)
    assert allreduce_inputs.count_wrong(tensor.roll(8192 >> power), ranks) > 1000


def test_one_ranks_input_is_not_the_sum():
    tensor = torch.empty(100)
    allreduce_inputs.fill(tensor, 1, 2)
    assert allreduce_inputs.count_wrong(tensor, 2) > 50


def test_dedicated_servers_contribute_nothing():
    tensor = torch.empty(100)
    allreduce_inputs.fill(tensor, 1, 2)
    assert allreduce_inputs.count_wrong(tensor, 2, (1,)) == 0
    calls = FakeCalls(members=(0,))
    assert allreduce_worker.measure(calls, make_spec(20_000, 1))["wrong"] == 0
    calls.rank = 1
    assert allreduce_worker.measure(calls, make_spec(20_000, 1))["wrong"] == 0


# ---- lines -------------------------------------------------------------------------------------


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


def test_waiting_for_nobody_ends(server):
    looks = []
    with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
        json_lines.accept(server, "secret", 1, 0.3, lambda: looks.append(1))
    assert looks


def test_half_a_line_is_none():
    left, right = socket.socketpair()
    line = json_lines.Line(left)
    right.sendall(b'{"times": [1')
    right.close()
    assert line.receive() is None
    line.close()


# ---- the ranks ---------------------------------------------------------------------------------


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
        return {"wait": "spin"}


def test_each_timed_call_is_behind_a_barrier_and_the_sum_is_checked_first():
    calls = FakeCalls(seconds=0.01)
    found = allreduce_worker.measure(calls, make_spec(20_000, 3))
    assert calls.events == ["call", *["barrier", "call"] * 4, "barrier", "close"]
    assert found["wrong"] == 0 and len(found["times"]) == 3
    assert all(10_000_000 <= each < 1e9 for each in found["times"])
    assert not calls.tensor.any()


def test_wrong_elements_are_counted_and_refusals_passed_on():
    wrong = allreduce_worker.measure(FakeCalls(wrong=True), make_spec(20_000, 1))
    assert wrong["wrong"] == 1
    refused = allreduce_worker.measure(FakeCalls(), make_spec(4, 1, transport="none"))
    assert refused == {"refused": "no such way"}


def test_rank_0_passes_commands_on_and_gathers_the_answers():
    pairs = [[json_lines.Line(end) for end in socket.socketpair()] for _ in range(2)]
    (command, above), (below, other) = pairs
    describe = partial(allreduce_worker.perform, FakeCalls())
    threads = [
        threading.Thread(target=worker_loop.serve, args=(0, describe, above, [below])),
        threading.Thread(target=worker_loop.serve, args=(1, describe, other, [])),
    ]
    for thread in threads:
        thread.start()
    command.send({"do": "describe"})
    assert command.receive(10) == [{"wait": "spin"}] * 2
    command.send({"do": "end"})
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for line in (command, above, below, other):
        line.close()


# ---- visits ------------------------------------------------------------------------------------


def test_the_slowest_rank_counts_in_each_iteration():
    answers = [{"times": [1000, 5000], "wrong": 0}, {"times": [3000, 2000], "wrong": 2}]
    assert find_slowest(answers) == Visit((pytest.approx(3e-6), pytest.approx(5e-6)), 2)
    with pytest.raises(RefusedError, match="not here"):
        find_slowest([{"refused": "not here"}, {"refused": "not here"}])


@given(st.floats(min_value=1e-9, max_value=1e3))
def test_iterations_fill_a_visit_within_bounds(seconds):
    count = LENGTH.choose_iterations(seconds)
    assert LENGTH.fewest <= count <= LENGTH.most
    if LENGTH.fewest < count < LENGTH.most:
        assert count * seconds <= LENGTH.seconds * (1 + 1e-9)
        assert LENGTH.seconds < (count + 1) * seconds * (1 + 1e-9)


class FakeJob:
    """Answers by what is asked for, and keeps that."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def ask(self, command, what):
        self.asked.append(command["spec"])
        return self.answer(command["spec"])


def test_what_sums_wrongly_or_cannot_is_not_timed():
    def answer(spec):
        if spec["maker"] == RING:
            return [{"refused": "not here"}]
        wrong = 3 if spec["maker"] == MPI else 0
        return [{"times": [20_000_000] * spec["iterations"], "wrong": wrong}]

    jobs = {MPI_JOB: FakeJob(answer), TORCH_JOB: FakeJob(answer)}
    rows = [Contender(GLOO, TORCH_JOB), Contender(MPI), Contender(RING), PRIVATE_OWN]
    visitor = Visitor(jobs, make_plan(), 2)
    admitted = visitor.admit([Cell(row, 8) for row in rows])
    series = visitor.visit_in_turns(admitted)
    assert set(series) == {Cell(rows[0], 8), Cell(PRIVATE_OWN, 8)}
    assert visitor.refusals == {Cell(rows[2], 8): "not here"}
    group = make_group({}, refusals=visitor.refusals, wrong=visitor.wrong)
    assert allreduce_report.list_wrong([group]) == [
        "MPI_Allreduce at 8 B on 2 ranks: 3 wrong elements"
    ]
    # One look, one warm-up round, two rounds of as many iterations as fit.
    counts = [spec["iterations"] for spec in jobs[TORCH_JOB].asked]
    assert counts == [LENGTH.fewest, 5, 5, 5]


def test_iterations_can_be_fixed():
    job = FakeJob(lambda spec: [{"times": [10] * spec["iterations"], "wrong": 0}])
    visitor = Visitor({MPI_JOB: job}, make_plan(iterations=7), 2)
    visitor.visit_in_turns(visitor.admit([Cell(PRIVATE_OWN, 8)]))
    assert [spec["iterations"] for spec in job.asked] == [LENGTH.fewest, 7, 7, 7]


# ---- contenders --------------------------------------------------------------------------------


def test_contenders_are_the_product_of_what_is_asked_for():
    rows = list_contenders(["auto", "ring"], ["mpi", "torch"], ["private", "shared"], nccl=False)
    assert [row.maker for row in rows[:4]] == [GLOO, MPI, RING, PERSISTENT]
    # The last one is the ring over MPI once more, prepared as the plain ring is.
    assert len(rows) == 4 + 2 * 2 * 2 + 1 == len({row.label for row in rows})
    assert rows[-1] == Contender(PREPARED, MPI_JOB, "ring", "mpi")
    with_nccl = list_contenders(["auto"], ["auto"], ["gpu"], nccl=True)
    assert [row.name for row in with_nccl[:2]] == ["Gloo", "NCCL"]
    assert [row.job for row in with_nccl[:3]] == [TORCH_JOB, TORCH_JOB, MPI_JOB]


def test_the_framework_is_started_without_mpi_on_the_same_nodes():
    srun = Srun(Path("/usr/bin/srun"), "22.05.8", 2, False)
    ours = make_mpi_program(WORKER, 4, srun).command
    greeting = {"slurm_job": "7", "slurm_nodes": "node[1-2]"}
    theirs = make_torch_program(WORKER, 4, srun, greeting).command
    assert ours[1] == theirs[1] == "--overlap"
    assert {"--jobid=7", "--nodelist=node[1-2]", "--mpi=none", "--ntasks=2"} <= set(theirs)
    assert theirs[-2:] == ("benchmarks.collectives.ranks.worker", TORCH_JOB)
    assert ours[-1] == MPI_JOB and "--mpi=pmix" in ours


def test_both_jobs_have_like_settings(tmp_path):
    mpirun = launchers.Mpirun(tmp_path / "mpirun", launchers.command.OPEN_MPI, "5.0.11", None)
    ours, theirs = make_mpi_program(WORKER, 2, mpirun), make_torch_program(WORKER, 2, mpirun, {})
    differing = set(ours.environment.items()) ^ set(theirs.environment.items())
    assert {name for name, _ in differing} == set(mpirun.tuned)
    assert ours.environment["OMP_NUM_THREADS"] == "1"


def test_the_link_is_probed_only_on_request():
    assert len(list_probes(link=True)) == len(list_probes(link=False)) + 1
