"""How many CPUs this process may use: mask and quota."""

import contextlib
import math
import os
import sys
from pathlib import Path

import pytest

import launchers
from mpiddp.process import cpus
from mpiddp.process.cpus import count_cores, count_shared_cores, find_cpus, find_quota

JOB = "0::/system.slice/job_7/step_0"
GROUPS = {
    "system.slice/job_7/step_0/cpu.max": "max 100000",
    "system.slice/job_7/cpu.max": "300000 100000",
    "system.slice/job_8/cpu.max": "100000 100000",
}
OLD = {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000"}
"""The first control groups."""
AROUND = {"cpu,cpuacct/a/cpu.cfs_quota_us": "150000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        # A container sees its own group as the root, whatever the group is called outside.
        ("0::/docker/0123", {"cpu.max": "max 100000"}, math.inf),
        ("0::/docker/0123", {"cpu.max": "50000 100000"}, 0.5),
        (None, {"cpu.max": "50000 100000"}, 0.5),
        ("0::/docker/0123", {"cpu.max": ""}, math.inf),
        ("0::/docker/0123", {"cpu.max": "1 0"}, math.inf),
        ("0::/docker/0123", {}, math.inf),
        (JOB, GROUPS, 3.0),
        ("3:cpuset:/other\n2:cpu,cpuacct:/a/b\n0::/", OLD, math.inf),
        ("3:cpuset:/other\n2:cpu,cpuacct:/a/b\n0::/", AROUND, 1.5),
    ],
)
def test_the_smallest_quota_of_the_groups_around_a_process_counts(own, files, cores, tmp_path):
    for name, text in {**files, **({"../own": own} if own else {})}.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert find_quota(tmp_path / "root", tmp_path / "own") == cores


def test_cores_are_the_ranks_together_and_no_more_than_their_quota(monkeypatch):
    assert count_shared_cores([[0, 1], [1, 2]], []) == 3
    assert count_shared_cores([[0, 1], [1, 2]], [2.0, 2.0]) == 2
    assert count_shared_cores([[0], [1]], [math.inf, math.inf]) == 2
    monkeypatch.setattr(cpus, "find_cpus", lambda: frozenset(range(10_000, 10_008)))
    for quota, cores in ((math.inf, 8), (8.5, 8), (2.9, 2), (0.5, 1)):
        monkeypatch.setattr(cpus, "find_quota", lambda quota=quota: quota)
        assert count_cores() == cores


def test_cpus_are_those_of_the_mask():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert find_cpus() == {min(before)} == os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)


def make_group(name: str) -> Path:
    """A control group with the time of one core, in the hierarchy that has processors' time."""
    for root, file, text in (
        (cpus.CONTROL_GROUPS / "cpu", "cpu.cfs_quota_us", "100000"),
        (cpus.CONTROL_GROUPS, "cpu.max", "100000 100000"),
    ):
        folder = root / name
        if (root / "cgroup.procs").exists():
            with contextlib.suppress(OSError):
                folder.mkdir()
                (folder / file).write_text(text)
                return folder
            with contextlib.suppress(OSError):
                folder.rmdir()
    pytest.skip("this process may not make a control group with a quota")


def test_a_real_quota_is_heeded():
    """Of one core, though the machine may have more."""
    folder = make_group(f"mpiddp-test-{os.getpid()}")
    code = "from mpiddp.process.cpus import count_cores, find_quota; "
    code += "print(find_quota(), count_cores())"
    command = f"echo $$ > {folder}/cgroup.procs && exec {sys.executable} -c '{code}'"
    try:
        done = launchers.execute("sh", "-c", command, cwd=launchers.ROOT)
    finally:
        folder.rmdir()
    assert done.stdout == "1.0 1\n", done
