"""``benchmarks allreduce``: inputs, lines, jobs, statistics, targets, and real small runs."""

from __future__ import annotations

import itertools
import json
import math
import socket
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import launchers as launching
from benchmarks import launchers, processes, records
from benchmarks.allreduce import command as allreduce
from benchmarks.allreduce import inputs as allreduce_inputs
from benchmarks.allreduce import jobs as allreduce_jobs
from benchmarks.allreduce import lines as allreduce_lines
from benchmarks.allreduce import plot as allreduce_plot
from benchmarks.allreduce import report as allreduce_report
from benchmarks.allreduce import targets as allreduce_targets
from benchmarks.allreduce import visits as allreduce_measure
from benchmarks.allreduce import worker as allreduce_worker
from benchmarks.allreduce.calls import Order, Prepared
from benchmarks.allreduce.contenders import (
    BOUND_BYTES,
    COPIES,
    GLOO,
    MPI,
    MPI_JOB,
    OWN,
    PERSISTENT,
    PREPARED,
    RING,
    TORCH_JOB,
    Cell,
    Contender,
    list_contenders,
    list_probes,
    make_mpi_program,
    make_torch_program,
)
from benchmarks.allreduce.visits import Group, RefusedError, Visit, Visitor, find_slowest
from benchmarks.measure import Series, median_interval
from benchmarks.processes import MARK, Program, RunError
from benchmarks.srun import Srun, find_srun
from mpiddp.collectives.registry import names
from mpiddp.errors import ConfigurationError

K, M = 1 << 10, 1 << 20
PRIVATE_OWN, SHARED_OWN = Contender(OWN, buffer="private"), Contender(OWN, buffer="shared")
OWN_RING = Contender(PREPARED, algorithm="ring", transport="mpi")

# Inputs

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
    assert allreduce_worker.measure(calls, Order("x", 20_000, "float32", 1))["wrong"] == 0
    calls.rank = 1
    assert allreduce_worker.measure(calls, Order("x", 20_000, "float32", 1))["wrong"] == 0


# Lines


@pytest.fixture
def server():
    with allreduce_lines.listen("127.0.0.1") as listening:
        yield listening


def address_of(server) -> str:
    return f"127.0.0.1:{allreduce_lines.get_port(server)}"


def test_only_who_knows_the_token_gets_a_line(server):
    for text in (b'{"token": "wrong", "greeting": 1}\n', b"not JSON\n", b'["secret"]\n', b""):
        with socket.create_connection(server.getsockname()) as stranger:
            stranger.sendall(text)
    theirs = allreduce_lines.connect([address_of(server)], "secret", "hello", 5)
    ours, greeting = allreduce_lines.accept(server, "secret", 5)
    assert greeting == "hello"
    ours.send({"do": "end"})
    assert theirs.receive() == {"do": "end"}
    theirs.close()
    assert ours.receive() is None
    ours.close()


def test_addresses_are_tried_until_one_answers(server):
    with allreduce_lines.listen("127.0.0.1") as closed:
        nobody = address_of(closed)
    theirs = allreduce_lines.connect([nobody, address_of(server)], "secret", None, 5)
    theirs.close()
    with pytest.raises(OSError, match=nobody):
        allreduce_lines.connect([nobody], "secret", None, 5)


def test_waiting_for_nobody_ends(server):
    looks = []
    with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
        allreduce_lines.accept(server, "secret", 0.3, lambda: looks.append(1))
    assert looks


def test_half_a_line_is_none():
    left, right = socket.socketpair()
    line = allreduce_lines.Line(left)
    right.sendall(b'{"times": [1')
    right.close()
    assert line.receive() is None
    line.close()


# The ranks


class FakeCalls:
    """A rank that sums with nobody, and remembers what happened in which order."""

    rank, size = 0, 1

    def __init__(self, seconds=0.0, wrong=False, members=None) -> None:
        self.events: list[str] = []
        self.seconds, self.wrong, self.members = seconds, wrong, members
        self.tensor = torch.empty(5000)

    def prepare(self, order):
        if order.transport == "none":
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
    found = allreduce_worker.measure(calls, Order("x", 20_000, "float32", 3))
    assert calls.events == ["call", *["barrier", "call"] * 4, "barrier", "close"]
    assert found["wrong"] == 0 and len(found["times"]) == 3
    assert all(10_000_000 <= each < 1e9 for each in found["times"])
    assert not calls.tensor.any()


