"""Makers of GPUs, one row each: their names in torch, and their devices as the kernel lists them.

torch is not imported. What one maker alone has stands elsewhere: `nvml` (NVIDIA's identities),
`nccl` (failures of NCCL and RCCL). Read in August to November 2026: torch 2.13 (torch/cuda and
torch/xpu, their ``device_count``), ROCm's "GPU isolation techniques" (7.14) and its runtime for HIP
(rocclr, rocdevice.cpp), Linux (drivers/gpu/drm/amd/amdkfd/kfd_topology.c), Intel's "Flattening GPU
Tile Hierarchy", Slurm's gres.conf.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mpiddp import environment

ROOT = Path("/")
INTEGRATED = "0000:00:02.0"
"""Where every GPU within an Intel CPU is."""


@dataclass(frozen=True)
class ListedGpu:
    """What one index of torch's stands for: a GPU, a partition of one, or one of its tiles."""

    address: str
    """Of its PCI device, as the system writes it."""
    part: str = ""
    """Which part of the device; empty for all of it."""
    is_certain: bool = True
    """Whether it was made for computing, and not perhaps for a screen alone."""

    @property
    def identity(self) -> str:
        """Tells it from the others of its machine."""
        return " ".join(filter(None, (self.address, self.part)))


@dataclass(frozen=True)
class Vendor:
    """What differs between makers. The fields of `VENDORS` are nowhere else."""

    name: str
    build: str
    """What ``torch.version`` calls a torch for these GPUs."""
    platform: str
    """What people call that torch."""
    type: str
    """Of torch's devices, and the name of their module: ``torch.cuda``."""
    backend: str
    """Of torch.distributed."""
    library: str
    """What that backend calls."""
    masks: tuple[tuple[str, ...], ...]
    """The variables that select GPUs. Each group numbers those that the group before it shows; of a
    group the first one that is set counts."""
    entry: str
    """A regular expression for a GPU in them; the first word that does not ends the list."""
    list_gpus: Callable[[Path], list[ListedGpu]]
    """All that the kernel shows to this process below a root, in the order of their numbers."""
    show_health: str
    """The command that shows clocks, heat and memory errors of its GPUs."""
    show_links: str
    """The command that shows which GPUs reach each other."""

    @property
    def mask_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for group in self.masks for name in group))

    @property
    def tool(self) -> str:
        return self.show_health.partition(" ")[0]


def _list_nvidia(root: Path) -> list[ListedGpu]:
    """A folder for each, by PCI address."""
    try:
        names = sorted(os.listdir(root / "proc/driver/nvidia/gpus"))
    except OSError:
        return []
    return [ListedGpu(name) for name in names]


def _list_amd(root: Path) -> list[ListedGpu]:
    """A node of the topology for each GPU, or for each partition of one.

    Those that a job's control group keeps from it cannot be read.
    """
    folders = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    ordered = sorted(folders, key=lambda path: int(path.name))
    found = [(path.name, each) for path in ordered if (each := _read_node(path)).get("simd_count")]
    places = [(name, _format_location(each), each) for name, each in found]
    addresses = [address for _, address, _ in places]
    return [
        ListedGpu(
            address,
            f"node {name}" if addresses.count(address) > 1 else "",
            # Of old, a CPU with graphics was one node.
            not each.get("cpu_cores_count") and not _is_display(root, address),
        )
        for name, address, each in places
    ]


def _read_node(folder: Path) -> dict[str, int]:
    try:
        rows = (line.split() for line in (folder / "properties").read_text().splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) == 2}
    except (OSError, ValueError):
        return {}


def _format_location(node: Mapping[str, int]) -> str:
    place = node.get("location_id", 0)
    return format_bus(node.get("domain", 0), place >> 8, place >> 3 & 31, place & 7)


