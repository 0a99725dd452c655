"""What NCCL's flight recorder in torch remembers of this rank's last collectives."""

from __future__ import annotations

import pickle
import sys
from typing import Any

SHOWN = 3
"""Collectives that are shown."""


def read_record() -> list[str]:
    """The last collectives, one line each; empty without torch, NCCL, or the recorder.

    torch keeps them where TORCH_FR_BUFFER_SIZE, or TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.9,
    is above 0.
    """
    library = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(library, "_dump_nccl_trace", None)
    if dump is None:
        return []
    try:
        # What this very process has written.
        entries = pickle.loads(dump()).get("entries", [])
        return [_describe(entry) for entry in entries[-SHOWN:]]
    except Exception as error:  # Whatever it is in some release: the stacks are there without.
        return [f"NCCL's flight recorder cannot be read: {type(error).__name__}: {error}"]


def _describe(entry: dict[str, Any]) -> str:
    """``nccl:all_reduce 17 of group 0, started, sizes [[1024]]``."""
    number = entry.get("collective_seq_id")
    if entry.get("is_p2p"):
        number = entry.get("p2p_seq_id")
    group = entry.get("process_group") or ("?",)
    return (
        f"{entry.get('profiling_name')} {number} of group {group[0]}, {entry.get('state')}, "
        f"sizes {entry.get('input_sizes')}"
    )
