"""torchrun as a launcher: on one machine, and one for each node of a cluster."""

from __future__ import annotations

import os
import sys

from benchmarks.launching.launchers import BASELINES

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TORCHRUN_PER_NODE = str(BASELINES / "srun_torchrun.sh")


def choose_port() -> int:
    """A port for torchrun, which needs one.

    It is outside the range that the kernel hands out, and differs between processes that measure.
    """
    return 20000 + os.getpid() % 10000
