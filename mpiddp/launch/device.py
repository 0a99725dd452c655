"""Which GPU or which CPU cores belong to this rank, decided before NCCL is asked anything."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp import environment
from mpiddp.errors import ConfigurationError, LaunchError

if TYPE_CHECKING:
    import torch

    from mpiddp.launch.mpi import SleepingCommunicator
    from mpiddp.launch.world import World

UUID_BYTES = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE."""


@dataclass(frozen=True)
class Placement:
    """What one rank sees, and which of it is its own; compared with its node's other ranks."""

    rank: int
    visible: int
    """GPUs that this process can see."""
    index: int | None
    """The one it takes, counted among those it sees; None without GPUs."""
    identity: str | None
    """UUID of that GPU, where NVML tells."""
    cores: frozenset[int]
    """Cores that this process may run on."""


@dataclass(frozen=True)
class Assignment:
    """The outcome for one rank."""

    index: int | None
    shared: bool
    """Whether another rank of this node uses the same GPU."""
    threads: int
    """CPU threads that are this rank's fair share of its node's cores."""
    remarks: tuple[str, ...]
    """What rank 0 should point out, the same on every rank of the node."""


def find_placement(world: World) -> Placement:
    """Look at this process's GPUs and cores. No context is made on any GPU."""
    import torch

    visible = torch.cuda.device_count()
    index = choose_index(visible, world.local_rank)
    identity = find_identity(index) if index is not None else None
    return Placement(world.rank, visible, index, identity, find_cores())


def choose_index(visible: int, local_rank: int) -> int | None:
    """One visible GPU is this rank's own; of several it takes the one of its local rank.

    With more ranks than GPUs the count starts again; ``find_shared`` tells whether that may be.
    """
    if visible == 0:
        return None
    return 0 if visible == 1 else local_rank % visible


def find_cores() -> frozenset[int]:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def find_identity(index: int) -> str | None:
    """UUID of visible GPU ``index`` from NVML, or None where it does not tell.

    NVML needs neither a context nor CUDA's initialisation, after which CUDA_VISIBLE_DEVICES would
    be fixed and a forked child could not use CUDA: a script may still rely on both.
    """
    visible = os.environ.get(environment.CUDA_VISIBLE_DEVICES)
    entries = [entry.strip() for entry in visible.split(",")] if visible is not None else None
    if entries is not None and index >= len(entries):
        return None
    entry = entries[index] if entries is not None else str(index)
    if not entry.isdecimal():
        return entry  # GPU-… and MIG-… entries are UUIDs themselves.
    return _ask_nvml(int(entry))


def _ask_nvml(number: int) -> str | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, identity = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES)
    if nvml.nvmlInit_v2():
        return None
    try:
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(
            ctypes.c_uint(number), ctypes.byref(handle)
        ) or nvml.nvmlDeviceGetUUID(handle, identity, ctypes.c_uint(UUID_BYTES))
    finally:
        nvml.nvmlShutdown()
    return None if failed else identity.value.decode()


def assign(
    world: World, node: SleepingCommunicator | None, placement: Placement, allow_shared_gpu: bool
) -> Assignment:
    """Compare this node's placements and settle this rank's. Collective over ``node``.

    Raises LaunchError on every rank of the node when ranks would share a GPU unasked.
    """
    placements = [placement] if node is None else node.allgather(placement)
    shared = find_shared(placements)
    if shared and not allow_shared_gpu:
        raise LaunchError(describe_sharing(world.hostname, placements, shared))
    return Assignment(
        index=placement.index,
        shared=placement.rank in shared,
        threads=share_cores([p.cores for p in placements], world.local_rank),
        remarks=find_remarks(world.hostname, placements),
    )


def find_shared(placements: Sequence[Placement]) -> frozenset[int]:
    """Ranks of one node that have a GPU which another rank has too.

    UUIDs decide. Where the driver tells none, ranks that see several GPUs see the same ones, so
    equal indices mean one GPU; ranks that see a single one are believed to have their own.
    """
    owners: dict[object, list[int]] = {}
    for placement in placements:
        if placement.index is None:
            continue
        key: object = placement.identity
        if key is None:
            key = placement.index if placement.visible > 1 else ("own", placement.rank)
        owners.setdefault(key, []).append(placement.rank)
    return frozenset(rank for ranks in owners.values() if len(ranks) > 1 for rank in ranks)


