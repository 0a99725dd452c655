"""Collective calls that cannot end well, over time, and where the kernel forbids something."""

import itertools
import os
import re
import signal

import pytest

import churn
import differences
import facts
import forbidden
import launchers
import ranks

pytestmark = pytest.mark.mpi

DEADLINE = 3.0
"""Seconds of a call's wait."""
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2", "UCX_TLS": "posix,self"}
"""MPICH takes the ranks in turn for ranks of two nodes; UCX aborts where a process has gone that it
copies from."""

# By transport: launcher, number of ranks, variables.
JOBS: dict[str, tuple[str, int, dict[str, str]]] = {
    "shared-memory": ("openmpi", 2, {}), "mpi": ("openmpi", 2, {}), "torch": ("mpich", 2, {}),
    "shared-memory+mpi": ("mpich", 3, TWO_NODES),
}  # fmt: skip
USUAL = ("is stopped", "shared-memory")


def find_report(result: launchers.Result) -> str:
    """The one line that says what went wrong."""
    lines = [line for line in facts.messages(result) if re.match(r"mpiddp: rank \d", line)]
    assert len(lines) == 1, str(result)
    return lines[0]


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case != USUAL))
        for case in itertools.product(("is killed", "is stopped"), JOBS)
    ],
)
def test_a_rank_that_is_lost_ends_the_job(how, transport, tmp_path):
    name, size, variables = JOBS[transport]
    # A killed rank is found long before the deadline.
    deadline = 60.0 if how == "is killed" else DEADLINE
    program = [launchers.PROGRAMS / "victims.py", transport, how, str(deadline)]
    result = launchers.run(name, size, program, env=variables, cwd=tmp_path)
    assert "Traceback" not in result.output, str(result)
    if how == "is killed":
        # The launchers' code is the victim's; Hydra gives the signal alone.
        assert result.returncode in (6, 128 + signal.SIGKILL, signal.SIGKILL), str(result)
        lost = r"mpiddp: rank 1 of \d on \S+ was lost: it was killed by SIGKILL"
        assert re.match(lost, find_report(result)), str(result)
        return
    result.expect(6)
    # Between nodes, the rank that is named may itself wait for the stopped one.
    peer = r"rank \d" if how == "is stopped" and transport == "shared-memory+mpi" else "rank 1"
    place = r"(in step \d+ of \d+|at its end)"
    said = (
        rf"mpiddp: rank [02] of [23] on \S+: all-reduce \(one-shot over {re.escape(transport)}\), "
        rf"{place}: waited for {peer} on [^\s:]+"
    )
    assert re.match(said, find_report(result)), str(result)
    # Gloo's own wait ends at about the same time.
    assert re.search(f" for {DEADLINE:g} s| waiting {DEADLINE * 1000:g}ms", result.stderr)


LEAVES = """
import torch, mpiddp
with mpiddp.init(timeout=60) as session:
    mpiddp.all_reduce(torch.ones(4))
    if session.world.rank == 0:
        session._timeout = 3.0
        mpiddp.all_reduce(torch.ones(4), transport="torch")
"""


@pytest.mark.long
def test_a_rank_that_leaves_instead_of_a_first_call_over_torch_is_told_of_in_one_line(tmp_path):
    result = launchers.run("openmpi", 2, ["-c", LEAVES], cwd=tmp_path).expect(6)
    report = find_report(result)
    assert "transport torch waited 3 s for the other ranks" in report
    assert report.endswith(" (called at <string>:7)"), report
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "transports", "variables"),
    [
        ("openmpi", ("shared-memory", "mpi", "torch"), {}),
        pytest.param("mpich", ("shared-memory+mpi",), TWO_NODES, marks=pytest.mark.long),
    ],
)
def test_calls_that_differ_are_never_summed(name, transports, variables, tmp_path):
    program = [launchers.PROGRAMS / "differences.py", *transports]
    launchers.run(name, 3, program, env=variables, cwd=tmp_path).expect(differences.DONE)
    reports = ranks.read_reports(tmp_path, 3)
    for transport in transports:
        for case in differences.make_cases(transport):
            outcomes = [report[transport][case] for report in reports]
            errors = [outcome for outcome in outcomes if outcome[0] == "error"]
            # An error on any rank ends a job; a neighbour may have been told of it.
            own = [outcome for outcome in errors if outcome[1] != "PeerFailedError"]
            assert own, (transport, case, outcomes)
            kinds = ("ConfigurationError", "DifferentCallError", "PeerLostError")
            assert all(kind in kinds for _, kind, _ in own), (transport, case, outcomes)
            for _, _, said in errors:
                assert re.search(r"rank \d", said), (transport, case, said)


def test_calls_that_differ_are_compared_for_debugging(pool):
    debug = {"MPIDDP_DEBUG": "1"}
    reports = pool("openmpi", 3).call(differences.compare, "shared-memory", env=debug).values
    for case in differences.make_cases("shared-memory"):
        for report in reports:
            assert report[case][:2] == ["error", "ConfigurationError"], (case, report[case])
            said = "differs from rank 0's on rank 1: rank 0 has 'call .*rank 1 has 'call "
            assert re.search(said, report[case][2]), case
    assert [report["good"] for report in reports] == [[3.0] * 5] * 3


CALLS = 2000
MEGABYTE = 1 << 20
MOST_RESIDENT = 24 * MEGABYTE
"""What bound programs and allocators may keep; the buffers of all calls had 90 together."""
MOST_MAPPINGS = 80
"""Heaps and pools that an allocator has made meanwhile; one buffer in ten would be more."""


