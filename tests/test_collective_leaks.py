"""Collective calls over time, beside others, and where the kernel forbids something."""

from __future__ import annotations

import re

import pytest

import churn
import launchers
import ranks

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

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


@pytest.mark.parametrize("name", [pytest.param("openmpi", marks=pytest.mark.long), "mpich"])
def test_buffers_come_and_go_and_leave_nothing(name, pool):
    reports = pool(name, 2).call(churn.run, CALLS).values
    check_growth(reports)
    # Addresses came back with memory of the other kind, or this shows little.
    assert all(report["changed"] > 100 for report in reports)


def test_two_jobs_at_once_do_not_meet(tmp_path):
    folders = ranks.make_folders(tmp_path, ["one", "two"])
    arguments = [ranks.HERE / "churn.py", "200"]
    programs = [("openmpi", 2, arguments, {}, folder) for folder in folders]
    for folder, (result, _) in zip(folders, ranks.run_together(programs, 90), strict=True):
        result.expect(0)
        assert [report["wrong"] for report in ranks.read_reports(folder, 2)] == [[], []]


ALL = {"shared-memory", "shared-memory+mpi", "mpi", "torch"}
NO_COPIES = (
    r"no single copies: rank \d may not .*process_vm_{}.*; private buffers are copied to "
    r"shared memory"
)


@pytest.mark.parametrize(
    ("how", "transports", "note"),
    [
        pytest.param("copies", ALL, NO_COPIES.format("readv"), marks=pytest.mark.long),
        ("writes", ALL, NO_COPIES.format("(read|write)v")),
        (
            "descriptors",
            {"mpi", "torch"},
            r"no shared memory: rank [12] cannot map rank 0's memory \(Permission denied\); .*",
        ),
    ],
)
def test_what_is_forbidden_is_done_without(how, transports, note):
    row = launchers.table()["openmpi"]
    # MPI's own shared memory takes copies for granted.
    env = {"OMPI_MCA_btl": "self,tcp"}
    reports = ranks.collect(row, 3, "forbidden.py", how, env=env)
    for rank, report in enumerate(reports):
        assert report["wrong"] == [] and report["calls"] > 20, f"rank {rank}"
        described = report["describe"]
        assert set(described["transports"]) == transports
        assert described["single_copy"] is False
        (found,) = described["notes"]
        assert re.fullmatch(note, found), found
        if "shared-memory" in transports:
            assert report["said"] == ""
        else:
            assert report["said"].startswith("transport shared-memory is not possible here: rank")
            assert described["transports"][0] == "mpi"
