"""Fast network cards of this host, and whether they read GPU memory: what /sys says."""

from __future__ import annotations

from pathlib import Path

SYSTEM = Path("/sys")
INFINIBAND = SYSTEM / "class/infiniband"
PEER_MEMORY = ("module/nvidia_peermem", "kernel/mm/memory_peers/nv_mem*")
"""Where NCCL looks for the module that lets a card read GPU memory (its src/transport/net_ib)."""


def find_infiniband(folder: Path = INFINIBAND) -> tuple[str, ...]:
    """Names of the InfiniBand (or RoCE) devices that have an active port.

    A card without a cable is listed too: the state of its ports is ``1: DOWN``, and nothing can be
    sent by it.
    """
    return tuple(
        sorted({path.parts[-4] for path in folder.glob("*/ports/*/state") if _works(path)})
    )


def find_libfabric(root: Path = SYSTEM) -> tuple[str, ...]:
    """Names of the devices that NCCL uses by a plugin for libfabric alone: Slingshot's and AWS's.

    Slingshot's are cxi0, …, and their interfaces hsn0 or hsi0, …. Its first release has cards of
    InfiniBand, which need no plugin. AWS's EFA stands among InfiniBand's devices, but is none.
    """
    infiniband = find_infiniband(root / "class/infiniband")
    cards = sorted(path.name for path in root.glob("class/cxi/*"))
    cards += [each for each in infiniband if _find_driver(root, each) == "efa"]
    if not cards and not infiniband:
        cards = sorted(path.name for path in root.glob("class/net/hs[ni][0-9]*"))
    return tuple(cards)


def has_peer_memory(root: Path = SYSTEM) -> bool:
    """Whether a kernel module lets InfiniBand cards read the memory of NVIDIA's GPUs."""
    return any(True for each in PEER_MEMORY for _ in root.glob(f"{each}/version"))


def _find_driver(root: Path, device: str) -> str:
    return (root / "class/infiniband" / device / "device/driver").resolve().name


def _works(path: Path) -> bool:
    """Whether a port's state is ``4: ACTIVE``, or ``5: ACTIVE_DEFER``."""
    try:
        return path.read_text().partition(":")[2].strip().startswith("ACTIVE")
    except OSError:
        return False