def test_wrong_elements_are_counted_and_refusals_passed_on():
    wrong = allreduce_worker.measure(FakeCalls(wrong=True), Order("x", 20_000, "float32", 1))
    assert wrong["wrong"] == 1
    refused = allreduce_worker.measure(FakeCalls(), Order("x", 4, "float32", 1, transport="none"))
    assert refused == {"refused": "no such way"}


def test_rank_0_passes_commands_on_and_gathers_the_answers():
    pairs = [[allreduce_lines.Line(end) for end in socket.socketpair()] for _ in range(2)]
    (command, above), (below, other) = pairs
    other_calls = FakeCalls()
    other_calls.rank = 1
    threads = [
        threading.Thread(target=allreduce_worker.serve, args=(FakeCalls(), above, [below])),
        threading.Thread(target=allreduce_worker.serve, args=(other_calls, other, [])),
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


# Visits


def test_the_slowest_rank_counts_in_each_iteration():
    answers = [{"times": [1000, 5000], "wrong": 0}, {"times": [3000, 2000], "wrong": 2}]
    assert find_slowest(answers) == Visit((pytest.approx(3e-6), pytest.approx(5e-6)), 2)
    with pytest.raises(RefusedError, match="not here"):
        find_slowest([{"refused": "not here"}, {"refused": "not here"}])


@given(st.floats(min_value=1e-9, max_value=1e3))
def test_iterations_fill_a_visit_within_bounds(seconds):
    count = allreduce_measure.choose_iterations(seconds)
    assert allreduce_measure.FEWEST <= count <= allreduce_measure.MOST
    if count > allreduce_measure.FEWEST:
        assert count * seconds <= allreduce_measure.VISIT_SECONDS * (1 + 1e-9)


class FakeJob:
    """Answers by what is asked for; keeps the orders."""

    def __init__(self, answer):
        self.answer, self.orders = answer, []

    def ask(self, command, what):
        self.orders.append(command["order"])
        return self.answer(command["order"])


class Bar:
    def set_description(self, text):
        pass

    def update(self):
        pass


def make_plan(*sizes: int, **changes):
    arguments = ["--sizes", *map(str, sizes or (8,)), "--repetitions", "2", "--warm-up", "1"]
    plan = allreduce.parse(arguments).plan
    return allreduce_measure.Plan(**{**vars(plan), **changes})


def test_what_sums_wrongly_or_cannot_is_not_timed():
    def answer(order):
        if order["maker"] == RING:
            return [{"refused": "not here"}]
        wrong = 3 if order["maker"] == MPI else 0
        return [{"times": [20_000_000] * order["iterations"], "wrong": wrong}]

    jobs = {MPI_JOB: FakeJob(answer), TORCH_JOB: FakeJob(answer)}
    rows = [Contender(GLOO, TORCH_JOB), Contender(MPI), Contender(RING), PRIVATE_OWN]
    visitor = Visitor(jobs, make_plan(), 2, Bar())
    admitted = visitor.admit([Cell(row, 8) for row in rows])
    series = visitor.visit_in_turns(admitted)
    assert set(series) == {Cell(rows[0], 8).name, Cell(PRIVATE_OWN, 8).name}
    assert visitor.refusals == {Cell(rows[2], 8).name: "not here"}
    group = make_group({}, refusals=visitor.refusals, wrong=visitor.wrong)
    assert allreduce_report.list_wrong([group]) == [
        "MPI_Allreduce at 8 B on 2 ranks: 3 wrong elements"
    ]
    # One look, one warm-up round, two rounds of as many iterations as fit.
    counts = [order["iterations"] for order in jobs[TORCH_JOB].orders]
    assert counts == [allreduce_measure.FEWEST, 5, 5, 5]


def test_iterations_can_be_fixed():
    job = FakeJob(lambda order: [{"times": [10] * order["iterations"], "wrong": 0}])
    visitor = Visitor({MPI_JOB: job}, make_plan(iterations=7), 2, Bar())
    visitor.visit_in_turns(visitor.admit([Cell(PRIVATE_OWN, 8)]))
    assert [order["iterations"] for order in job.orders] == [allreduce_measure.FEWEST, 7, 7, 7]


@given(st.sampled_from(["auto", "ring:segments=4"]), st.integers(1, 1 << 40))
def test_a_cells_name_can_be_split(algorithm, size):
    row = Contender(OWN, MPI_JOB, algorithm)
    assert Cell.split(Cell(row, size).name) == (row.label, size)


# Contenders


def test_contenders_are_the_product_of_what_is_asked_for():
    rows = list_contenders(["auto", "ring"], ["mpi", "torch"], ["private", "shared"], nccl=False)
    assert [row.maker for row in rows[:4]] == [GLOO, MPI, RING, PERSISTENT]
    assert len(rows) == 4 + 2 * 2 * 2 == len({row.label for row in rows})
    with_nccl = list_contenders(["auto"], ["auto"], ["gpu"], nccl=True)
    assert [row.name for row in with_nccl[:2]] == ["Gloo", "NCCL"]
    assert [row.job for row in with_nccl[:3]] == [TORCH_JOB, TORCH_JOB, MPI_JOB]


def test_the_framework_is_started_without_mpi_on_the_same_nodes():
    srun = Srun(Path("/usr/bin/srun"), "22.05.8", 2, False)
    ours = make_mpi_program(4, srun).command
    greeting = {"slurm_job": "7", "slurm_nodes": "node[1-2]"}
    theirs = make_torch_program(4, srun, greeting).command
    assert ours[1] == theirs[1] == "--overlap"
    assert {"--jobid=7", "--nodelist=node[1-2]", "--mpi=none", "--ntasks=2"} <= set(theirs)
    assert theirs[-2:] == ("benchmarks.allreduce.worker", TORCH_JOB)
    assert ours[-1] == MPI_JOB and "--mpi=pmix" in ours


def test_both_jobs_have_like_settings(tmp_path):
    mpirun = launchers.Mpirun(tmp_path / "mpirun", "openmpi", "5.0.11", None)
    ours, theirs = make_mpi_program(2, mpirun), make_torch_program(2, mpirun, {})
    differing = set(ours.environment.items()) ^ set(theirs.environment.items())
    assert {name for name, _ in differing} == set(mpirun.tuned)
    assert ours.environment["OMP_NUM_THREADS"] == "1"


def test_the_link_is_probed_only_on_request():
    assert len(list_probes(link=True)) == len(list_probes(link=False)) + 1


# Jobs

GREET = (
    "import os, sys\n"
    "from benchmarks.allreduce.lines import connect\n"
    f"line = connect(sys.argv[-1].split(','), os.environ['{MARK}'], 'hello', 10)\n"
)


def make_program(text: str) -> Program:
    return Program((sys.executable, "-c", text), launchers.clean_environment())


def start_job(text: str, deadline: float = 30):
    return allreduce_jobs.start(make_program(text), deadline)


def count_left() -> int:
    """Processes below this one, zombies left out."""
    children = psutil.Process().children(recursive=True)
    return sum(child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_a_job_answers_and_ends():
    text = GREET + "while (c := line.receive())['do'] != 'end': line.send([c['do'], os.getcwd()])"
    with start_job(text) as job:
        assert job.greeting == "hello"
        assert job.ask({"do": "it"}, "trying") == ["it", str(job.scratch)]
        job.end()
    assert count_left() == 0


def test_what_other_programs_take_is_told_apart():
    burn = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\n"
    text = GREET + "while line.receive()['do'] != 'end':\n    exec(sys.argv[1]); line.send([])"
    program = make_program(text)
    own = Program((*program.command, burn), program.environment)
    with allreduce_jobs.start(own, 30) as job:
        before = allreduce_jobs.count_others_seconds([job]), allreduce_jobs.count_others_seconds([])
        job.ask({"do": "burn"}, "burning")
        after = allreduce_jobs.count_others_seconds([job]), allreduce_jobs.count_others_seconds([])
        job.end()
    others, everybody = (late - early for early, late in zip(before, after, strict=True))
    assert 0.4 < everybody - others < 0.6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GREET + "line.receive(); print('it broke'); sys.exit(7)", "exit code 7 .trying.:.*broke"),
        (GREET + "line.receive(); import time; time.sleep(300)", "no answer for 2 s .trying."),
        ("print('it broke'); raise SystemExit(7)", "ended with exit code 7:.*it broke"),
        ("import time; time.sleep(300)", "not ready within 2 s"),
        (GREET + "line.receive(); line.send([]); sys.exit(7)", "ended with exit code 7"),
    ],
)
def test_a_job_that_dies_or_hangs_is_an_error_with_its_output(text, message):

    def use_job():
        with start_job(text, 2) as job:
            job.ask({"do": "it"}, "trying")
            job.end()

    with pytest.raises(RunError, match=f"(?s){message}"):
        use_job()
    assert count_left() == 0


