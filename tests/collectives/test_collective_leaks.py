"""Collective calls over time, beside others, and where the kernel forbids something."""

from __future__ import annotations

import os
import re

import pytest

import churn
import forbidden
import launchers
import ranks

pytestmark = pytest.mark.mpi

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


ALL = {"shared-memory", "shared-memory+mpi", "mpi", "torch"}
OVER_TCP = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
"""MPI's own shared memory takes copies, the same process numbers and rights for granted; and
interfaces of virtual clusters come and go."""
NO_COPIES = (
    r"no single copies: rank \d may not .*process_vm_{}.*; private buffers are copied to "
    r"shared memory"
)


@pytest.mark.parametrize(
    ("how", "transports", "note"),
    [
        pytest.param("copies", ALL, NO_COPIES.format("readv"), marks=pytest.mark.long),
        ("writes", ALL, NO_COPIES.format("(read|write)v")),
        pytest.param(
            "descriptors",
            {"mpi", "torch"},
            r"no shared memory: rank 1 cannot map rank 0's memory \(Permission denied\); .*",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_is_forbidden_is_done_without(how, transports, note):
    reports = ranks.collect("openmpi", 2, "forbidden.py", how, env=OVER_TCP)
    for rank, report in enumerate(reports):
        assert report["wrong"] == [] and report["calls"] > 20, f"rank {rank}"
        described = report["describe"]
        assert set(described["transports"]) == transports
        assert described["single_copy"] is False
        (found,) = described["notes"]
        assert re.fullmatch(note, found), found
        if "shared-memory" in transports:
            assert report["said"] == "nothing was said"
        else:
            assert report["said"].startswith("transport shared-memory is not possible here: rank")
            assert described["transports"][0] == "mpi"


ALONE_IN_PROCESS_NUMBERS = ("unshare", "--pid", "--fork", "--kill-child")
ALONE_WITH_RIGHTS = ("unshare", "--user", "--map-root-user")
OTHER_NUMBERS = (
    r"no shared memory: rank 1 cannot map rank 0's memory \(their process numbers are not the "
    r"same\); messages are used"
)
OTHER_RIGHTS = (
    r"no shared memory: rank 1 cannot map rank 0's memory \(Permission denied\); messages are used"
)
AT_ONCE = (
    r"asynchronous calls are made at once: MPI has MPI_THREAD_{} on rank 0, and a thread for them "
    r"needs MPI_THREAD_MULTIPLE"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root")
@pytest.mark.parametrize(
    ("wrap", "level", "note"),
    [
        (ALONE_IN_PROCESS_NUMBERS, "funneled", OTHER_NUMBERS),
        pytest.param(ALONE_IN_PROCESS_NUMBERS, "serialized", OTHER_NUMBERS, marks=pytest.mark.long),
        pytest.param(ALONE_WITH_RIGHTS, "nothing", OTHER_RIGHTS, marks=pytest.mark.long),
    ],
)
def test_ranks_in_namespaces_of_their_own_use_messages(wrap, level, note):
    reports = ranks.collect("openmpi", 2, "forbidden.py", level, env=OVER_TCP, wrap=wrap)
    for rank, report in enumerate(reports):
        assert report["wrong"] == [] and report["calls"] > 20, f"rank {rank}"
        described = report["describe"]
        assert described["transports"] == ["mpi", "torch"]
        notes = [note, AT_ONCE.format(level.upper())][: 1 if level == "nothing" else 2]
        for expected, found in zip(notes, described["notes"], strict=True):
            assert re.fullmatch(expected, found), found
        assert report["said"].startswith("transport shared-memory is not possible here: rank 1 ")
        if level != "nothing":
            check_threads(level, report["threads"])


def check_threads(level: str, found: dict) -> None:
    """No thread but the one that initialised MPI has called it, or has been told why not."""
    assert found["seen"] == [True, "MainThread"] * 2
    assert "mpiddp-collectives_0" not in found["threads"]
    assert found["overlap"] is False
    has = f"MPI_THREAD_{level.upper()} in this process: "
    servers = (
        f"parameter servers need MPI_THREAD_MULTIPLE, but MPI has {has}use --sync auto, or an "
    )
    refusal = f"this thread may not call MPI, which has {has}make calls over transport mpi in the "
    expected = [refusal, servers] if level == "funneled" else [servers]
    assert len(found["said"]) == len(expected)
    assert all(map(str.startswith, found["said"], expected)), found["said"]


def test_another_order_of_stores_is_done_without(pool):
    for report in pool("openmpi", 3).call(forbidden.try_unordered).values:
        assert report["wrong"] == [] and report["calls"] > 20
        described = report["describe"]
        assert described["transports"] == ["mpi", "torch"] and not described["single_copy"]
        (note,) = described["notes"]
        assert note == (
            "no shared memory: this processor does not keep stores in order, x86-64 does; "
            "messages are used"
        )


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