def describe_sharing(hostname: str, placements: Sequence[Placement], shared: frozenset[int]) -> str:
    """Who shares what on this node, and how to start it instead."""
    visible = max(placement.visible for placement in placements)
    ranks = ", ".join(str(rank) for rank in sorted(shared))
    found = (
        f"{len(placements)} ranks for {visible} visible GPU{'s' if visible > 1 else ''}"
        if len(placements) > visible
        else f"{len(placements)} ranks that were given overlapping GPUs"
    )
    return (
        f"on {hostname}, ranks {ranks} would use a GPU that another rank uses: {found}. "
        f"Start one rank per GPU (--ntasks-per-node={visible} --gpus-per-node={visible}), or "
        "share on purpose: --allow-shared-gpu --backend gloo"
    )


def find_remarks(hostname: str, placements: Sequence[Placement]) -> tuple[str, ...]:
    """Idle GPUs, and ranks that see one GPU each."""
    remarks = []
    visible = max(placement.visible for placement in placements)
    count = len(placements)
    if visible > count:
        remarks.append(
            f"{hostname}: {visible} GPUs visible, {count} rank{'s' if count > 1 else ''} on this "
            f"node; to use them all: --ntasks-per-node={visible}"
        )
    identities = {placement.identity for placement in placements}
    if visible == 1 and count > 1 and (None in identities or len(identities) == count):
        remarks.append(
            f"{hostname}: each rank sees one GPU, which is its device 0 whatever its local rank; "
            "a script that calls set_device(LOCAL_RANK) needs all of them visible: "
            f"--gpus-per-node={count} --gpu-bind=none"
        )
    return tuple(remarks)


def share_cores(masks: Sequence[frozenset[int]], local_rank: int) -> int:
    """Threads for one rank: its cores, each divided among the ranks that may run on it.

    Ranks bound to cores of their own get those; unbound ranks split the node evenly. At least 1.
    """
    share = sum(1.0 / sum(core in mask for mask in masks) for core in masks[local_rank])
    return max(1, int(share + 1e-9))


def choose_backend(requested: str, anyone_shares: bool, lacking: int | None) -> str:
    """NCCL where every rank has its own GPU, else Gloo; or what was asked for, if it can work.

    Args:
        anyone_shares: whether two ranks use one GPU.
        lacking: the lowest rank without a GPU, or None.

    Raises:
        ConfigurationError: NCCL was asked for and a rank has no GPU, or this torch no NCCL.
        LaunchError: NCCL was asked for and ranks share a GPU.
    """
    import torch.distributed as distributed

    if requested not in ("auto", "nccl", "gloo"):
        raise ConfigurationError(f"backend {requested!r}: expected auto, nccl or gloo")
    if requested == "nccl":
        if lacking is not None:
            raise ConfigurationError(
                f"backend nccl needs a GPU for every rank, but rank {lacking} sees none: "
                "choose --backend gloo (or auto), or ask for GPUs (--gpus-per-node)"
            )
        if anyone_shares:
            raise LaunchError(
                "backend nccl cannot work with ranks that share a GPU: choose --backend gloo"
            )
        if not distributed.is_nccl_available():
            raise ConfigurationError(
                "backend nccl: this torch was built without NCCL: choose --backend gloo"
            )
    if requested == "auto":
        usable = lacking is None and not anyone_shares and distributed.is_nccl_available()
        return "nccl" if usable else "gloo"
    return requested


def take_device(assignment: Assignment, *, select: bool) -> torch.device:
    """This rank's torch.device; with ``select``, CUDA's current device from here on."""
    import torch

    if assignment.index is None:
        return torch.device("cpu")
    if select:
        torch.cuda.set_device(assignment.index)
    return torch.device("cuda", assignment.index)