def test_a_job_leaves_no_detached_process():
    text = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
        "subprocess.Popen(sleep, start_new_session=True)\n"
    )
    with start_job(text + GREET + "line.receive()") as job:
        assert len(processes.find_marked(job.mark)) == 2
        job.end()
        assert len(processes.find_marked(job.mark)) == 1
    assert processes.find_marked(job.mark) == []


def test_a_job_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(allreduce_jobs, "END_SECONDS", 0.3)
    with (
        pytest.raises(RunError, match=r"not ended 0\.3 s after"),
        start_job(GREET + "import time; time.sleep(300)") as job,
    ):
        job.end()
    assert count_left() == 0


def test_a_program_that_is_not_there_is_named():
    with (
        pytest.raises(RunError, match="/no/such/program cannot be started"),
        allreduce_jobs.start(Program(("/no/such/program",), {}), 1),
    ):
        pass


# The report


def make_group(times, ranks: int = 2, nodes: int | None = None, **more) -> Group:
    """A group with these seconds, by contender and size: a list of rounds, each of a visit."""
    rows = list_contenders(["auto", "ring"], ["auto", "mpi"], ["private", "shared"], nccl=False)
    series = {
        Cell(row, size).name: Series((), tuple(Visit(tuple(each), 0) for each in rounds), ())
        for (row, size), rounds in times.items()
    }
    sizes = tuple(sorted({size for row, size in times if row in rows})) or (8,)
    settings = {"refusals": {}, "wrong": {}, **more}
    return Group(ranks, nodes, make_plan(*sizes), tuple(rows), series, **settings)


