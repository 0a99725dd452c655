"""``--debug``, and a debug level of torch's that ends ranks. docs/troubleshooting.md shows both."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping

from mpiddp import environment
from mpiddp.launch.launcher.launcher import is_first
from mpiddp.process.streams.console import write_console
from mpiddp.process.streams.output import buffer_lines
from mpiddp.torch_internals import lower_debug_level

SETTINGS: Mapping[str, str] = {
    environment.TORCH_DEBUG: "INFO",
    environment.TORCH_LOG_LEVEL: "INFO",
    environment.NCCL_DEBUG: "INFO",
    environment.NCCL_DEBUG_SUBSYSTEMS: "INIT,BOOTSTRAP,ENV,NET",
    environment.DEBUG: "1",
    environment.FAULT_HANDLER: "1",
    environment.UNBUFFERED: "1",
}
"""What only tells more. What changes how a job runs is the user's, such as CUDA_LAUNCH_BLOCKING."""


def begin() -> dict[str, str]:
    """Do what Python's variables would have done, and say what is set; to be called before torch is
    imported, which reads them.

    Returns the settings that the user has not made.
    """
    chosen = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    kept = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    if environment.FAULT_HANDLER in chosen:
        faulthandler.enable(2)  # Whatever sys.stderr is.
    if environment.UNBUFFERED in chosen:
        buffer_lines()
    if is_first():
        words = " ".join(f"{name}={value}" for name, value in chosen.items()) or "nothing"
        rest = f"; already set: {' '.join(kept)}" if kept else ""
        write_console(f"mpiddp: --debug sets {words}{rest}\n")
    return chosen


def lower_detail(backend: str, rank: int) -> dict[str, str]:
    """Lower torch's debug level to INFO if a DistributedDataParallel would end the process.

    With DETAIL torch wraps each group. Over Gloo the constructor takes the wrapper for Gloo's own
    object, and reads a pointer behind its end (logger.cpp, found in torch 2.10 to 2.15).

    Returns the variable as it must be, for processes that this one starts.
    """
    import torch

    is_kept = os.environ.get(environment.KEEP_DETAIL) not in (None, "", "0")
    if backend != "gloo" or is_kept or not lower_debug_level():
        return {}
    if rank == 0:
        write_console(
            f"mpiddp: {environment.TORCH_DEBUG}=DETAIL is lowered to INFO: torch "
            f"{torch.__version__} crashes (SIGSEGV) in DistributedDataParallel over Gloo; "
            f"{environment.KEEP_DETAIL}=1 keeps it, for a script without DistributedDataParallel\n"
        )
    return {environment.TORCH_DEBUG: "INFO"}
