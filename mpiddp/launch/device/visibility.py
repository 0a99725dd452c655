"""GPUs that this process was given, found without torch, and why torch does not see them."""

from __future__ import annotations

import os
import re
import subprocess
import warnings
from pathlib import Path

from mpiddp import environment
from mpiddp.wording import count_noun

_GPU = re.compile(r"\d+|(GPU|MIG)-.+")
"""What names one in CUDA_VISIBLE_DEVICES; Slurm writes NoDevFiles, and people write none."""
DRIVER = Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """GPUs that this process may use: what CUDA_VISIBLE_DEVICES names, or else the driver has."""
    visible = os.environ.get(environment.CUDA_VISIBLE_DEVICES)
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # What follows one that does not exist is not used either.
        return next((at for at, name in enumerate(names) if not _GPU.fullmatch(name)), len(names))
    return _count_devices() or _ask_driver()


def explain_unseen() -> str:
    """Which GPUs this process was given although torch sees none, and why; empty if none were.

    Only for a process in which torch has counted no GPU: a driver that does not work is asked.
    """
    import torch

    hidden = os.environ.get(environment.CUDA_VISIBLE_DEVICES)
    count = _count_devices() if hidden is None else count_gpus()
    if hidden is None and not count:
        count = environment.read_count(environment.SLURM_GPUS_ON_NODE)
    if not count:
        return ""
    given = f"torch sees none of the {count_noun(count, 'GPU')} that this process was given"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"{given}: torch {torch.__version__} is built for CPUs alone; install its CUDA build"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    said = [str(each.message).split(" (Triggered internally")[0] for each in caught]
    return f"{given}: {said[0] if said else 'the driver does not say why; nvidia-smi may'}"


def _count_devices() -> int:
    """GPUs that the kernel's driver knows of."""
    try:
        return len(list(DRIVER.iterdir()))
    except OSError:
        return 0


def _ask_driver() -> int:
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