GLOO_ROW, MPI_ROW = Contender(GLOO, TORCH_JOB), Contender(MPI)


@pytest.mark.parametrize("count", [1001, 2500, 5000])
def test_the_interval_of_a_large_sample_covers_the_median_in_95_of_100(count):
    interval = median_interval([float(value) for value in range(count)])
    k = int(interval.low) + 1
    assert interval.high == count - k
    ways, all_ways = 1, 0
    for each in range(k):
        all_ways += ways
        ways = ways * (count - each) // (each + 1)
    below = Fraction(all_ways, 2**count)
    assert 0.95 <= float(1 - 2 * below) <= 0.96


def test_a_small_samples_interval_is_exact():
    assert median_interval([1.0, 2.0]) is None
    assert median_interval([float(value) for value in range(6)]).low == 0


def test_rates_are_those_of_nccl_tests():
    assert allreduce_report.find_rates(4, 8_000_000, 1e-3) == pytest.approx((8.0, 12.0))
    assert allreduce_report.find_rates(2, 8_000_000, 1e-3) == pytest.approx((8.0, 8.0))


def test_a_speed_is_the_median_of_the_rounds_ratios():
    own = [[1.0], [2.0], [9.0]]
    group = make_group({(PRIVATE_OWN, 8): own, (GLOO_ROW, 8): [[4.0], [4.0], [9.0]]})
    speed = allreduce_report.find_speed(group, PRIVATE_OWN, GLOO_ROW, 8)
    assert (speed.median, speed.minimum, speed.maximum) == (2.0, 1.0, 4.0)
    assert allreduce_report.find_speed(group, PRIVATE_OWN, MPI_ROW, 8) is None


