"""How much memory there is: the machine's, and what control groups leave of it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import launchers
import mpiddp
from mpiddp.collectives.transport import shared_memory
from mpiddp.collectives.transport.shared_memory import ControlGroup, find_groups, find_shortage
from mpiddp.sync.ddp_hook import Synchronization, attach
from pool import Pool

MEGABYTE = 1 << 20
PLENTY = 1 << 45
UNLIMITED = "9223372036854771712"
RANKS = 3
LIMIT = 1800 * MEGABYTE
"""Of the group; ranks have some 250 MB each before they ask for anything."""
SHARE = LIMIT // RANKS
"""Bytes for which there is room once or twice: something is in use before."""
SHARED_MEMORY = 16 * MEGABYTE
"""Of the small node."""
STEPS = 3
WIDTHS = (1700, 256)
"""Of layers, in 4 KiB of weights: a bucket for which each rank alone would find room, and one for
which there is room on all of them."""


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    """A machine with so much memory that only groups matter; no group is remembered."""
    found = SimpleNamespace(available=PLENTY)
    monkeypatch.setattr(shared_memory.psutil, "virtual_memory", lambda: found)
    find_groups.cache_clear()
    yield
    find_groups.cache_clear()


def make_group(folder: Path, is_old: bool, limit: int | str, used: int, **caches: int) -> None:
    """The files of a control group."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit_file, used_file = names if is_old else ("memory.max", "memory.current")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    prefix = "total_" if is_old else ""
    # In version 1 those without the prefix are the group's own, without its children's.
    lines = [f"{name} 7" for name in caches] if is_old else ["anon 7"]
    lines += [f"{prefix}{name} {size}" for name, size in caches.items()]
    (folder / "memory.stat").write_text("\n".join(lines) + "\n")


def make_process(parent: Path, cgroup: str, mountinfo: str) -> Path:
    """What /proc says of a process."""
    folder = parent / "proc"
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text(mountinfo)
    return folder


@pytest.mark.parametrize("is_old", [True, False], ids=["version 1", "version 2"])
def test_every_limit_counts_up_to_the_topmost_group(is_old, tmp_path):
    mount = tmp_path / "a mount"
    point = str(mount).replace(" ", "\\040")
    if is_old:
        cgroup = "5:cpu,cpuacct:/other\n4:memory:/slurm/job_7/step_0\n0::/elsewhere\n"
        end = "- cgroup cgroup rw,memory"
        other = f"31 24 0:30 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        nothing = UNLIMITED
    else:
        cgroup = "0::/slurm/job_7/step_0\n"
        end, other, nothing = "- cgroup2 cgroup2 rw,nsdelegate", "", "max"
    info = f"25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n{other}"
    info += f"32 24 0:31 / {point} rw shared:9 {end}\n"
    process = make_process(tmp_path, cgroup, info)
    job = mount / "slurm" / "job_7"
    make_group(mount / "slurm", is_old, nothing, 5000)
    make_group(job, is_old, 1000, 700, inactive_file=150, active_file=50)
    make_group(job / "step_0", is_old, nothing, 600)
    groups = find_groups(process)
    assert [group.folder for group in groups] == [job / "step_0", job, mount / "slurm", mount]
    assert find_shortage_in(groups, 500) == ""
    assert find_shortage_in(groups, 501) == (
        f"the control group {job} allows 1000 bytes (0.00 GiB), of which 500 bytes (0.00 GiB) are "
        "in use"
    )
    make_group(job / "step_0", is_old, 700, 600)
    assert find_shortage_in(groups, 100) == ""
    assert f"{job / 'step_0'} allows 700 bytes" in find_shortage_in(groups, 101)


def find_shortage_in(groups: tuple[ControlGroup, ...], size: int) -> str:
    return next(filter(None, (group.find_shortage(size) for group in groups)), "")


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        # Inside a container that has a control group namespace, or none.
        ("/", "/", "."),
        ("/docker/abc", "/docker/abc", "."),
        ("/docker/abc", "/docker/abc/inner", "inner"),
        # Outside of what can be seen here.
        ("/", "/../other", "."),
        ("/docker/abc", "/docker/def", "."),
    ],
)
def test_a_container_sees_its_own_groups(root, path, expected, tmp_path):
    mount = tmp_path / "cgroup"
    (mount / "inner").mkdir(parents=True)
    info = f"32 24 0:31 {root} {mount} ro - cgroup2 cgroup rw\n"
    process = make_process(tmp_path, f"0::{path}\n", info)
    folders = [group.folder for group in find_groups(process)]
    assert folders[0] == mount / expected and folders[-1] == mount


