"""Where an error comes from: this rank, another one, or the machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mpiddp.errors import OWN, PEER, REPEATED, PeerFailedError, PeerLostError
from mpiddp.files import is_local
from mpiddp.wording import read_message

MOST_CAUSES = 10
# What torch.distributed says when the other side has gone or stopped, ...
_PEER_LOSS = re.compile(
    r"connection (closed|reset|refused|timed out)|connection was likely closed|broken pipe|"
    r"socket closed|no route to host|failed to (send|recv)|remote process exited|"
    r"timed out waiting|(operation|blocking wait|connect\w*) timed out|"
    r"timed out in blocking wait|before timing out|timeout(?!\(ms\)=)|"
    r"communicator was aborted|operation was cancelled",
    re.IGNORECASE,
)
# ... and how to tell that torch said it: anybody may raise a RuntimeError. The class
# DistBackendError says so as well; the NCCL of torch 2.15 does not always use it.
_TORCH = re.compile(
    r"gloo/transport|gloo::|Gloo connectFullMesh|Application timeout caused pair closure|"
    r"ProcessGroup(Gloo|NCCL)|WorkNCCL|NCCL (error|communicator|operation|Async Error)"
)
NODE_FAULTS = {
    r"uncorrectable ECC error": "a GPU's memory has an error that cannot be corrected",
    r"uncorrectable NVLink error": "a link between GPUs has an error that cannot be corrected",
    r"GPU (is lost|has fallen off the bus)": "a GPU no longer answers its driver",
    r"\bXid \(PCI:[^)]+\): (?!(13|31|43|45|68|69)\b)\d":
        "the driver has reported an error of a GPU (Xid)",
    r"(CUDA error|Error 802): system not yet initialized": "the GPUs' fabric manager is not ready",
    r"unsupported display driver / cuda driver combination": "the GPU's driver is half updated",
    r"IBV_EVENT_DEVICE_FATAL|local catastrophic error": "an InfiniBand adapter has failed",
    r"(ZE|UR)_RESULT_ERROR_DEVICE_(LOST|REQUIRES_RESET)|PI_ERROR_DEVICE_NOT_AVAILABLE":
        "a GPU is lost to its driver, or must be reset",
}  # fmt: skip
"""What errors say that belong to one machine, as a regular expression, and what they mean.

The words are those of cudaGetErrorString, hipGetErrorString, NVML, NCCL's log, and Level Zero's and
Unified Runtime's error codes. Not what a script can cause: HSA_STATUS_ERROR_EXCEPTION (an index out
of bounds, pytorch/pytorch#173791), and Xids 13, 31, 43, 45, 68 and 69 (NVIDIA's Xid catalog).
"""
_DISK_FAULT = re.compile(r"\[Errno (5|28)\] [^:\n]+: (?P<quote>['\"])(?P<path>/.+?)(?P=quote)")
"""As Python says that a file's disk has failed or is full (EIO, ENOSPC)."""


def is_peer_loss(error: BaseException) -> bool:
    """Whether torch.distributed says that another process is gone or silent."""
    if not isinstance(error, RuntimeError):
        return False
    distributed = sys.modules.get("torch.distributed")
    if _is_one(error, distributed, "DistNetworkError"):
        return True
    text = read_message(error)
    is_torch = _is_one(error, distributed, "DistBackendError") or _TORCH.search(text) is not None
    return is_torch and _PEER_LOSS.search(text) is not None


def find_origin(error: BaseException) -> str:
    """Where ``error`` comes from: OWN, PEER or REPEATED."""
    for found in _list_causes(error, sees_hidden=True):
        is_mpi = type(found).__module__ == "mpi4py.MPI"
        if isinstance(found, PeerFailedError):
            return REPEATED
        if is_mpi or isinstance(found, PeerLostError) or is_peer_loss(found):
            return PEER
    return OWN


def find_node_fault(error: BaseException) -> str | None:
    """What is wrong with this machine, if ``error`` is a fault of one; None if it is not.

    Another machine could run the same script. A full disk is a fault if it is this machine's own.
    """
    for found in _list_causes(error, sees_hidden=False):
        text = read_message(found) if _is_of_library(found) else ""
        for pattern, meaning in NODE_FAULTS.items():
            if re.search(pattern, text):
                return meaning
        # A data worker's error is part of a text.
        for match in _DISK_FAULT.finditer(text):
            if is_local(Path(match["path"])):
                return f"the machine's own disk is full, or has failed ({match['path']})"
    return None


def _is_of_library(error: BaseException) -> bool:
    """Whether torch, NCCL, NVML or a file may have raised it: a ValueError holds the script's own
    text."""
    return isinstance(error, RuntimeError | OSError) or type(error).__module__ == "pynvml"


def _list_causes(error: BaseException, *, sees_hidden: bool) -> Iterator[BaseException]:
    """An error, and what has led to it; ``sees_hidden``: also before a ``raise … from None``."""
    found: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if found is None:
            break
        yield found
        is_shown = sees_hidden or not found.__suppress_context__
        found = found.__cause__ or (found.__context__ if is_shown else None)


def _is_one(error: BaseException, module: ModuleType | None, name: str) -> bool:
    kind = getattr(module, name, None)
    return kind is not None and isinstance(error, kind)