def test_the_table_shows_rates_ratios_and_wrong_elements():
    times = {
        (GLOO_ROW, M): [[8e-3] * 6],
        (MPI_ROW, M): [[4e-3] * 6],
        (PRIVATE_OWN, M): [[1e-3, 1e-3, 2e-3, 2e-3, 3e-3, 3e-3]],
    }
    ring = Cell(Contender(RING), M).name
    group = make_group(times, refusals={Cell(SHARED_OWN, M).name: "no room"}, wrong={ring: 12})
    lines = allreduce_report.format_table(group, M).splitlines()
    assert lines[0] == "1 MiB of float32, 6 iterations"
    row = next(line for line in lines if line.startswith("mpiddp auto") and "private" in line)
    # 2 ms: half a GB/s; the 5th of 100 lies a quarter from 1 ms to 1 ms.
    expected = "auto private 2 ms 1 ms – 3 ms 1 ms – 3 ms 0.524 0.524 4.00 2.00 0"
    assert row.split()[2:] == expected.split()
    wrong = next(line for line in lines if line.startswith("plain ring "))
    assert wrong.split()[-2:] == ["–", "12"]
    assert not any("shared" in line and line.startswith("mpiddp auto") for line in lines[2:3])
    text = allreduce_report.format_group(group)
    assert "left out: mpiddp auto, auto, shared at 1 MiB: no room" in text


def test_the_quickest_copy_is_the_memory_bound():
    seconds = dict(zip(COPIES, (0.04, 0.02, 0.03), strict=True))
    times = {(Contender(name), BOUND_BYTES): [[each] * 3] for name, each in seconds.items()}
    group = make_group(times)
    limits = allreduce_report.find_limits(group)
    assert (limits.copy_way, limits.copy.median) == (COPIES[1], 0.02)
    assert limits.peer_read is None and limits.link is None
    # 67.1 MB in 20 ms
    assert "20 ms to read and write 64 MiB" in allreduce_report.describe_limits(group)
    assert "3.36 GB/s" in allreduce_report.describe_limits(group)


def test_a_record_has_every_iteration():
    own = [[1e-3, 2e-3], [3e-3, 4e-3]]
    group = make_group({(PRIVATE_OWN, 8): own, (Contender(COPIES[0]), BOUND_BYTES): [[1.0]]})
    (described,) = allreduce_report.describe_groups([group])
    (cell,) = described["cells"]
    assert cell["nanoseconds"] == [[1_000_000, 2_000_000], [3_000_000, 4_000_000]]
    assert (cell["bytes"], cell["seconds"]["count"]) == (8, 4)
    assert cell["seconds"]["median"] == pytest.approx(2.5e-3)
    (probe,) = described["probes"].values()
    assert probe["nanoseconds"] == [[1_000_000_000]]
    json.dumps(described)


# Targets


def judge(times, ranks=2, cores=2, nodes=None) -> dict[str, allreduce_targets.Target]:
    found = allreduce_targets.judge([make_group(times, ranks, nodes)], cores)
    return {target.text: target for target in found}


