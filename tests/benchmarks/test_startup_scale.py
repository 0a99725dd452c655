"""``benchmarks startup-scale``: what a trace holds, models of planted counts, and a real start."""

from __future__ import annotations

import math
import shutil
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark_runs import write_program
from benchmarks.common.records import read_record
from benchmarks.common.statistics import summarize
from benchmarks.launching import processes
from benchmarks.launching.launchers import find_mpirun
from benchmarks.startup_scale import command, measurement, rank, report
from benchmarks.startup_scale.measurement import Plan, Starts, check_strace, list_programs
from benchmarks.startup_scale.models import fit
from benchmarks.startup_scale.plot import draw
from benchmarks.startup_scale.stages import MARK, OF_MARKS, PROCESSOR, STAGES
from benchmarks.startup_scale.trace import count
from mpiddp.errors import ConfigurationError
from mpiddp.launch.startup import Starter

# Traces


def mark(name: str) -> str:
    return f'7 1.0 access("{MARK}{name}", F_OK) = -1 ENOENT (No such file or directory)'


SENT = 'sendto(5<TCP:[10.0.0.1:1->10.0.0.2:2]>, ""..., 81, 0, NULL, 0) = 81'


def test_every_message_and_connection_counts_for_its_stage():
    """Lines as strace 6.1 writes them."""
    lines = [
        '7 1.0 execve("/usr/bin/python", [...], 0x7ffc /* 75 vars */) = 0',
        f"7 1.1 {SENT}",  # Before the first stage.
        mark("find_address"),
        "7 1.2 connect(5<TCP:[12]>, {sa_family=AF_INET}, 16) = -1 EINPROGRESS (Operation now)",
        "7 1.3 connect(6<UNIX-STREAM:[13]>, {sa_family=AF_UNIX}, 8) = -1 ENOENT (No such file)",
        f"7 1.4 {SENT}",
        "8 1.5 accept4(4<TCP:[10.0.0.1:9]>,  <unfinished ...>",
        '7 1.6 recvfrom(5<TCP:[10.0.0.1:1->10.0.0.2:2]>, "", 9, 0, NULL, NULL) = -1 EAGAIN (Try)',
        '7 1.7 read(3</etc/hosts>, ""..., 4096) = 100',
        "8 1.8 <... accept4 resumed>NULL, [16], SOCK_CLOEXEC) = 22<TCP:[10.0.0.1:9->10.0.0.3:8]>",
        mark("open_store"),
        "8 1.9 recvmsg(9<TCPv6:[[::1]:1->[::1]:2]>, {msg_name=NULL, ...}, 0) = 19",
        mark("end"),
        f"7 2.0 {SENT}",
    ]
    assert count(lines) == {
        ("address", "connections"): 2,
        ("address", "messages"): 1,
        ("address", "bytes"): 81,
        ("TCPStore", "messages"): 1,
        ("TCPStore", "bytes"): 19,
    }


def test_a_stage_is_served_while_the_ranks_agree():
    """Rank 0's store still admits other ranks; what its main thread sends is the agreement."""
    lines = [
        '7 1.0 execve("/usr/bin/python", [...], 0x7ffc /* 75 vars */) = 0',
        mark("open_store"),
        mark("agreement"),
        "8 1.1 accept4(4<TCP:[10.0.0.1:9]>, NULL, NULL, 0) = 22<TCP:[10.0.0.1:9->10.0.0.3:8]>",
        f"7 1.2 {SENT}",
        '9 1.3 execve("/usr/bin/python", [...], 0x7ffc /* 80 vars */) = 0',
        f"9 1.4 {SENT}",
    ]
    found = count(lines)
    assert found["TCPStore", "connections"] == 1
    assert found["agreements", "messages"] == 1
    assert found["companion", "messages"] == 1


def test_every_part_of_the_start_up_has_a_stage():
    """Each method that a Starter settles, and that the stages name, is there."""
    others = {"agreement", "rest"}
    assert all(hasattr(Starter, name) for name in set(OF_MARKS) - others)


