"""GPUs: how many there are, which ranks use them, how near and how fast they are."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpiddp.doctor.examiner.findings import Finding, join_some, passed, skipped, warned
from mpiddp.launch.device.binding import find_near_cpus
from mpiddp.launch.device.device import Placement, find_bus, find_remarks, find_shared
from mpiddp.launch.device.nccl import find_version
from mpiddp.launch.device.vendors import NVIDIA, ROOT, VENDORS
from mpiddp.launch.device.visibility import assume_vendor, find_module
from mpiddp.launch.fabrics import BadVersion
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.wording import count_noun, fold_numbers

if TYPE_CHECKING:
    import torch

GPUS = "GPUs"
GPU_KINDS = "GPU kinds"
NCCL_VERSION = "NCCL version"
GPU_PLACE = "GPU place"
GPU_SPEED = "GPU speed"

SLOW_SHARE = 0.8
"""A GPU slower than this share of the job's median is pointed out."""
EDGE = 4096
"""Rows and columns of the matrices."""
PRODUCTS = 10
TRIALS = 3
SHOWN = 8


@dataclass(frozen=True)
class Gpu:
    rank: int
    name: str
    nccl: str
    """Version of the NCCL or RCCL that is loaded; empty without."""
    peers: bool | None
    """Whether it can read the memory of all other GPUs that this rank sees; None if it sees one."""
    near: frozenset[int]
    """Cores of its NUMA node; empty if the system does not say."""
    speed: float
    """Of a matrix product, floating-point operations per second."""
    library: str = "NCCL"
    """Which of the two it is."""


def examine_gpu(rank: int, device: torch.device) -> Gpu:
    module = find_module()
    properties, own = module.get_device_properties(device), device.index
    others = [index for index in range(module.device_count()) if index != own]
    peers = all(module.can_device_access_peer(own, other) for other in others)
    return Gpu(
        rank=rank,
        name=properties.name,
        nccl=".".join(map(str, find_version())),
        peers=peers if others else None,
        near=find_near_cpus(find_bus(properties)),
        speed=measure_product(device),
        library=assume_vendor().library,
    )


def measure_product(device: torch.device) -> float:
    """Operations per second of a product of half-precision matrices; the best of some trials."""
    import torch

    left = torch.ones(EDGE, EDGE, dtype=torch.float16, device=device)
    result = torch.empty_like(left)
    best = float("inf")
    for _ in range(TRIALS + 1):
        begin, end = (find_module().Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PRODUCTS):
            torch.mm(left, left, out=result)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return 2.0 * EDGE**3 * PRODUCTS / best


def count_present(root: Path = ROOT) -> int:
    """GPUs that this machine shows, whether or not torch can use them: of one maker.

    NVIDIA's by their device files: a container has those of its own GPUs alone, but the driver's
    list of all.
    """
    files = (root / "dev").glob("nvidia*")
    counts = [sum(path.name[len("nvidia") :].isdecimal() for path in files)]
    others = (maker.list_gpus(root) for maker in VENDORS if maker is not NVIDIA)
    return max(counts + [sum(gpu.is_certain for gpu in each) for each in others])


def judge_count(
    hostname: str,
    placements: Sequence[Placement],
    gpus: Sequence[Gpu],
    present: int,
    *,
    are_allotted: bool = False,
) -> Finding:
    """GPUs of one node against its ranks. Ranks that share one unasked were refused before.

    Args:
        present: how many the node has, 0 if they are hidden on purpose.
        are_allotted: whether a batch system decides how many of them are this job's.
    """
    visible = max(placement.visible for placement in placements)
    if visible == 0:
        return _judge_blindness(present, next((p.unseen for p in placements if p.unseen), ""))
    lacking = [placement.rank for placement in placements if placement.index is None]
    if lacking:
        return warned(
            GPUS,
            f"ranks {fold_numbers(lacking, most=SHOWN)} see no GPU, others of this node do",
            "Give every rank one: --gpus-per-node=RANKS or --gpus-per-task=1",
        )
    found = describe_gpus(placements, gpus)
    if visible <= len(placements):
        remarks = find_remarks(hostname, placements)
        found = "; ".join([found, *(text.removeprefix(f"{hostname}: ") for text in remarks)])
    problems = list(_find_problems(placements, gpus, visible, 0 if are_allotted else present))
    if problems:
        return warned(
            GPUS,
            "; ".join([found, *(problem for problem, _ in problems)]),
            ". ".join(advice for _, advice in problems),
        )
    return passed(GPUS, found)


