"""Limits and shared memory of one node."""

from __future__ import annotations

import os
import resource
import signal

import pytest

import launchers
from mpiddp.doctor.node import leftovers, limits
from mpiddp.doctor.node.limits import UNLIMITED, Limits
from mpiddp.launch.fabrics import NodeFabrics
from mpiddp.process.rank_process import read_stat
from mpiddp.wording import describe_size

GIB = 1 << 30


def make_limits(files=4096, locked=UNLIMITED, shared=8 * GIB, free=4 * GIB, infiniband=()):
    return Limits(files, 1 << 20, locked, shared, free, infiniband)


@pytest.mark.parametrize(
    ("given_limits", "status", "words"),
    [
        (make_limits(locked=65536), "skip", "no fast network card"),
        (make_limits(infiniband=("mlx5_0",)), "pass", "unlimited, for mlx5_0"),
        (make_limits(locked=65536, infiniband=("mlx5_0", "mlx5_1")), "warn", "limited to 64 KiB"),
    ],
)
def test_locked_memory(given_limits, status, words):
    finding = limits.judge_locked_memory(given_limits)
    assert finding.status == status and words in finding.found
    assert ("ulimit -l unlimited" in finding.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("files", "size", "status"),
    [(1024, 4, "pass"), (256, 4, "warn"), (1024, 1000, "warn"), (UNLIMITED, 10**6, "pass")],
)
def test_open_files(files, size, status):
    finding = limits.judge_open_files(make_limits(files), size)
    assert finding.status == status
    if status == "warn":
        assert f"limited to {files}; {size} ranks" in finding.found
        assert "ulimit -n" in finding.advice and str(1 << 20) in finding.advice


@pytest.mark.parametrize(
    ("shared", "free", "status", "words"),
    [
        (8 * GIB, 5 * GIB, "pass", "/dev/shm of 8 GiB, at least 4 GiB free"),
        # What a container has by default.
        (64 << 20, 64 << 20, "warn", "/dev/shm of 64 MiB has 64 MiB free"),
        (None, 0, "warn", "there is no /dev/shm"),
    ],
)
def test_shared_memory(shared, free, status, words):
    finding = limits.judge_shared_memory(make_limits(shared=shared, free=free))
    assert finding.status == status and words in finding.found
    assert ("--shm-size" in finding.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("size", "pattern", "ranks", "status", "words"),
    [
        (0, "core", 512, "pass", "none are written"),
        (UNLIMITED, "core", 512, "warn", "512 ranks write as many core files into their working"),
        (1 << 30, "core.%p", 4, "warn", "core files of up to 1 GiB into"),
        # To a program, and to a place of the node.
        (UNLIMITED, "|/usr/lib/systemd/systemd-coredump %P", 512, "pass", "systemd-coredump"),
        (UNLIMITED, "/var/crash/core.%p", 512, "pass", "/var/crash/core.%p"),
        (UNLIMITED, "core", 1, "pass", "written to core"),
    ],
)
def test_core_files(size, pattern, ranks, status, words):
    found = Limits(4096, 4096, UNLIMITED, GIB, GIB, (), size, pattern)
    finding = limits.judge_core_files(found, ranks)
    assert finding.status == status and words in finding.found
    assert ("ulimit -c 0" in finding.advice) == (status == "warn")


def test_limits_are_this_process(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    node = NodeFabrics({"InfiniBand": ("mlx5_0", "mlx5_1")})
    found = limits.find_limits(node, tmp_path)
    assert found.core_files == resource.getrlimit(resource.RLIMIT_CORE)[0]
    assert found.core_pattern == limits.CORE_PATTERN.read_text().strip()
    assert (found.open_files, found.hard_open_files) == (soft, hard)
    assert found.shared_memory >= found.free_shared_memory > 0
    assert found.infiniband == ("mlx5_0", "mlx5_1")
    absent = limits.find_limits(NodeFabrics(), tmp_path / "nowhere")
    assert (absent.shared_memory, absent.infiniband) == (None, ())


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (512, "512 B"), (65536, "64 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5 TiB")],
)
def test_describe_size(size, text):
    assert describe_size(size) == text


# What earlier jobs have left

ORPHAN = """
import os, subprocess, sys
os.environ["MPIDDP_ATTEMPT_TOKEN"] = "gone"
nothing = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child = subprocess.Popen(["sleep", "1000"], start_new_session=True, **nothing)
print(child.pid, flush=True)
"""


def test_a_process_whose_launcher_has_gone_and_its_memory_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr("mpiddp.launch.launcher.leftovers.MEMORY", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    segment = tmp_path / "sm_segment.node1.0.1.0"
    segment.write_bytes(bytes(8192))
    os.utime(segment, (0, 0))
    process = int(launchers.run_python("-c", ORPHAN).stdout)
    try:
        found = leftovers.find_leftovers()
        assert process in found.processes and os.getpid() not in found.processes
        assert (found.files, found.size) == ((str(segment),), 8192)
        monkeypatch.setattr(leftovers, "SHOWN", len(found.processes))
        finding = leftovers.judge_leftovers(found)
        assert finding.status == "warn" and "whose launcher has gone" in finding.found
        assert str(process) in finding.advice and f"rm -r {segment}" in finding.advice
        # In a container a launcher may be process 1: its children are a running job's.
        monkeypatch.setattr(leftovers, "_read_command", lambda _: "mpirun -n 2 python train.py")
        is_below_first = read_stat(process)[1] == "1"
        assert (process in leftovers.find_leftovers().processes) is not is_below_first
    finally:
        os.kill(process, signal.SIGKILL)
    assert leftovers.judge_leftovers(leftovers.Leftovers()).status == "pass"
