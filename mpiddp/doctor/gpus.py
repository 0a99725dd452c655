"""GPUs: how many, whose, how near, how fast."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpiddp.doctor.cores import fold_numbers
from mpiddp.doctor.findings import Finding, passed, skipped, warned
from mpiddp.launch.device import Placement

if TYPE_CHECKING:
    import torch

GPUS = "GPUs"
GPU_PLACE = "GPU place"
GPU_SPEED = "GPU speed"

SLOW_SHARE = 0.8
"""A GPU slower than this share of the job's median is pointed out."""
EDGE = 4096
"""Rows and columns of the matrices."""
PRODUCTS = 10
TRIALS = 3
PCI = Path("/sys/bus/pci/devices")
DEVICES = Path("/dev")
SHOWN = 8


@dataclass(frozen=True)
class Gpu:
    """One rank's GPU."""

    rank: int
    name: str
    nccl: str
    """Version of NCCL that torch brings; empty without."""
    peers: bool | None
    """Whether it can read the memory of all other GPUs that this rank sees; None if it sees one."""
    near: frozenset[int]
    """Cores of its NUMA node; empty where the system does not say."""
    speed: float
    """Of a matrix product, floating-point operations per second."""


def examine_gpu(rank: int, device: torch.device) -> Gpu:
    """Look at this rank's GPU, and let it work for a moment."""
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    count, own = torch.cuda.device_count(), device.index
    others = [index for index in range(count) if index != own]
    peers = all(torch.cuda.can_device_access_peer(own, other) for other in others)
    return Gpu(
        rank=rank,
        name=properties.name,
        nccl=_nccl_version(),
        peers=peers if others else None,
        near=find_near_cores(find_bus(properties)),
        speed=measure_product(device),
    )


def _nccl_version() -> str:
    import torch

    if not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def find_bus(properties: Any) -> str | None:
    """The PCI address of a GPU as the system writes it, or None where this torch does not say."""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if not all(isinstance(number, int) for number in numbers):
        return None
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def find_near_cores(bus: str | None, root: Path = PCI) -> frozenset[int]:
    """Cores of the NUMA node that a PCI device hangs on; empty where the system does not say."""
    if bus is None:
        return frozenset()
    try:
        return read_list((root / bus / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def read_list(text: str) -> frozenset[int]:
    """The kernel's ``0-3,8,10-11``."""
    numbers: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        low, _, high = item.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def measure_product(device: torch.device) -> float:
    """Operations per second of a product of half-precision matrices; the best of some trials."""
    import torch

    left = torch.ones(EDGE, EDGE, dtype=torch.float16, device=device)
    result = torch.empty_like(left)
    best = float("inf")
    for _ in range(TRIALS + 1):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(PRODUCTS):
            torch.mm(left, left, out=result)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return 2.0 * EDGE**3 * PRODUCTS / best


def count_files(folder: Path = DEVICES) -> int:
    """GPUs for which the driver has made device files, whether or not torch can use them."""
    return sum(path.name[len("nvidia") :].isdecimal() for path in folder.glob("nvidia*"))


def judge_count(placements: Sequence[Placement], gpus: Sequence[Gpu], present: int) -> Finding:
    """GPUs of one node against its ranks. Ranks that share one were refused before.

    Args:
        present: how many the node has by its device files, 0 where they are hidden on purpose.
    """
    visible = max(placement.visible for placement in placements)
    if visible == 0 and present:
        return warned(
            GPUS,
            f"{present} GPU{'s' if present > 1 else ''} in /dev, but torch sees none",
            "A torch built for the CPU (torch.version.cuda is None), a driver that is too old "
            "(nvidia-smi), or no GPUs asked for (--gpus-per-node)?",
        )
    if visible == 0:
        return skipped(GPUS, "no GPUs: ranks compute on the CPU")
    lacking = [placement.rank for placement in placements if placement.index is None]
    if lacking:
        return warned(
            GPUS,
            f"ranks {fold_numbers(lacking)} see no GPU, others of this node do",
            "Give every rank one: --gpus-per-node=RANKS or --gpus-per-task=1",
        )
    known = {placement.identity for placement in placements if placement.identity}
    names = sorted({gpu.name for gpu in gpus})
    nccl = sorted({gpu.nccl for gpu in gpus if gpu.nccl})
    found = f"{' and '.join(names)}, one for each of {len(placements)} ranks"
    found += f" ({len(known)} UUIDs)" if known else " (the driver tells no UUIDs)"
    found += f", NCCL {' and '.join(nccl)}" if nccl else ", no NCCL in this torch"
    if any(gpu.peers is False for gpu in gpus):
        found += ", without access to each other's memory"
    elif gpus and all(gpu.peers for gpu in gpus):
        found += ", with access to each other's memory"
    if visible > len(placements):
        return warned(
            GPUS,
            f"{visible} GPUs visible, {len(placements)} of them used",
            f"To use them all: --ntasks-per-node={visible}",
        )
    if len(names) > 1 or len(nccl) > 1:
        return warned(GPUS, found, "The slowest sets the pace: ask for GPUs of one kind")
    return passed(GPUS, found)


def judge_place(gpus: Sequence[Gpu], cores: Mapping[int, frozenset[int]]) -> Finding:
    """Whether the ranks of one node run near their GPUs.

    Args:
        cores: those that each rank may run on.
    """
    if not gpus:
        return skipped(GPU_PLACE, "no GPUs")
    known = [gpu for gpu in gpus if gpu.near]
    if not known:
        return skipped(GPU_PLACE, "this system does not say which cores are near which GPU")
    far = [gpu for gpu in known if not gpu.near & cores[gpu.rank]]
    if not far:
        return passed(GPU_PLACE, "every rank may run on cores near its GPU")
    parts = [
        f"rank {gpu.rank} runs on {fold_numbers(sorted(cores[gpu.rank]))}, its GPU is near "
        f"{fold_numbers(sorted(gpu.near))}"
        for gpu in far[:SHOWN]
    ]
    return warned(
        GPU_PLACE,
        "; ".join(parts),
        "--gpu-bind=closest, or --cpu-bind=none and more cores per rank",
    )


def judge_speed(speeds: Sequence[tuple[int, str, float]], hosts: Mapping[int, str]) -> Finding:
    """GPUs that are slow beside those of the same name in the whole job.

    Args:
        speeds: rank, name of the GPU, operations per second.
        hosts: by rank.
    """
    if not speeds:
        return skipped(GPU_SPEED, "no GPUs")
    groups: dict[str, list[tuple[int, float]]] = {}
    for rank, name, speed in speeds:
        groups.setdefault(name, []).append((rank, speed))
    parts, slow = [], []
    for name, rows in groups.items():
        median = statistics.median(speed for _, speed in rows)
        parts.append(f"{name} {median / 1e12:.0f} TFLOP/s")
        slow += [
            f"rank {rank} on {hosts[rank]} {speed / 1e12:.0f}"
            for rank, speed in sorted(rows, key=lambda row: row[1])
            if speed < SLOW_SHARE * median
        ]
    found = f"a half-precision matrix product: {', '.join(parts)} (median)"
    if not slow:
        return passed(GPU_SPEED, found)
    return warned(
        GPU_SPEED,
        f"{found}, but {'; '.join(slow[:SHOWN])}" + ("; …" if len(slow) > SHOWN else ""),
        "Look at them with nvidia-smi -q -d PERFORMANCE,ECC and -d CLOCK: heat, power limit, "
        "another process? Leave the node out with --exclude until then",
    )
