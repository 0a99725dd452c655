"""How many CPUs this process may use: mask and quota."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path

import pytest

import launchers
from mpiddp.process import cpus
from mpiddp.process.cpus import count_cores, count_shared_cores, find_cpus, find_quota


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", math.inf), ("50000 100000", 0.5), ("", math.inf), ("1 0", math.inf)],
)
def test_the_quota_of_a_container_is_read(text, cores, tmp_path):
    """It sees its own control group as the root, whatever the group is called outside."""
    write(tmp_path / "root", cpu__max=text)
    write(tmp_path, own="0::/docker/0123")
    assert find_quota(tmp_path / "root", tmp_path / "own") == cores
    assert find_quota(tmp_path / "root", tmp_path / "nowhere") == cores
    assert find_quota(tmp_path / "nowhere", tmp_path / "own") == math.inf


def test_the_smallest_quota_of_the_groups_around_a_process_counts(tmp_path):
    write(tmp_path, own="0::/system.slice/job_7/step_0")
    write(tmp_path / "system.slice/job_7/step_0", cpu__max="max 100000")
    write(tmp_path / "system.slice/job_7", cpu__max="300000 100000")
    write(tmp_path / "system.slice/job_8", cpu__max="100000 100000")
    assert find_quota(tmp_path, tmp_path / "own") == 3.0


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_quotas_of_the_first_control_groups(controllers, tmp_path):
    write(tmp_path, own=f"3:cpuset:/other\n2:{controllers}:/a/b\n0::/")
    folder = tmp_path / controllers / "a/b"
    write(folder, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert find_quota(tmp_path, tmp_path / "own") == math.inf
    write(folder.parent, cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert find_quota(tmp_path, tmp_path / "own") == 1.5


def test_cores_are_the_ranks_together_and_no_more_than_their_container_has():
    assert count_shared_cores([[0, 1], [1, 2]], []) == 3
    assert count_shared_cores([[0, 1], [1, 2]], [2.0, 2.0]) == 2
    assert count_shared_cores([[0], [1]], [math.inf, math.inf]) == 2


def test_a_process_uses_no_more_cores_than_its_quota(monkeypatch):
    monkeypatch.setattr(cpus, "find_cpus", lambda: frozenset(range(10_000, 10_008)))
    for quota, cores in ((math.inf, 8), (8.5, 8), (2.0, 2), (2.9, 2), (0.5, 1)):
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