def _judge_blindness(present: int, unseen: str) -> Finding:
    advice = (
        "A torch built for the CPU (torch.version.cuda is None), a driver that is too old, or no "
        "GPUs asked for (--gpus-per-node)?"
    )
    if unseen:
        return warned(GPUS, unseen, advice)
    if not present:
        return skipped(GPUS, "no GPUs: ranks compute on the CPU")
    return warned(GPUS, f"{count_noun(present, 'GPU')} here, but torch sees none", advice)


def describe_gpus(placements: Sequence[Placement], gpus: Sequence[Gpu]) -> str:
    """``NVIDIA H200, one for each of 2 ranks (2 UUIDs), with access to each other's memory``."""
    known = {placement.identity for placement in placements if placement.identity}
    ranks = count_noun(len(placements), "rank")
    whose = f"used by {ranks}" if find_shared(placements) else f"one for each of {ranks}"
    found = f"{' and '.join(sorted({gpu.name for gpu in gpus}))}, {whose}"
    found += f" ({count_noun(len(known), 'UUID') if known else 'the driver tells no UUIDs'})"
    if gpus and all(gpu.peers for gpu in gpus):
        found += ", with access to each other's memory"
    return found


def _find_problems(
    placements: Sequence[Placement], gpus: Sequence[Gpu], visible: int, present: int
) -> Iterator[tuple[str, str]]:
    if shared := find_shared(placements):
        yield (
            f"ranks {fold_numbers(shared, most=SHOWN)} share GPUs, as --allow-shared-gpu lets them",
            "Each is slower for it, and NCCL before 2.30 refuses them: for speed, one rank per GPU",
        )
    ranks, vendor = len(placements), assume_vendor()
    # Ranks that see one GPU each may see different ones.
    known = {placement.identity for placement in placements if placement.identity}
    used = max(visible, len(known) or ranks)
    if visible > ranks:
        yield (
            f"{visible} GPUs visible, {ranks} of them used",
            f"To use them all: --ntasks-per-node={visible}",
        )
    elif present > used:
        yield (
            f"{count_noun(present, 'GPU')} here, {used} of them visible",
            (
                f"If all are yours: unset {' and '.join(vendor.mask_names)}, and start {present} "
                "ranks on this node"
            ),
        )
    if far := [gpu.rank for gpu in gpus if gpu.peers is False]:
        ranks_apart = fold_numbers(far, most=SHOWN)
        yield (
            f"the GPUs of ranks {ranks_apart} cannot read the memory of all others",
            (
                "NCCL then goes through the host's memory: see which pairs cannot with "
                f"{vendor.show_links}; have PCIe's access control (ACS) and the IOMMU turned off, "
                "outside of virtual machines; some cards for workstations cannot"
            ),
        )


