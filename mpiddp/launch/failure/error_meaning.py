"""What a failure looks like to the user: its message, and its exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mpiddp.errors import FAILURE, INTERRUPTED, SUCCESS, MpiddpError
from mpiddp.wording import read_message

PACKAGE = Path(__file__).parents[2]
CALLS = ("collective_calls.py", "collectives", "sync")
"""Where a collective call goes through."""
TORCH_CALLS = ("torch.distributed", "torch.autograd")
"""Torch's modules that make collective calls."""


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


def visible_part(trace: TracebackType | None, hidden_files: Sequence[str]) -> TracebackType | None:
    """The traceback without the leading frames of the files that only carried the call."""
    while trace is not None and trace.tb_frame.f_code.co_filename in hidden_files:
        trace = trace.tb_next
    return trace
