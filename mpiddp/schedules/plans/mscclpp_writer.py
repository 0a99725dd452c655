"""Writes an all-reduce as MSCCL++'s execution plan: one thread block a rank, memory channels.

In a step a rank puts what it sends into places of their own in its peers' scratch memory, signals,
waits for its own arrivals, and adds them in the order of the ranks. Calls take two scratch memories
in turn, since a peer's next call may come before this rank has added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpiddp.schedules.plans.msccl_writer import check_exportable, list_runs
from mpiddp.schedules.schedule import Round, Rounds, Schedule, Transfer, project

Chunk = dict[str, Any]
_NOP: Chunk = {"name": "nop"}


def write_json(schedule: Schedule, name: str) -> str:
    """Raises ConfigurationError unless it is an all-reduce of all ranks."""
    check_exportable(schedule)
    programs = project(schedule)
    places = [_place_arrivals(rounds) for rounds in programs]
    content = {
        "name": name,
        "collective": "allreduce",
        "protocol": "Simple",
        "inplace": True,
        "reuse_resources": False,
        "gpus": [
            _describe_rank(schedule, rank, rounds, places) for rank, rounds in enumerate(programs)
        ],
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": True,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": 2**64 - 1,
    }
    return json.dumps(content, indent=2) + "\n"


_Places = Mapping[tuple[int, Transfer], int]
"""For each step and arrival of a rank the first chunk of its scratch memory."""


def _place_arrivals(rounds: Rounds) -> _Places:
    found: dict[tuple[int, Transfer], int] = {}
    end = 0
    for step, receives, _ in rounds:
        for transfer in receives:
            found[step, transfer] = end
            end += transfer.hi - transfer.lo
    return found


def _describe_rank(
    schedule: Schedule, rank: int, rounds: Rounds, places: Sequence[_Places]
) -> dict[str, Any]:
    peers = sorted(
        {end for one in rounds for each in (*one.receives, *one.sends) for end in each[:2]} - {rank}
    )
    numbers = {peer: number for number, peer in enumerate(peers)}
    operations = [each for one in rounds for each in _describe_round(one, rank, numbers, places)]
    channels = list(numbers.values())
    block = {
        "id": 0,
        "ops": operations,
        "channels": [{"channel_type": "memory", "channel_ids": channels}],
        "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": channels}],
    }
    return {
        "id": rank,
        "input_chunks": schedule.chunks,
        "output_chunks": schedule.chunks,
        "scratch_chunks": sum(transfer.hi - transfer.lo for _, transfer in places[rank]),
        "threadblocks": [block],
        "channels": [{"channel_type": "memory", "connected_to": peers}],
        "remote_buffers": [
            {"rank": peer, "type": "s", "access_channel_types": ["memory"]} for peer in peers
        ],
        "semaphores": [],
    }


def _describe_round(
    one: Round, rank: int, numbers: Mapping[int, int], places: Sequence[_Places]
) -> list[Chunk]:
    found = []
    for transfer in one.sends:
        channel, count = numbers[transfer.dst], transfer.hi - transfer.lo
        place = places[transfer.dst][one.step, transfer]
        found.append(
            {
                "name": "put",
                "src_buff": [{"type": "i", "index": transfer.lo, "size": count}],
                "dst_buff": [{"buffer_id": channel, "index": place, "size": count}],
                "channel_ids": [channel],
                "channel_type": "memory",
            }
        )
    for name, ends in (
        ("signal", [transfer.dst for transfer in one.sends]),
        ("wait", [transfer.src for transfer in one.receives]),
    ):
        channels = sorted({numbers[end] for end in ends})
        if channels:
            signal = {"name": name, "channel_ids": channels, "channel_type": "memory"}
            found += [_NOP, signal]
    if one.receives:
        found += [_NOP, *_describe_arrivals(one, rank, places[rank])]
    return [*found, _NOP]


def _describe_arrivals(one: Round, rank: int, places: _Places) -> list[Chunk]:
    found = []
    for transfer in one.receives:
        if not transfer.reduce:
            count = transfer.hi - transfer.lo
            source = {"type": "s", "index": places[one.step, transfer], "size": count}
            target = {"type": "i", "index": transfer.lo, "size": count}
            found.append({"name": "copy", "src_buff": [source], "dst_buff": [target]})
    added = tuple(transfer for transfer in one.receives if transfer.reduce)
    for lo, count, transfers in list_runs(added):
        own = {"type": "i", "index": lo, "size": count}
        operands = [(rank, own)]
        for each in transfers:
            place = places[one.step, each] + lo - each.lo
            operands.append((each.src, {"type": "s", "index": place, "size": count}))
        operands.sort(key=lambda operand: operand[0])
        chunks = [chunk for _, chunk in operands]
        found.append({"name": "re", "src_buff": chunks, "dst_buff": [own], "reduce_op": "sum"})
    return found
