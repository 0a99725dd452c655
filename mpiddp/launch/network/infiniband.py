"""Fast network cards of this host, and whether they read GPU memory: what /sys says."""

from __future__ import annotations

from pathlib import Path

SYSTEM = Path("/sys")
INFINIBAND = SYSTEM / "class/infiniband"
PEER_MEMORY = ("module/nvidia_peermem", "kernel/mm/memory_peers/nv_mem*")
"""Where NCCL looks for the module that lets a card read GPU memory (its src/transport/net_ib)."""


def find_infiniband(folder: Path = INFINIBAND) -> tuple[str, ...]:
    """Names of the InfiniBand (or RoCE) devices that have an active port."""
    return tuple(sorted(path.name for path in folder.glob("*") if has_active_port(path)))


def has_active_port(device: Path) -> bool:
    """Whether anything can be sent by a device of ``/sys/class/infiniband``.

    A card without a cable is listed too: the state of its ports is ``1: DOWN``.
    """
    return any(_works(path) for path in device.glob("ports/*/state"))


def has_peer_memory(root: Path = SYSTEM) -> bool:
    """Whether a kernel module lets InfiniBand cards read the memory of NVIDIA's GPUs."""
    return any(True for each in PEER_MEMORY for _ in root.glob(f"{each}/version"))


def _works(path: Path) -> bool:
    """Whether a port's state is ``4: ACTIVE``, or ``5: ACTIVE_DEFER``."""
    try:
        return path.read_text().partition(":")[2].strip().startswith("ACTIVE")
    except OSError:
        return False