def test_two_ranks_have_the_promised_speeds():
    quick, slow = [[1.0]] * 3, [[10.0]] * 3
    times = {(GLOO_ROW, size): slow for size in (8, 256 * K, M, 64 * M)}
    times |= {(PRIVATE_OWN, size): quick for size in (8, 256 * K, M, 64 * M)}
    times |= {(MPI_ROW, size): [[1.5]] * 3 for size in (8, 256 * K, M, 64 * M)}
    times |= {(Contender(name), BOUND_BYTES): [[0.7]] for name in COPIES}
    times |= {(SHARED_OWN, 64 * M): quick}
    found = judge(times)
    by_gloo = found["mpiddp auto, auto, private: at least 4 × Gloo"]
    assert [value.bytes for value in by_gloo.values] == [256 * K, M, 64 * M]
    assert by_gloo.met and by_gloo.values[0].found == 10
    at_all, at_most = (
        found[f"mpiddp auto, auto, private: at least {least} × MPI_Allreduce"] for least in (1, 2)
    )
    assert [value.bytes for value in at_all.values] == [M, 64 * M] and at_all.met
    assert [value.bytes for value in at_most.values] == [64 * M] and not at_most.met
    assert str(at_most).endswith("64 MiB 1.50 (missed): missed")
    (latency,) = found["mpiddp auto, auto, private: at most 1.2 of MPI_Allreduce's time"].values
    assert (latency.bytes, latency.found, latency.met) == (8, pytest.approx(2 / 3), True)
    (bound,) = found["mpiddp auto, auto, shared: at least 0.8 of the memory bound"].values
    assert (bound.found, bound.met) == (pytest.approx(0.7), False)


def test_the_executor_is_measured_by_the_quicker_plain_ring():
    times = {(Contender(RING), size): [[3e-3]] for size in (8, M)}
    times |= {(Contender(PERSISTENT), size): [[1e-3]] for size in (8, M)}
    times |= {(OWN_RING, 8): [[1.0009e-3]], (OWN_RING, M): [[1.06e-3]]}
    small, large = sorted(judge(times).values(), key=lambda target: target.values[0].bytes)
    assert small.met and small.values[0].found == pytest.approx(0.9)
    assert not large.met and large.values[0].found == pytest.approx(1.06)


def test_more_ranks_than_cores_are_never_slower():
    times = {(GLOO_ROW, 8): [[2.0]], (MPI_ROW, 8): [[1.0]], (PRIVATE_OWN, 8): [[1.5]]}
    gloo, mpi = judge(times, ranks=4).values()
    assert (gloo.met, mpi.met) == (True, False)
    assert "(4 ranks, 2 cores)" in mpi.text
    assert judge(times, ranks=4, cores=4) == judge(times, ranks=4, nodes=2) == {}


def test_what_was_not_measured_is_not_judged():
    assert judge({(GLOO_ROW, M): [[1.0]]}) == {}


# The drawing


def test_a_drawing_has_a_line_for_each_contender(tmp_path):
    times = {(row, size): [[1e-3 * size]] for row in (GLOO_ROW, PRIVATE_OWN) for size in (8, K)}
    path = tmp_path / "drawing.svg"
    allreduce_plot.draw(path, [make_group(times), make_group(times, ranks=4)], "a note")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    text = path.read_text()
    for part in ("Gloo", "mpiddp auto, auto, private", "4 ranks", "bus bandwidth", "a note"):
        assert part in text
    assert "MPI_Allreduce" not in text


