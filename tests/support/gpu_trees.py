"""Machines with GPUs, as the kernel shows them in /proc, /sys and /dev, below a made-up root.

The forms are those of Linux: drivers/gpu/drm/amd/amdkfd/kfd_topology.c, the folders ``tile0`` of
drm/xe, and ``gt/gt0`` of drm/i915.
"""

from collections.abc import Sequence
from pathlib import Path

COMPUTING, VIDEO = "0x120000", "0x030000"
"""PCI's classes: an accelerator, and a card that can drive a screen."""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_nvidia(root: Path, count: int) -> None:
    for number in range(count):
        write(root / f"proc/driver/nvidia/gpus/0000:{0x10 + number:02x}:00.0/information", "")
        write(root / f"dev/nvidia{number}", "")
    write(root / "dev/nvidiactl", "")


def add_amd(
    root: Path, buses: Sequence[int], kind: str = COMPUTING, *, sockets: int = 1, hidden: int = 0
) -> None:
    """Nodes of the topology: of CPUs first, then a GPU for each bus.

    ``hidden``: GPUs that a job's control group keeps from it, before the others: their file is
    there, and empty here as it cannot be read there.
    """
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for number in range(sockets):
        write(nodes / f"{number}/properties", "cpu_cores_count 64\nsimd_count 0\n")
    for number in range(hidden):
        write(nodes / f"{sockets + number}/properties", "")
    for number, bus in enumerate(buses, sockets + hidden):
        text = f"cpu_cores_count 0\nsimd_count 304\nvendor_id 4098\nlocation_id {bus << 8}\n"
        write(nodes / f"{number}/properties", f"{text}domain 0\nunique_id 1234567890123456789\n")
        write(root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0/class", f"{kind}\n")


def add_intel(
    root: Path, addresses: Sequence[str], tiles: int = 1, driver: str = "xe", kind: str = "0x038000"
) -> None:
    for number, address in enumerate(addresses):
        device, card = root / f"sys/devices/{address}", root / f"sys/class/drm/card{number}"
        write(device / "vendor", "0x8086\n")
        card.mkdir(parents=True)
        (card / "device").symlink_to(device)
        # The names of a card's sockets for screens begin as its own does.
        (card.parent / f"card{number}-DP-1").mkdir()
        for tile in range(tiles):
            place = device / f"tile{tile}" if driver == "xe" else card / f"gt/gt{tile}"
            place.mkdir(parents=True)
        write(root / f"sys/bus/pci/devices/{address}/class", f"{kind}\n")
