"""What a failure looks like to the user: its message, its exit code, whose fault it is."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType

from mpiddp.errors import (
    FAILURE,
    INTERRUPTED,
    OWN,
    PEER,
    REPEATED,
    SUCCESS,
    MpiddpError,
    PeerFailedError,
    PeerLostError,
)
from mpiddp.files import is_local
from mpiddp.wording import read_message

MOST_CAUSES = 10
PACKAGE = Path(__file__).parents[2]
CALLS = ("collective_calls.py", "collectives", "sync")
"""Where a collective call goes through."""
TORCH_CALLS = ("torch.distributed", "torch.autograd")
"""Torch's modules that make collective calls."""

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


def describe_error(
    error: BaseException,
    place: str,
    *,
    is_shared: bool,
    lost_peer: bool,
    hidden_files: Sequence[str],
) -> str:
    """The report of ``error``: one line for mistakes of the user's, else a traceback.

    Args:
        place: ``rank 1 of 4 on node002 at step 7: ``, or empty if nothing needs telling apart.
        is_shared: whether other processes belong to the job; a traceback is headed then.
        lost_peer: whether the error is another rank's end, as seen from here.
        hidden_files: source files whose frames are left out at the top of a traceback.
    """
    if isinstance(error, MpiddpError):
        return f"mpiddp: {place}{read_message(error)}{find_call(error.__traceback__)}\n"
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            return f"mpiddp: {place}{error.code}\n" if is_shared else f"{error.code}\n"
        return f"mpiddp: {place}ended with exit code {exit_code(error)}\n" if is_shared else ""
    if isinstance(error, KeyboardInterrupt):
        return f"mpiddp: {place}interrupted\n"
    if lost_peer:
        return f"mpiddp: {place}a peer is gone or has stopped: {read_message(error)}\n"
    lines = traceback.format_exception(
        type(error), error, visible_part(error.__traceback__, hidden_files)
    )
    return (f"mpiddp: {place}failed\n" if is_shared else "") + "".join(lines)


def find_call(trace: TracebackType | None) -> str:
    """Where the program made the call that failed: `` (called at train.py:12)``.

    The nearest frame outside of mpiddp and torch, if it called a collective of mpiddp or torch, or
    a backward pass; empty for an error of anything else.
    """
    place, is_call = "", False
    while trace is not None:
        name, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        path, module = Path(name), str(trace.tb_frame.f_globals.get("__name__"))
        if PACKAGE in path.parents:
            is_call = is_call or path.relative_to(PACKAGE).parts[0] in CALLS
        elif module.partition(".")[0] == "torch":
            is_call = is_call or module.startswith(TORCH_CALLS)
        elif not name.startswith("<frozen"):
            place, is_call = f" (called at {name}:{line})", False
        trace = trace.tb_next
    return place if is_call else ""


def has_trace(error: BaseException) -> bool:
    """Whether plain Python would show a traceback."""
    return not isinstance(error, MpiddpError | SystemExit)


def has_own_hook() -> bool:
    """Whether the script shows its exceptions itself.

    The hook that torch sets in init_process_group() does not count: it adds the rank to each
    line, which the report says once. Nor does that of mpiddp.init(): it makes the same report.
    """
    hook = getattr(sys, "excepthook", sys.__excepthook__)
    home = getattr(hook, "__module__", None) or ""
    return hook is not sys.__excepthook__ and not home.startswith(("torch.", "mpiddp."))


def exit_code(error: BaseException) -> int:
    """The exit code of ``error`` by its type (`mpiddp.errors`)."""
    if isinstance(error, MpiddpError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code is None:
            return SUCCESS
        return error.code & 0xFF if isinstance(error.code, int) else FAILURE
    return FAILURE


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
    found: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if found is None:
            break
        is_mpi = type(found).__module__ == "mpi4py.MPI"
        if isinstance(found, PeerFailedError):
            return REPEATED
        if is_mpi or isinstance(found, PeerLostError) or is_peer_loss(found):
            return PEER
        found = found.__cause__ or found.__context__
    return OWN


def find_node_fault(error: BaseException) -> str | None:
    """What is wrong with this machine, if ``error`` is a fault of one; None if it is not.

    Another machine could run the same script. A full disk is a fault if it is this machine's own.
    """
    found: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if found is None:
            break
        text = read_message(found) if _is_of_library(found) else ""
        for pattern, meaning in NODE_FAULTS.items():
            if re.search(pattern, text):
                return meaning
        # A data worker's error is part of a text.
        for match in _DISK_FAULT.finditer(text):
            if is_local(Path(match["path"])):
                return f"the machine's own disk is full, or has failed ({match['path']})"
        hidden = found.__suppress_context__  # ``raise … from None``: the script knows better.
        found = found.__cause__ or (None if hidden else found.__context__)
    return None


def _is_of_library(error: BaseException) -> bool:
    """Whether torch, NCCL, NVML or a file may have raised it: a ValueError holds the script's own
    text."""
    return isinstance(error, RuntimeError | OSError) or type(error).__module__ == "pynvml"


def _is_one(error: BaseException, module: ModuleType | None, name: str) -> bool:
    kind = getattr(module, name, None)
    return kind is not None and isinstance(error, kind)


def visible_part(trace: TracebackType | None, hidden_files: Sequence[str]) -> TracebackType | None:
    """The traceback without the leading frames of the files that only carried the call."""
    while trace is not None and trace.tb_frame.f_code.co_filename in hidden_files:
        trace = trace.tb_next
    return trace