def _list_intel(root: Path) -> list[ListedGpu]:
    """The tiles of each card, or cards as a whole; those within CPUs count if there are no others.

    ZE_FLAT_DEVICE_HIERARCHY says which; FLAT is the default, and COMBINED counts as it does.
    """
    is_whole = os.environ.get(environment.ZE_HIERARCHY) == "COMPOSITE"
    cards: dict[str, int] = {}
    for card in (root / "sys/class/drm").glob("card*"):
        device = card / "device"
        if card.name[4:].isdecimal() and _read(device / "vendor") == "0x8086":
            # The driver xe has a folder for each tile, i915 for each of their graphics engines.
            tiles = len([*device.glob("tile[0-9]*")]) or len([*card.glob("gt/gt[0-9]*")])
            cards[device.resolve().name] = 1 if is_whole else max(1, tiles)
    if INTEGRATED in cards:
        cards = {name: n for name, n in cards.items() if name != INTEGRATED} or {INTEGRATED: 1}
    return [
        ListedGpu(address, f"tile {tile}" if cards[address] > 1 else "", is_certain)
        for address in sorted(cards)
        for is_certain in [address != INTEGRATED and not _is_display(root, address)]
        for tile in range(cards[address])
    ]


def _is_display(root: Path, address: str) -> bool:
    """Whether it can drive a screen: PCI's class says so of cards for desktops."""
    return _read(root / "sys/bus/pci/devices" / address / "class").startswith("0x0300")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def format_bus(domain: int, bus: int, slot: int, function: int = 0) -> str:
    """A PCI address as the system writes it."""
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"


NVIDIA = Vendor(
    name="NVIDIA",
    build="cuda",
    platform="CUDA",
    type="cuda",
    backend="nccl",
    library="NCCL",
    masks=((environment.CUDA_VISIBLE_DEVICES,),),
    # Slurm writes NoDevFiles, and people write none.
    entry=r"\d+|(GPU|MIG)-.+",
    list_gpus=_list_nvidia,
    show_health="nvidia-smi -q -d PERFORMANCE,ECC and -d CLOCK",
    show_links="nvidia-smi topo -p2p r",
)
AMD = Vendor(
    name="AMD",
    build="hip",
    platform="ROCm",
    type="cuda",
    backend="nccl",
    library="RCCL",
    masks=(
        (environment.ROCR_VISIBLE_DEVICES,),
        (environment.HIP_VISIBLE_DEVICES, environment.CUDA_VISIBLE_DEVICES),
    ),
    entry=r"\d+|GPU-.+",
    list_gpus=_list_amd,
    show_health="amd-smi metric",
    show_links="amd-smi topology",
)
INTEL = Vendor(
    name="Intel",
    build="xpu",
    platform="XPU",
    type="xpu",
    backend="xccl",
    library="oneCCL",
    masks=((environment.ZE_AFFINITY_MASK,),),
    entry=r"\d+(\.\d+)*",
    list_gpus=_list_intel,
    show_health="xpu-smi health -l",
    show_links="xpu-smi topology -m",
)
VENDORS = (NVIDIA, AMD, INTEL)
TYPES = tuple(dict.fromkeys(vendor.type for vendor in VENDORS))
BACKENDS = tuple(dict.fromkeys(vendor.backend for vendor in VENDORS))


def is_address(text: str) -> bool:
    """Whether it is a PCI address as the system writes it."""
    return re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", text) is not None


def find_built(build: str) -> Vendor | None:
    """The maker whose GPUs a build of torch is for; None for one of CPUs, or an unknown one."""
    return next((vendor for vendor in VENDORS if vendor.build == build), None)


def list_masks(vendor: Vendor) -> Iterator[tuple[str, list[str]]]:
    """The variables that count, in the order in which they do, with the GPUs that each names."""
    for group in vendor.masks:
        name = next((name for name in group if os.environ.get(name) is not None), None)
        if name is not None:
            yield name, [entry.strip() for entry in os.environ[name].split(",")]