def judge_kinds(
    gpus: Sequence[Gpu], hosts: Mapping[int, str], without: Sequence[str] = ()
) -> Finding:
    """Whether all ranks have GPUs of one kind, and one NCCL; ``without``: hosts without GPUs."""
    vendor = assume_vendor()
    without_nccl = "no NCCL" if vendor.backend == NVIDIA.backend else vendor.backend
    kinds: dict[str, list[str]] = {"no GPU": [*without]} if without else {}
    for gpu in gpus:
        kind = f"{gpu.name}, {f'{gpu.library} {gpu.nccl}' if gpu.nccl else without_nccl}"
        kinds.setdefault(kind, []).append(hosts[gpu.rank])
    if len(kinds) == 1:
        return passed(GPU_KINDS, f"{next(iter(kinds))} for every rank")
    advice = []
    if without:
        advice.append(
            f"Gloo connects them, and CPUs set the pace: --devices {vendor.type} refuses such jobs"
        )
    if len({gpu.name for gpu in gpus}) > 1:
        advice.append("The slowest sets the pace: ask for GPUs of one kind (--constraint)")
    if len({gpu.nccl for gpu in gpus}) > 1:
        advice.append("Ranks need the same NCCL: give all nodes the same environment")
    parts = [f"{fold_hostnames(names)}: {kind}" for kind, names in kinds.items()]
    return warned(GPU_KINDS, join_some(parts), ". ".join(advice))


def judge_nccl(gpus: Sequence[Gpu], bad: Sequence[BadVersion], machine: str) -> Finding:
    """Whether a rank has a version of NCCL that is known to be bad; ``machine``: ``uname -m``."""
    found = dict.fromkeys((gpu.library, gpu.nccl) for gpu in gpus if gpu.nccl)
    if not found:
        return skipped(NCCL_VERSION, "no NCCL")
    names = ", ".join(f"{library} {version}" for library, version in found)
    reasons = [
        f"{row.why}; {row.before} does not ({row.source})"
        for library, version in found
        for row in bad
        if row.library == library and row.includes(version, machine)
    ]
    if not reasons:
        return passed(NCCL_VERSION, f"{names}: nothing known against it")
    return warned(
        NCCL_VERSION,
        f"{names}: {join_some(reasons)}",
        "Take another: pip install nvidia-nccl-cu13==VERSION, or the site's module",
    )


def judge_place(gpus: Sequence[Gpu], cores: Mapping[int, frozenset[int]]) -> Finding:
    """Whether the ranks of one node run near their GPUs; ``cores``: those of each rank."""
    if not gpus:
        return skipped(GPU_PLACE, "no GPUs")
    known = [gpu for gpu in gpus if gpu.near]
    if not known:
        return skipped(GPU_PLACE, "this system does not say which cores are near which GPU")
    far = [gpu for gpu in known if not gpu.near & cores[gpu.rank]]
    if not far:
        return passed(GPU_PLACE, "every rank may run on cores near its GPU")
    parts = [
        f"rank {gpu.rank} runs on {fold_numbers(cores[gpu.rank], most=SHOWN)}, its GPU is near "
        f"{fold_numbers(gpu.near, most=SHOWN)}"
        for gpu in far
    ]
    return warned(
        GPU_PLACE,
        join_some(parts),
        "--gpu-bind=closest, or --cpu-bind=none and more cores per rank",
    )


def judge_speed(gpus: Sequence[Gpu], hosts: Mapping[int, str]) -> Finding:
    """GPUs that are slow beside those of the same name in the job; ``hosts`` is by rank."""
    parts, slow = [], []
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        alike = sorted((gpu for gpu in gpus if gpu.name == name), key=lambda gpu: gpu.speed)
        median = statistics.median(gpu.speed for gpu in alike)
        parts.append(f"{name} {median / 1e12:.0f} TFLOP/s")
        slow += [
            f"rank {gpu.rank} on {hosts[gpu.rank]} {gpu.speed / 1e12:.0f}"
            for gpu in alike
            if gpu.speed < SLOW_SHARE * median
        ]
    found = f"a half-precision matrix product: {', '.join(parts)} (median)"
    if not slow:
        return passed(GPU_SPEED, found)
    return warned(
        GPU_SPEED,
        f"{found}, but {join_some(slow)}",
        f"Look at them with {assume_vendor().show_health}: heat, power limit, another "
        "process? Leave the node out with --exclude until then",
    )