def test_other_threads_import_torch_until_it_is_waited_for():
    clock = rank.StageClock()
    clock.enter("start_mpi")
    work = threading.Thread(target=lambda: [math.sqrt(n) for n in range(400_000)])
    work.start()
    work.join()
    clock.enter("join_import")
    clock.enter("end")
    found = clock.sum_up()
    assert found["import torch", "processor seconds"] > found["MPI_Init", "processor seconds"]
    assert found["MPI_Init", "seconds"] > 0


# Models

PLACES = [(ranks, 1) for ranks in (2, 4, 8, 16, 32, 64)]
LAWS = {
    "constant": lambda r, n: 12,
    "ranks": lambda r, n: r + 1,
    "lg ranks": lambda r, n: 4 * math.log2(r) + 3,
    "ranks²": lambda r, n: 500 + 40 * r + 2 * r * r,
}


@pytest.mark.parametrize("name", LAWS)
def test_a_planted_law_is_recovered(name):
    """With counts that are off by 1 in turn; predicted for 1,024 times as many within 5 %."""
    law = LAWS[name]
    off = {place: index % 2 for index, place in enumerate(PLACES)} if name == "ranks²" else {}
    found = fit({place: law(*place) + off.get(place, 0) for place in PLACES}, 1.0)
    assert found.residual < 0.01
    assert found.predict((65536, 1)) == pytest.approx(law(65536, 1), rel=0.05)


@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_ranks_and_nodes_are_told_apart(by_ranks, by_nodes, constant):
    def law(ranks, nodes):
        return constant + by_ranks * ranks + by_nodes * nodes

    places = [(ranks, nodes) for nodes in (2, 4, 8) for ranks in (8, 16, 32)]
    found = fit({place: law(*place) for place in places}, 1.0)
    assert found.factors == pytest.approx({"ranks": by_ranks, "nodes": by_nodes})
    assert found.predict((65536, 8192)) == pytest.approx(law(65536, 8192))


def test_what_grows_with_a_nodes_ranks_is_not_all_ranks():
    places = [(ranks, nodes) for nodes in (2, 4, 8) for ranks in (8, 16, 32)]
    found = fit({place: 1 + place[0] / place[1] for place in places}, 1.0)
    assert found.predict((65536, 8192)) == pytest.approx(9)


def test_one_node_is_a_case_of_its_own():
    """It opens one address, several nodes open three."""
    places = [(ranks, nodes) for nodes in (1, 2, 4, 8) for ranks in (8, 16)]
    found = fit({p: 2 if p[1] == 1 else 3 + 3 * p[1] for p in places}, 1.0)
    assert found.factors == pytest.approx({"nodes": 3})


def test_a_line_is_preferred_where_a_logarithm_predicts_alike():
    places = [(ranks, nodes) for ranks in (4, 8) for nodes in (1, 2)]
    found = fit({place: place[0] - 1 for place in places}, 1.0)
    assert found.factors == pytest.approx({"ranks": 1})
    assert not fit({(4, 1): 3}, 1.0).is_checked


# The report


def make_starts() -> list[Starts]:
    return [
        Starts(
            (r, n),
            {
                ("TCPStore", "connections"): (r + 1, r + 1),
                ("process group", "bytes"): (100 * r * r, 100 * r * r),
                ("address", "messages"): (12, 12),
                ("address", PROCESSOR): (0.004, 0.005),
                ("import torch", "seconds"): (1.0, 1.1),
            },
        )
        for r, n in PLACES
    ]


def test_the_report_says_whose_costs_grow_and_what_to_change(tmp_path):
    starts, plan = make_starts(), Plan()
    models = report.fit_all(starts)
    text = report.format_report(starts, models, plan)
    assert "65,537" in text and "predicted for 65,536 ranks on 8,192 nodes, rank 0" in text
    assert "of all: process group, 100% of the bytes (429 GB): Gloo connects every pair" in text
    assert "of mpiddp's own: address, 100% of the messages (12)" in text
    assert "what grows with the nodes is not seen" in text
    assert "these models could as well be others" not in text
    assert "these models could as well be others" in report.format_report(
        starts[:3], report.fit_all(starts[:3]), plan
    )
    draw(tmp_path / "scale.svg", starts, models, plan, "made up")
    assert "torch 429 GB" in (tmp_path / "scale.svg").read_text()


