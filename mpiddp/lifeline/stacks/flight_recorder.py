"""The last collectives of this rank, from torch's flight recorder and from mpiddp's own records."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpiddp import torch_internals
from mpiddp.lifeline.stacks.recorded_call import RecordedCall
from mpiddp.torch_internals import find_implementation, find_recorder, list_groups, list_members

KEPT = 8
"""Collectives of a group that are told to the companion. The first that is not complete may have
more after it."""
DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""What reads the recorder, of Gloo and of NCCL."""
TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool",
}  # fmt: skip
"""torch's names of types, by the recorder's."""


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


def read_record() -> list[RecordedCall]:
    """The last collectives in each group, KEPT at most, and all that are not complete.

    Of mpiddp's groups; and of Gloo's and NCCL's, unless TORCH_FR_BUFFER_SIZE is 0.
    """
    found = [call for group in list_groups() for call in _read_own(group)]
    for name in DUMPS:
        dump = find_recorder(name)
        if dump is not None:
            # Without stacks: to find their lines takes torch two seconds the first time.
            with contextlib.suppress(Exception):  # Whatever it is in some release.
                found += _read_entries(pickle.loads(dump(True, False))["entries"])
    return _shorten(found)


def _read_own(group: Any) -> list[RecordedCall]:
    # A group may be closed meanwhile, and stacks change. This thread must hear of the job's end.
    with contextlib.suppress(Exception):
        part = find_implementation(group, "list_calls")
        return [] if part is None else [RecordedCall(**row) for row in part.list_calls()]
    return []


def _read_entries(entries: Sequence[Mapping[str, Any]]) -> list[RecordedCall]:
    groups = {group.group_name: list_members(group) for group in list_groups()}
    now = time.time_ns()
    return [_read_entry(each, groups.get(each["process_group"][0], ()), now) for each in entries]


def _read_entry(entry: Mapping[str, Any], members: Sequence[int], now: int) -> RecordedCall:
    backend, _, name = entry["profiling_name"].partition(":")
    types = dict.fromkeys(TYPES.get(each, each) for each in entry["input_dtypes"])
    return RecordedCall(
        backend=backend,
        group=entry["process_group"][0],
        number=entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
        is_message=entry["is_p2p"],
        name=name,
        shapes=entry["input_sizes"],
        type=", ".join(types),
        is_complete=entry["retired"] or entry["state"] == "completed",
        seconds=(now - entry["time_created_ns"]) / 1e9,
        members=members,
    )


def _shorten(calls: Iterable[RecordedCall]) -> list[RecordedCall]:
    groups: dict[object, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        groups[call.key, call.is_message].append(call)
    found = []
    for each in groups.values():
        first = next((at for at, call in enumerate(each) if not call.is_complete), len(each))
        found += each[max(0, min(first, len(each)) - KEPT) : first + KEPT]
    return found
