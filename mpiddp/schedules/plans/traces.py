"""Writes a schedule for simulators of networks: GOAL for LogGOPSim, Chakra traces for ASTRA-sim.

Both describe messages by their size, and by what each must wait for. A rank sends and receives all
of a step at the same time, then adds what came in, and only then begins its next step.

GOAL: Hoefler, Siebert and Lumsdaine (ICPP'09); ``sim/LogGOPSim/txt2bin.re`` in spcl/atlahs. Chakra:
Sridharan et al. (2023); ``schema/protobuf/et_def.proto`` in mlcommons/chakra, one file per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mpiddp.schedules.schedule import Rounds, Schedule, Transfer, project

VERSION = "0.0.4"
"""Of Chakra's format."""
COMPUTE, SEND, RECEIVE = 4, 5, 6
"""Chakra's types of nodes."""


class Event(NamedTuple):
    """What one rank does, by number on that rank."""

    step: int
    transfer: Transfer | None
    """None for the additions of a step."""
    bytes: int
    after: tuple[int, ...]


def list_events(rank: int, rounds: Rounds, bounds: Sequence[int], item: int) -> list[Event]:
    """A rank's events in order; ``bounds`` has the chunks' first elements, of ``item`` bytes."""
    events: list[Event] = []
    before: tuple[int, ...] = ()
    for step, receives, sends in rounds:
        first, added = len(events), 0
        for transfer in (*receives, *sends):
            size = (bounds[transfer.hi] - bounds[transfer.lo]) * item
            if size:
                events.append(Event(step, transfer, size, before))
                added += size * (transfer.reduce and transfer.dst == rank)
        now = tuple(range(first, len(events)))
        if len(now) > 1 or added:
            # One event to wait for instead of all.
            events.append(Event(step, None, added, now))
            now = (len(events) - 1,)
        before = now or before
    return events


def write_goal(schedule: Schedule, count: int, item: int, addition: float) -> str:
    """The text; ``addition`` in seconds per byte. Sizes are bytes, ``calc`` is nanoseconds."""
    lines = [f"num_ranks {schedule.ranks}"]
    for rank, rounds in enumerate(project(schedule)):
        lines += ["", f"rank {rank} {{"]
        for number, event in enumerate(list_events(rank, rounds, schedule.bounds(count), item), 1):
            lines += _describe_goal(rank, number, event, addition)
        lines.append("}")
    return "\n".join(lines) + "\n"


def _describe_goal(rank: int, number: int, event: Event, addition: float) -> Iterator[str]:
    transfer = event.transfer
    if transfer is None:
        yield f"l{number}: calc {round(event.bytes * addition * 1e9)}"
    else:
        how = "added" if transfer.reduce else "copied"
        yield f"// step {event.step}: chunks {transfer.lo} to {transfer.hi} are {how}"
        is_send = transfer.src == rank
        end = f"to {transfer.dst}" if is_send else f"from {transfer.src}"
        verb = "send" if is_send else "recv"
        yield f"l{number}: {verb} {event.bytes}b {end} tag {event.step}"
    for cause in event.after:
        yield f"l{number} requires l{cause + 1}"


def write_chakra(schedule: Schedule, count: int, item: int, addition: float) -> list[bytes]:
    """The trace of each rank; ``addition`` in seconds per byte."""
    traces = []
    for rank, rounds in enumerate(project(schedule)):
        messages = [_encode_text(1, VERSION)]
        for number, event in enumerate(list_events(rank, rounds, schedule.bounds(count), item)):
            messages.append(_encode_node(rank, number, event, item, addition))
        traces.append(b"".join(_encode_number(len(each)) + each for each in messages))
    return traces


def _encode_node(rank: int, number: int, event: Event, item: int, addition: float) -> bytes:
    transfer = event.transfer
    fields = [_encode_field(1, number)]
    if transfer is None:
        attributes = [_encode_attribute("num_ops", 9, event.bytes // item)]
        microseconds = round(event.bytes * addition * 1e6)
        fields += [
            _encode_text(2, f"step {event.step}: add"), _encode_field(3, COMPUTE),
            _encode_list(5, event.after), _encode_field(7, microseconds),
        ]  # fmt: skip
    else:
        src, dst, lo, hi, reduce = transfer
        name = f"step {event.step}: {'added' if reduce else 'copied'} chunks {lo} to {hi}"
        kind = SEND if src == rank else RECEIVE
        attributes = [
            _encode_attribute("comm_src", 7, src), _encode_attribute("comm_dst", 7, dst),
            _encode_attribute("comm_tag", 7, event.step),
            _encode_attribute("comm_size", 9, event.bytes),
        ]  # fmt: skip
        fields += [_encode_text(2, name), _encode_field(3, kind), _encode_list(5, event.after)]
    attributes.append(_encode_attribute("is_cpu_op", 27, 0))
    return b"".join((*fields, *attributes))


# ---- protocol buffers ---------------------------------------------------------------------


def _encode_number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _encode_field(field: int, value: int) -> bytes:
    return _encode_number(field << 3) + _encode_number(value)


def _encode_bytes(field: int, value: bytes) -> bytes:
    return _encode_number(field << 3 | 2) + _encode_number(len(value)) + value


def _encode_text(field: int, text: str) -> bytes:
    return _encode_bytes(field, text.encode())


def _encode_list(field: int, values: Iterable[int]) -> bytes:
    packed = b"".join(map(_encode_number, values))
    return _encode_bytes(field, packed) if packed else b""


def _encode_attribute(name: str, field: int, value: int) -> bytes:
    """An AttributeProto in a node's field 10; 7 is an int32, 9 an int64, 27 a bool."""
    return _encode_bytes(10, _encode_text(1, name) + _encode_field(field, value))