@given(st.lists(st.integers(3, 40), min_size=1, max_size=20, unique=True))
def test_ticks_have_room(powers):
    sizes = [1 << power for power in sorted(powers)]
    ticks = allreduce_plot.choose_ticks(sizes)
    assert ticks[0] == sizes[0] and set(ticks) <= set(sizes)
    room = allreduce_plot.TICK_SHARE * math.log2(sizes[-1] / sizes[0])
    assert all(math.log2(b / a) >= room - 1e-9 for a, b in itertools.pairwise(ticks))
    # None is left out for nothing.
    for size in set(sizes) - set(ticks):
        assert min(abs(math.log2(size / tick)) for tick in ticks) < room + 1e-9


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "6"], "expected whole elements of 4 bytes"),
        (["--sizes", "12", "--type", "float64"], "whole elements of 8 bytes (float64), found 12"),
        (["--sizes", "0"], "found 0"),
        (["--type", "float8"], "invalid choice: 'float8'"),
        (["--algorithms", "rong"], "no algorithm is called 'rong'"),
        (["--transports", "pigeon"], "invalid choice: 'pigeon'"),
        (["--buffers", "public"], "invalid choice: 'public'"),
        (["--ranks", "1"], "--ranks: expected at least 2, found 1"),
        (["--iterations", "0"], "--iterations: expected an integer >= 1"),
        (["--link"], "--link needs two nodes"),
        (["--nodes", "2"], "--nodes needs a cluster"),
        (["--plot", "drawing.gif"], "ends in .svg, .png, .pdf"),
        (["--json", "same.svg", "--plot", "same.svg"], "named for two outputs"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        allreduce.check(allreduce.parse(arguments))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_algorithms_are_those_that_are_registered():
    plan = allreduce.parse(["--algorithms", "all", "ring", "ring:segments=4"]).plan
    assert plan.algorithms == ("auto", *names(), "ring:segments=4")


def test_the_usual_ranks_depend_on_the_launcher():
    assert allreduce.parse([]).ranks == (2, 4)
    assert allreduce.parse(["--launcher", "srun"]).ranks == (4, 8)
    assert allreduce.parse(["--sizes", "8K", "8", "8"]).plan.sizes == (8, 8 * K)


def run_benchmark(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "benchmarks", "allreduce", *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=launchers.ROOT,
        env=launchers.clean_environment(changes),
    )


def test_help_imports_neither_torch_nor_mpi():
    text = (
        "import runpy, sys\n"
        "sys.argv = ['benchmarks', 'allreduce', '--help']\n"
        "try: runpy.run_module('benchmarks', run_name='__main__')\n"
        "except SystemExit as error: assert not error.code\n"
        "assert not {'torch', 'mpi4py', 'matplotlib'} & set(sys.modules)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=launchers.ROOT
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "--transports" in answer.stdout and "double-tree" in answer.stdout


def test_a_wrong_sum_ends_with_an_error_after_the_tables(monkeypatch, capsys):
    wrong = make_group({(PRIVATE_OWN, 8): [[1.0]]}, wrong={Cell(PRIVATE_OWN, 8).name: 2})
    monkeypatch.setattr(allreduce, "measure", lambda *_: wrong)
    mpirun = launchers.Mpirun(Path("mpirun"), "openmpi", "5.0.11", None)
    monkeypatch.setattr(allreduce, "check", lambda _: mpirun)
    with pytest.raises(allreduce.WrongSumError, match=r"private at 8 B .*: 2 wrong") as caught:
        allreduce.main(["--ranks", "2"])
    assert caught.value.exit_code == 1
    assert "8 B of float32" in capsys.readouterr().out


# Real runs

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
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_plain_rings_sum(launcher, ranks, tmp_path):
    script = tmp_path / "rings.py"
    script.write_text(RINGS)
    launching.run(launcher, ranks, [script], timeout=60).expect(0)


def find_ranks(mark: str) -> list[psutil.Process]:
    """The processes that torchrun or mpirun started."""
    found = processes.find_marked(mark)
    return [each for each in found if {"RANK", "OMPI_COMM_WORLD_RANK"} & each.environ().keys()]


def count_cpu_seconds(ranks) -> float:
    return sum(sum(rank.cpu_times()[:2]) for rank in ranks)


@pytest.mark.mpi
def test_the_framework_knows_no_mpi_and_each_job_sleeps_while_the_other_measures():
    mpirun = launchers.find_mpirun(None, {})
    with allreduce_measure.start_jobs(2, mpirun, 60) as jobs:
        marks = {name: job.mark for name, job in jobs.items()}
        ranks = {name: find_ranks(mark) for name, mark in marks.items()}
        assert [len(each) for each in ranks.values()] == [2, 2]
        for rank in ranks[TORCH_JOB]:
            assert "libmpi.so" not in Path(f"/proc/{rank.pid}/maps").read_text()
        for name, other, row in ((MPI_JOB, TORCH_JOB, MPI_ROW), (TORCH_JOB, MPI_JOB, GLOO_ROW)):
            order = row.order(16 * M, "float32", 50)
            before, begin = count_cpu_seconds(ranks[other]), time.monotonic()
            jobs[name].ask({"do": "measure", "order": order}, "measuring")
            seconds = time.monotonic() - begin
            assert seconds > 0.1
            # Two ticks of the clock by which CPU time is counted.
            assert count_cpu_seconds(ranks[other]) - before < 0.1 * seconds + 0.02, other
    assert [processes.find_marked(mark) for mark in marks.values()] == [[], []]


@pytest.mark.mpi
def test_a_rank_that_dies_ends_both_jobs_and_the_command():
    mpirun = launchers.find_mpirun(None, {})
    marks = []

    def lose_a_rank():
        with allreduce_measure.start_jobs(2, mpirun, 60) as jobs:
            marks.extend(job.mark for job in jobs.values())
            ranks = processes.find_marked(marks[0])
            [victim] = [r for r in ranks if r.environ().get("OMPI_COMM_WORLD_RANK") == "1"]
            victim.kill()
            order = Contender(MPI).order(64, "float32", 10)
            jobs[MPI_JOB].ask({"do": "measure", "order": order}, "measuring")

    with pytest.raises(RunError, match=r"allreduce\.worker mpi .*\(measuring\)"):
        lose_a_rank()
    assert [processes.find_marked(mark) for mark in marks] == [[], []]


@pytest.mark.mpi
def test_all_contenders_are_measured_printed_and_written(tmp_path):
    record, drawing = tmp_path / "allreduce.json", tmp_path / "allreduce.svg"
    arguments = ["--ranks", "2", "--sizes", "8", "256K", "--repetitions", "2", "--warm-up", "0"]
    arguments += ["--iterations", "5", "--deadline", "60", "--transports", "auto", "mpi"]
    # Variables of an outer launch must not reach the ranks.
    answer = run_benchmark(*arguments, "--json", str(record), "--plot", str(drawing), PMIX_RANK="7")
    assert (answer.returncode, answer.stderr) == (0, "")
    content = json.loads(record.read_text())
    assert (content["benchmark"], content["schema"]) == ("allreduce", records.SCHEMA)
    (group,) = content["groups"]
    cells = {(each["name"], each["over"], each["buffer"], each["bytes"]) for each in group["cells"]}
    # Gloo, MPI, two plain rings; two algorithms on two transports and two kinds of buffers; and two
    # that are prepared.
    assert len(cells) == len(group["cells"]) == 2 * (4 + 2 * 2 * 2 + 2)
    for cell in group["cells"]:
        assert [len(visit) for visit in cell["nanoseconds"]] == [5, 5]
        assert cell["wrong"] == 0 < cell["seconds"]["low"] <= cell["seconds"]["median"]
    assert group["collectives"]["wait"]
    assert group["limits"]["copy"] and group["limits"]["peer_read"]
    assert "target: mpiddp auto, auto, shared: at least 8 × Gloo: 256 KiB" in answer.stdout
    assert "at most 1 µs more than the plain ring" in answer.stdout
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_two_jobs_share_the_nodes_of_a_cluster(slurm_cluster, tmp_path):
    record = tmp_path / "allreduce.json"
    arguments = ["--launcher", "srun", "--nodes", "2", "--ranks", "4", "--link"]
    arguments += ["--sizes", "8", "64K", "--repetitions", "1", "--warm-up", "0"]
    answer = run_benchmark(
        *arguments, "--iterations", "3", "--json", str(record), **slurm_cluster.environment()
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    (group,) = json.loads(record.read_text())["groups"]
    assert group["nodes"] == 2 and group["limits"]["link"]["median"] > 0
    assert {"Gloo", "MPI_Allreduce", "mpiddp auto"} <= {each["name"] for each in group["cells"]}
    assert slurm_cluster.ask("squeue", "-h") == ""


@pytest.mark.slurm
@pytest.mark.timeout(120)
def test_both_jobs_are_steps_on_the_same_nodes(slurm_cluster, monkeypatch):
    for name, value in slurm_cluster.environment().items():
        monkeypatch.setenv(name, value)
    srun = find_srun("srun", 2, (2,))
    with allreduce_measure.start_jobs(2, srun, 60) as jobs:
        places = [
            {key: value for key, value in job.greeting.items() if key.startswith("slurm")}
            for job in jobs.values()
        ]
    assert places[0] == places[1]
    assert all(places[0].values())
    assert slurm_cluster.ask("squeue", "-h") == ""