def test_where_there_are_no_groups_the_machine_counts(tmp_path, monkeypatch):
    assert find_groups(tmp_path) == ()
    assert ControlGroup(tmp_path, False).find_shortage(PLENTY) == ""
    monkeypatch.setattr(shared_memory, "find_groups", lambda: ())
    assert find_shortage(PLENTY) == ""
    assert find_shortage(PLENTY + 1) == f"the machine has {PLENTY} bytes (32768.00 GiB) left"


# ---- real groups --------------------------------------------------------------------------


@contextlib.contextmanager
def limited(size: int) -> Iterator[Path]:
    """A control group of this machine that allows so many bytes; skips where there can be none."""
    parents = [group for group in find_groups() if os.access(group.folder, os.W_OK)]
    if not parents:
        pytest.skip("control groups are made by root, where they are mounted for writing")
    parent = parents[0]
    folder = parent.folder / f"mpiddp-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if parent.is_old else "memory.max")).write_text(
            str(size)
        )
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    try:
        yield folder
    finally:
        end = time.monotonic() + 10
        while folder.exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
            assert time.monotonic() < end, f"{folder} is still in use"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def small_node() -> Iterator[Pool]:
    """Ranks on a node with little shared memory, in a control group with a limit."""
    find_groups.cache_clear()
    row = launchers.table()["openmpi"]
    with limited(LIMIT) as folder:
        mount = f"mount -t tmpfs -o size={SHARED_MEMORY} tmpfs /dev/shm"
        enter = f'echo $$ > {folder}/cgroup.procs && {mount} && exec "$@"'
        wrapped = launchers.Launcher(
            "openmpi on a small node",
            Path(shutil.which("unshare") or "unshare"),
            row.libmpi,
            ("--mount", "sh", "-c", enter, "sh", str(row.mpirun), *row.flags),
            # Its own shared memory would not fit.
            {**row.environment, "OMPI_MCA_btl": "self,tcp"},
        )
        pool = Pool(wrapped, RANKS, {})
        yield pool
        pool.close()


def ask_together(session: mpiddp.Session) -> list[str]:
    """Why there is no memory, or nothing: for all of the group's, for a share, for a little."""
    answers, kept = [], []
    for wanted in (LIMIT, SHARE):
        mpiddp.barrier()
        try:
            kept.append(mpiddp.shared_empty(wanted, torch.uint8))
        except mpiddp.ConfigurationError as error:
            answers.append(str(error))
        else:
            answers.append("")
    mpiddp.barrier()
    kept.clear()
    mpiddp.shared_empty(MEGABYTE)
    return answers


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_ranks_beyond_their_groups_limit_are_told_and_not_killed(small_node):
    answers = small_node.call(ask_together).values
    for whole, _ in answers:
        assert re.fullmatch(
            rf"{LIMIT} bytes of shared memory are more than is free: the control group \S+ allows "
            rf"{LIMIT} bytes \(1\.76 GiB\), of which \d+ bytes \(\S+ GiB\) are in use",
            whole,
        ), whole
    # Each had room for its share, all together had not.
    assert any(share for _, share in answers), answers


def average_buckets(session: mpiddp.Session) -> list[list[bool]]:
    """For models of several sizes, after each step, whether the gradients lie in shared memory."""
    found = []
    for width in WIDTHS:
        torch.manual_seed(0)
        layer = torch.nn.Linear(width, 1024, bias=False)
        model = torch.nn.parallel.DistributedDataParallel(layer, gradient_as_bucket_view=True)
        attach(Synchronization("auto"), model)
        features = torch.full((1, width), float(session.world.rank))
        mean = torch.full_like(layer.weight, (session.world.size - 1) / 2)
        steps = []
        for _ in range(STEPS):
            model.zero_grad(set_to_none=True)
            loss = model(features).sum()
            # All at the same time.
            mpiddp.barrier()
            torch.autograd.backward(loss)
            assert layer.weight.grad is not None and torch.equal(layer.weight.grad, mean)
            steps.append(layer.weight.grad.is_shared())
        found.append(steps)
        del model, layer, loss
        gc.collect()
    return found


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_buckets_are_shared_where_there_is_room_for_all_ranks(small_node):
    for shared in small_node.call(average_buckets).values:
        assert shared == [[False] * STEPS, [True] * STEPS]