def test_cells_have_their_stage_owner_and_unit():
    (first, *_) = make_starts()
    cells = {(cell.contender, cell.quantity): cell for cell in first.list_cells()}
    cell = cells["TCPStore", "start-up connections"]
    assert (cell.samples, cell.unit, cell.at) == ((3, 3), "connections", {"of": "torch"})
    assert cell.summary == summarize([3, 3])


def test_what_was_counted_before_an_interruption_is_shown(tmp_path, monkeypatch, capsys):
    starts = iter(make_starts()[:3])

    def measure(*_):
        for found in starts:
            return found
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "find_launchers", lambda options: {1: find_mpirun(None)})
    monkeypatch.setattr(command, "measure_starts", measure)
    record, table = tmp_path / "scale.jsonl", tmp_path / "scale.csv"
    with pytest.raises(KeyboardInterrupt):
        command.main(["--output", str(record), "--output", str(table), "--hosts"])
    assert "predicted for 65,536 ranks" in capsys.readouterr().out
    found = read_record(record)
    assert not found.is_complete and {cell.ranks for cell in found.cells} == {2, 4, 8}
    assert len(table.read_text().splitlines()) == 1 + len(found.cells)
    assert list(found.environment["hosts"]) == ["2 on 1", "4 on 1", "8 on 1", "16 on 1"]


def test_only_bytes_grow_with_the_square_of_the_ranks():
    places = PLACES[:5]
    starts = [Starts(p, {("TCPStore", "connections"): (p[0] + p[0] ** 2 / 100,)}) for p in places]
    (model,) = report.fit_all(starts).values()
    assert "ranks²" not in model.factors


# What is started


def test_only_the_start_that_is_counted_is_changed():
    launcher = find_mpirun(None)
    counted, timed = list_programs(launcher, (4, 1))
    assert "trace_first_rank.sh" in " ".join(counted.command)
    assert counted.environment["OMPI_MCA_btl"] == "self,tcp"
    assert timed.command[-3:] == measurement.RANK
    assert "tcp" not in timed.environment["OMPI_MCA_btl"].split(",")[:1]


def test_without_strace_nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"strace counts .* not in PATH"):
        check_strace()
    write_program(tmp_path / "strace", "echo ptrace: Operation not permitted >&2; exit 1")
    with pytest.raises(ConfigurationError, match=r"Operation not permitted.*SYS_PTRACE"):
        check_strace()


@pytest.mark.long
@pytest.mark.mpi
def test_the_counts_of_a_real_start():
    """Three ranks: each connects to the store, and Gloo connects rank 0 with both others."""
    if shutil.which("strace") is None:
        with pytest.raises(ConfigurationError, match="strace"):
            check_strace()
        return
    counted, _ = list_programs(find_mpirun(None), (3, 1))
    found = processes.run(counted, 120).phases
    # Rank 0 is both ends of its own connection.
    assert found["TCPStore/connections"] == 3 + 1
    assert found["process group/connections"] == 2
    # The companion admits the ranks; rank 0 is both ends of its own connection again.
    assert found["companion/connections"] == 3 + 1
    assert found["address/bytes"] > 4 * (1 << 16) and found["MPI_Init/messages"] > 0
    assert {name.split("/")[0] for name in found} <= {stage.name for stage in STAGES}


@pytest.mark.mpi
@pytest.mark.long
def test_starts_are_counted_timed_and_predicted(tmp_path, capsys):
    record = tmp_path / "scale.jsonl"
    command.main(["--ranks", "2", "3", "4", "--repetitions", "1", "--output", str(record)])
    found = read_record(record)
    store = {
        cell.ranks: cell.samples[0]
        for cell in found.cells
        if (cell.contender, cell.quantity) == ("TCPStore", "start-up connections")
    }
    assert found.is_complete and store == {2: 3, 3: 4, 4: 5}
    assert "predicted for 65,536 ranks" in capsys.readouterr().out
