"""The collective call that this process is in, found on its stacks: the call notes nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from mpiddp.launch.mpi import pauses

HERE = Path(__file__).parent
COMMUNICATOR = str(HERE / "communicator.py")
MAKERS = ("make", "make_call")
"""The functions there that make a call."""
PUBLIC = str(HERE.parent / "collective_calls.py")
"""The functions there have the names of the calls."""
OUTER_FRAMES = 3
"""How far outside of the maker the request is."""


def describe_present_call(communicator: Any) -> dict[str, Any]:
    """Name, shapes and type of the call that a communicator makes, and for how many seconds it has
    waited; empty for none."""
    for frame in sys._current_frames().values():
        found = _search(frame, communicator)
        if found:
            return found
    return {}


def _search(frame: FrameType | None, communicator: Any) -> dict[str, Any]:
    remaining = None
    while frame is not None:
        code = frame.f_code
        if code is pauses.wait_until.__code__:
            remaining = frame.f_locals["seconds"]
        is_maker = code.co_filename == COMMUNICATOR and code.co_name in MAKERS
        if is_maker and (found := frame.f_locals)["self"] is communicator:
            tensor = found["tensor"]
            waited = None if remaining is None else found["self"].waiter.seconds - remaining
            return {
                "name": _find_name(frame),
                "shapes": [list(tensor.shape)],
                "type": str(tensor.dtype).removeprefix("torch."),
                "seconds": waited,
            }
        frame = frame.f_back
    return {}


def _find_name(frame: FrameType | None) -> str:
    for _ in range(OUTER_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_filename == PUBLIC:
            return frame.f_code.co_name
        if frame.f_code.co_filename == COMMUNICATOR and "request" in frame.f_locals:
            return str(frame.f_locals["request"].kind.value).replace("-", "_")
        frame = frame.f_back
    return ""
