"""InfiniBand (or RoCE) devices of this host, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")


def find_infiniband(folder: Path = INFINIBAND) -> tuple[str, ...]:
    """Names of the devices that have an active port.

    A card without a cable is listed too: the state of its ports is ``1: DOWN``, and nothing can be
    sent by it.
    """
    return tuple(
        sorted({path.parts[-4] for path in folder.glob("*/ports/*/state") if _works(path)})
    )


def _works(path: Path) -> bool:
    """Whether a port's state is ``4: ACTIVE``, or ``5: ACTIVE_DEFER``."""
    try:
        return path.read_text().partition(":")[2].strip().startswith("ACTIVE")
    except OSError:
        return False
