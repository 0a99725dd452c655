"""What a failure looks like to the user: its message, its exit code, whose fault it is."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from mpiddp.errors import FAILURE, SUCCESS, MpiddpError

INTERRUPTED = 130

# What Gloo, NCCL and the store say when the other side has gone or stopped, ...
_PEER_LOSS = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|failed to (send|recv)|"
    r"timed out waiting|remote process exited|timeout|aborted",
    re.IGNORECASE,
)
# ... and how it is told that they said it: anybody may raise a RuntimeError.
_SPEAKER = re.compile(
    r"gloo/transport|gloo::|ProcessGroup(Gloo|NCCL)|WorkNCCL|NCCL (error|communicator)"
)


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
        place: ``rank 1 of 4 on node002 at step 7: ``, or empty where nothing needs telling apart.
        is_shared: whether other processes belong to the job; a traceback is headed then.
        lost_peer: whether the error is another rank's end, as seen from here.
        hidden_files: source files whose frames are left out at the top of a traceback.
    """
    if isinstance(error, MpiddpError):
        return f"mpiddp: {place}{read_message(error)}\n"
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            return f"{error.code}\n"
        return f"mpiddp: {place}ended with exit code {exit_code(error)}\n" if is_shared else ""
    if isinstance(error, KeyboardInterrupt):
        return f"mpiddp: {place}interrupted\n"
    if lost_peer:
        return f"mpiddp: {place}a peer is gone or has stopped: {read_message(error)}\n"
    lines = traceback.format_exception(
        type(error), error, visible_part(error.__traceback__, hidden_files)
    )
    return (f"mpiddp: {place}failed\n" if is_shared else "") + "".join(lines)


def read_message(error: BaseException) -> str:
    """What ``error`` says of itself; that it cannot be read, where its ``__str__`` fails."""
    try:
        return str(error)
    except BaseException as problem:
        return f"its message cannot be read ({type(problem).__name__} in __str__)"


def has_trace(error: BaseException) -> bool:
    """Whether plain Python would show a traceback."""
    return not isinstance(error, MpiddpError | SystemExit)


def has_own_hook() -> bool:
    """Whether the script shows its exceptions itself.

    The hook that torch sets in init_process_group() is nobody's wish: it adds the rank to each
    line, which the report says once.
    """
    hook = getattr(sys, "excepthook", sys.__excepthook__)
    home = getattr(hook, "__module__", None) or ""
    return hook is not sys.__excepthook__ and not home.startswith("torch.")


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
    network_error = getattr(distributed, "DistNetworkError", None)
    if network_error is not None and isinstance(error, network_error):
        return True
    text = read_message(error)
    return _SPEAKER.search(text) is not None and _PEER_LOSS.search(text) is not None


def visible_part(trace: TracebackType | None, hidden_files: Sequence[str]) -> TracebackType | None:
    """The traceback without the leading frames of the files that only carried the call."""
    while trace is not None and trace.tb_frame.f_code.co_filename in hidden_files:
        trace = trace.tb_next
    return trace