def check_growth(reports: list[dict]) -> None:
    """Results were right, and nothing grew between two measurements."""
    for rank, report in enumerate(reports):
        assert report["wrong"] == [], f"rank {rank}"
        before, after = report["before"], report["after"]
        assert after["files"] <= before["files"] + 1, (rank, before, after)
        assert after["named segments"] <= before["named segments"], (rank, before, after)
        assert after["mappings"] <= before["mappings"] + MOST_MAPPINGS, (rank, before, after)
        assert after["resident"] <= before["resident"] + MOST_RESIDENT, (rank, before, after)


@pytest.mark.parametrize("name", ["openmpi", pytest.param("mpich", marks=pytest.mark.long)])
def test_buffers_come_and_go_and_leave_nothing(name, pool):
    reports = pool(name, 2).call(churn.run, CALLS).values
    check_growth(reports)
    # Addresses came back with memory of the other kind, or this shows little.
    assert all(report["changed"] > 100 for report in reports)


OVER_TCP = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
"""MPI's own shared memory takes copies, the same process numbers and rights for granted; and
interfaces of virtual clusters come and go."""
MESSAGES = ["mpi", "torch"]


def check_calls(report, transports, note):
    """They were right, without copies between processes, and the note says why."""
    assert report["wrong"] == [] and report["calls"] > 20
    described = report["describe"]
    assert described["transports"] == transports and not described["single_copy"]
    assert re.fullmatch(note, described["notes"][0]), described
    if transports == MESSAGES:
        said = "transport shared-memory is not possible here: "
        assert report["said"].startswith(said), report["said"]


def test_single_copies_that_are_forbidden_are_done_without():
    """Rank 1 may copy from another process's memory, but not into it."""
    for report in ranks.collect("openmpi", 2, "forbidden.py", "writes", env=OVER_TCP):
        note = r"no single copies: rank 1 may not .*process_vm_readv.*; private buffers are .*"
        check_calls(report, ["shared-memory", "shared-memory+mpi", *MESSAGES], note)


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root")
@pytest.mark.parametrize(
    ("options", "level", "why"),
    [
        (("--pid", "--fork", "--kill-child"), "funneled", "their process numbers are not the same"),
        pytest.param(
            ("--user", "--map-root-user"), "nothing", "Permission denied", marks=pytest.mark.long
        ),
    ],
)
def test_ranks_in_namespaces_of_their_own_use_messages(options, level, why):
    wrap = ("unshare", *options)
    for report in ranks.collect("openmpi", 2, "forbidden.py", level, env=OVER_TCP, wrap=wrap):
        note = rf"no shared memory: rank 1 cannot map rank 0's memory \({why}\); messages are used"
        check_calls(report, MESSAGES, note)
        notes = report["describe"]["notes"][1:]
        assert bool(notes) == (level != "nothing")
        if notes:
            said = "asynchronous calls are made at once: MPI has MPI_THREAD_FUNNELED on rank 0, "
            assert notes[0].startswith(said)
            check_threads(report["threads"])


def check_threads(found: dict) -> None:
    """No thread but the one that initialised MPI has called it, or has been told why not."""
    assert found["seen"] == [True, "MainThread"] * 2
    assert "mpiddp-collectives_0" not in found["threads"]
    assert found["overlap"] is False
    here, servers = found["said"]
    has = "has MPI_THREAD_FUNNELED in this process: "
    assert f"this thread may not call MPI, which {has}make calls over transport mpi in " in here
    assert f"need MPI_THREAD_MULTIPLE, but MPI {has}use --sync auto, or an " in servers


def test_another_order_of_stores_is_done_without(pool):
    for report in pool("openmpi", 3).call(forbidden.try_unordered).values:
        note = "no shared memory: this processor does not keep stores in order, x86-64 does; .*"
        check_calls(report, MESSAGES, note)


# Handlers of an end are called last in, first out, and weakref's is registered by an early import.
ALIVE = """
import atexit, os, threading, time
shared = []
atexit.register(lambda: print("at exit", shared[0].add_(1).sum().item(), flush=True))
import numpy, torch, mpiddp
is_late, other = False, 0
with mpiddp.init(timeout=60) as session:
    rank = session.world.rank
    shared.append(mpiddp.shared_empty(1 << 20))
    mpiddp.all_reduce(shared[0])
    pids = session.gather(os.getpid())
    is_late, other = rank > 0, pids[0]
    if is_late:
        # What this rank's calls work in.
        (memory,) = session.collectives.shared_memory._foreign.values()
        view = numpy.frombuffer(memory, numpy.float32)
if is_late:
    while os.path.exists(f"/proc/{other}"):
        time.sleep(0.01)
    view += 1
    print("late", view.sum(dtype=float), flush=True)
else:
    # torch itself does not outlive the interpreter in a daemon thread.
    array = shared[0].numpy()
    def work():
        while True:
            array.sum()
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.1)
"""


def test_memory_is_there_as_long_as_anybody_uses_it():
    result = launchers.run("openmpi", 2, ["-c", ALIVE]).expect(0)
    # Both have added one to rank 0's tensor, each at its own end.
    said = ["at exit 1048576.0", "at exit 1048576.0", "late 2097152.0"]
    assert sorted(result.stdout.splitlines()) == said, str(result)
