"""What one node gives its ranks: limits, shared memory."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from mpiddp.doctor.examiner.findings import Finding, passed, skipped, warned
from mpiddp.launch.fabrics import NodeFabrics
from mpiddp.wording import describe_size

LOCKED_MEMORY = "locked memory"
OPEN_FILES = "open files"
SHARED_MEMORY = "shared memory"
CORE_FILES = "core files"

LEAST_FREE_SHARED_MEMORY = 256 << 20
"""Bytes. NCCL and workers that load data exchange what they have there."""
LEAST_OPEN_FILES = 256
"""Files that a process has open by itself: libraries, data, workers' pipes."""

SHARED = Path("/dev/shm")
CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Limits:
    """Limits of one process, and the node's shared memory. Sizes are in bytes."""

    open_files: int
    hard_open_files: int
    locked_memory: int
    shared_memory: int | None
    """None if there is no ``/dev/shm``."""
    free_shared_memory: int
    infiniband: tuple[str, ...]
    """Fast network cards of this node that can be used."""
    core_files: int
    """Bytes of the largest core file."""
    core_pattern: str
    """Where the kernel writes core files; ``|PROGRAM``: it hands them to a program."""


def find_limits(node: NodeFabrics, shared: Path = SHARED) -> Limits:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        state = os.statvfs(shared)
        size, free = state.f_frsize * state.f_blocks, state.f_frsize * state.f_bavail
    except OSError:
        size, free = None, 0
    core, _ = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        pattern = CORE_PATTERN.read_text().strip()
    except OSError:
        pattern = ""
    return Limits(soft, hard, locked, size, free, node.devices, core, pattern)


def judge_locked_memory(limits: Limits) -> Finding:
    if not limits.infiniband:
        return skipped(LOCKED_MEMORY, "no fast network card, which would need it")
    devices = ", ".join(limits.infiniband)
    if limits.locked_memory == UNLIMITED:
        return passed(LOCKED_MEMORY, f"unlimited, for {devices}")
    return warned(
        LOCKED_MEMORY,
        f"limited to {describe_size(limits.locked_memory)}, but {devices} must lock what it sends",
        "ulimit -l unlimited; under Slurm the administrators set LimitMEMLOCK=infinity for slurmd "
        "and PropagateResourceLimitsExcept=MEMLOCK",
    )


def judge_open_files(limits: Limits, world_size: int) -> Finding:
    # Gloo connects every rank with every other, and the store with all.
    needed = LEAST_OPEN_FILES + 2 * world_size
    if limits.open_files == UNLIMITED or limits.open_files >= needed:
        return passed(OPEN_FILES, f"{describe_count(limits.open_files)} per process")
    hard = describe_count(limits.hard_open_files)
    return warned(
        OPEN_FILES,
        f"limited to {limits.open_files}; {world_size} ranks may need {needed} and more",
        f"ulimit -n {max(needed, 4096)} before the launch (the hard limit here is {hard})",
    )


def judge_shared_memory(limits: Limits) -> Finding:
    if limits.shared_memory is None:
        return warned(
            SHARED_MEMORY,
            "there is no /dev/shm: workers that load data, NCCL and MPI need it",
            "mount a tmpfs there; in a container: --shm-size 8g",
        )
    size = describe_size(limits.shared_memory)
    if limits.free_shared_memory >= LEAST_FREE_SHARED_MEMORY:
        free = describe_size(floor_power(limits.free_shared_memory))
        return passed(SHARED_MEMORY, f"/dev/shm of {size}, at least {free} free")
    return warned(
        SHARED_MEMORY,
        f"/dev/shm of {size} has {describe_size(limits.free_shared_memory)} free; workers that "
        "load data, NCCL and MPI need more",
        "Remove what earlier jobs left in /dev/shm; in a container: --shm-size 8g or --ipc=host",
    )


def judge_core_files(limits: Limits, world_size: int) -> Finding:
    if limits.core_files == 0:
        return passed(CORE_FILES, "none are written")
    pattern = limits.core_pattern
    if pattern.startswith(("|", "/")) or world_size == 1:
        return passed(CORE_FILES, f"written to {pattern}" if pattern else "written")
    most = "" if limits.core_files == UNLIMITED else f" of up to {describe_size(limits.core_files)}"
    return warned(
        CORE_FILES,
        f"if they crash, {world_size} ranks write as many core files{most} into their working "
        f"directory, each with all memory of its process",
        "ulimit -c 0 before the launch, unless you look for a crash",
    )


def floor_power(size: int) -> int:
    """The largest power of two up to ``size``, at least 1: nodes that are alike say the same."""
    return 1 << (size.bit_length() - 1)


def describe_count(count: int) -> str:
    return "unlimited" if count == UNLIMITED else str(count)
