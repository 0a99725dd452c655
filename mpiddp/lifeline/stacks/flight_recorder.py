"""What torch's flight recorder remembers of this rank's last collectives."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from mpiddp import torch_internals
from mpiddp.torch_internals import find_implementation, find_recorder, list_groups

SHOWN = 3
"""Collectives that are shown."""
DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""What reads the recorder, of Gloo and of NCCL."""


def read_calls() -> dict[str, list[int]]:
    """Numbers of the last collective that this rank has called, and of the last that is complete.

    By backend and name of the group, as ``gloo:0``. Collectives of a group are counted from 1,
    alike on all its ranks; messages between two ranks do not count. A group is missing if this rank
    has called none in it, or many later ones in other groups, and all are if the recorder is off.
    """
    found: dict[str, list[int]] = {}
    for name in DUMPS:
        dump = find_recorder(name)
        if dump is not None:
            with contextlib.suppress(Exception):  # Whatever it is in some release.
                found |= _find_calls(pickle.loads(dump(True, False))["entries"])
    return found


def _find_calls(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    newest: dict[str, int] = {}
    for entry in entries:
        if entry["is_p2p"]:
            continue
        group, number = entry["pg_id"], entry["collective_seq_id"]
        name = f"{entry['profiling_name'].partition(':')[0]}:{entry['process_group'][0]}"
        # A group that was closed may have had the same name.
        if newest.setdefault(name, group) != group:
            newest[name] = group
            found.pop(name, None)
        last, complete = found.get(name, (0, 0))
        found[name] = [max(last, number), max(complete, number if entry["retired"] else 0)]
    return found


def count_calls(*, is_own: bool = False) -> dict[str, int]:
    """How many calls this rank has made in each open group, by the group's name.

    Messages between two ranks count as well, so ranks may have different numbers; but not in
    groups of mpiddp's backend. ``is_own``: of those groups only.
    """
    found = {}
    with contextlib.suppress(Exception):  # Whatever it is in some release.
        for group in list_groups():
            if is_own and find_implementation(group, "list_calls") is None:
                continue
            found[group.group_name] = torch_internals.count_calls(group)
    return found


def has_broken_group() -> bool:
    """Whether a call of one of mpiddp's groups failed or was interrupted on this rank."""
    parts = [find_implementation(group, "is_broken") for group in list_groups()]
    return any(part.is_broken() for part in parts if part is not None)


def read_record() -> list[str]:
    """The last collectives, one line each: of mpiddp's groups, and of NCCL's.

    torch keeps those of NCCL unless TORCH_FR_BUFFER_SIZE is 0.
    """
    parts = [find_implementation(group, "list_calls") for group in list_groups()]
    own = [line for part in parts if part is not None for line in part.list_calls()]
    dump = find_recorder("_dump_nccl_trace")
    if dump is None:
        return own
    try:
        # What this very process has written.
        entries = pickle.loads(dump()).get("entries", [])
        return own + [_describe(entry) for entry in entries[-SHOWN:]]
    except Exception as error:  # Whatever it is in some release: the stacks are there without.
        return [*own, f"NCCL's flight recorder cannot be read: {type(error).__name__}: {error}"]


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
