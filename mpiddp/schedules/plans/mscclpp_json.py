"""Reads MSCCL++'s execution plans in JSON, as its executor takes them.

What an operation does is taken from the executor (``src/core/include/execution_kernel.hpp``). Ranks
write to each other's memory; signals, semaphores, barriers and packets order them. A packet carries
a flag, so that who reads it waits for it. Chunks are cut where thread blocks share an operation,
and where operations are pipelined, so that several rounds of a pipeline are followed.

Two things are left to the executor: that a put through a port has read its source when a signal
follows it, and that relaxed signals are only used where no data passes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.plans.mscclpp_order import Key, Move, link
from mpiddp.schedules.plans.plan import Buffer, Operation, Plan, Promise, Span

PROMISES = {
    "allreduce": Promise.ALL_REDUCE,
    "allgather": Promise.ALL_GATHER,
    "reducescatter": Promise.REDUCE_SCATTER,
    "alltoall": Promise.ALL_TO_ALL,
}
ROUNDS = 2
"""Rounds of a pipeline that are followed, beyond those in which its scratch memory is new."""
SCRATCH_BYTES = 1 << 26
"""Of the executor (PREDFINED_SCRATCH_SIZE): what ``reuse_resources`` takes again."""
FIELDS = {
    "plan": {
        "name", "collective", "protocol", "inplace", "reuse_resources", "gpus",
        "num_threads_per_block", "use_double_scratch_buffer", "buffer_alignment",
        "min_message_size", "max_message_size",
    },
    "gpu": {
        "id", "input_chunks", "output_chunks", "scratch_chunks", "threadblocks", "channels",
        "remote_buffers", "semaphores",
    },
    "threadblock": {"id", "ops", "channels", "remote_buffer_refs"},
    "operation": {
        "name", "src_buff", "dst_buff", "channel_ids", "channel_type", "reduce_op", "tbg_info",
        "barrier_id", "num_threadblocks", "semaphore_ids", "iter_context", "ops",
    },
}  # fmt: skip
COPIES = {"put", "pws", "pwsf", "get", "copy", "ppkt", "cpkt", "upkt", "gstore", "gstorepkt"}
"""Each source to the destination in the same place."""
SUMS = {"re", "res", "rre", "rres", "respkt", "repkt", "recpkt", "recspkt", "glres"}
"""All sources added, the first one last if the others are packets."""
SPREADS = {"rppkt"}
"""One source to all destinations."""
SIGNALS, WAITS = {"signal", "rlxsignal", "pws", "pwsf"}, {"wait", "rlxwait"}
TAKES_PACKETS = {"upkt", "rppkt", "gstorepkt"}
"""Those whose source is a packet; of a sum with packets all but the first are."""
SUMS_PACKETS = {"respkt", "repkt", "recpkt", "recspkt"}
MAKES_PACKETS = {"ppkt": 0, "rppkt": 0, "cpkt": 0, "gstorepkt": 0, "respkt": 1, "recpkt": 1,
                 "recspkt": 1}  # fmt: skip
"""The first destination that gets packets, and all after it."""
NOTHING = {"nop", "flush"}
KNOWN = (
    COPIES | SUMS | SPREADS | SIGNALS | WAITS | NOTHING
    | {"barrier", "sem_acquire", "sem_release", "pipeline"}
)  # fmt: skip


def read_json(path: Path) -> list[Plan]:
    """The plan.

    Raises ConfigurationError for a file that is no such plan, or has fields that are not known;
    ScheduleError for one that could never end.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"expected MSCCL++'s JSON: {error}") from None
    try:
        return [read_content(content)]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"expected MSCCL++'s execution plan: {type(error).__name__}: {error}"
        ) from None


def read_content(content: Mapping[str, Any]) -> Plan:
    """The plan of a parsed file; as ``read_json``."""
    _check_fields(content, "plan")
    promise = PROMISES.get(content["collective"])
    if promise is None:
        raise ConfigurationError(
            f"collective {content['collective']!r}: what it promises is not known; expected "
            f"{', '.join(PROMISES)}"
        )
    gpus = sorted(content["gpus"], key=lambda gpu: int(gpu["id"]))
    ranks, rounds = len(gpus), _find_rounds(content, gpus)
    parts = _find_parts(gpus) * max(rounds, 1)
    if [gpu["id"] for gpu in gpus] != list(range(ranks)):
        raise ConfigurationError(f"expected one gpu for each of {ranks} ranks")
    chunks = _find_chunks(gpus[0], promise, ranks) * parts
    ends = promise.count_chunks(chunks, ranks)
    sizes = tuple((*ends, gpu["scratch_chunks"] * parts) for gpu in gpus)
    moves = [
        move
        for gpu in gpus
        for move in _Reader(gpu, gpus, parts, rounds, bool(content.get("reuse_resources"))).read()
    ]
    return Plan(
        content["name"], promise, ranks, chunks, bool(content["inplace"]), sizes, link(moves),
        parts=parts, scratches=1 + bool(content.get("use_double_scratch_buffer")),
    )  # fmt: skip


def _check_fields(values: Mapping[str, Any], what: str) -> None:
    if unknown := sorted(values.keys() - FIELDS[what]):
        raise ConfigurationError(f"{what} has fields that are not known: {', '.join(unknown)}")


def _find_chunks(gpu: Mapping[str, Any], promise: Promise, ranks: int) -> int:
    inputs, outputs = gpu["input_chunks"], gpu["output_chunks"]
    if promise is Promise.ALL_GATHER:
        return int(outputs or inputs * ranks)
    return int(inputs or outputs * (ranks if promise is Promise.REDUCE_SCATTER else 1))


def _list_operations(gpus: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for gpu in gpus:
        for block in gpu["threadblocks"]:
            for operation in block["ops"]:
                yield operation
                yield from operation.get("ops", ())


def _find_parts(gpus: Sequence[Mapping[str, Any]]) -> int:
    """Into how many parts a chunk is cut."""
    parts = 1
    for operation in _list_operations(gpus):
        _check_fields(operation, "operation")
        if operation["name"] not in KNOWN:
            raise ConfigurationError(f"operation {operation['name']!r} is not known")
        if operation.get("reduce_op", "sum") != "sum":
            raise ConfigurationError(f"reduce_op {operation['reduce_op']!r}: expected sum")
        if "tbg_info" in operation:
            parts = math.lcm(parts, operation["tbg_info"]["tbg_size"])
    return parts


def _find_rounds(content: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> int:
    """How many rounds of its pipelines are followed; 0 if it has none.

    With ``reuse_resources`` enough that scratch memory is used again.
    """
    units = [each["iter_context"]["unit_size"] for each in _list_operations(gpus) if "ops" in each]
    if not units:
        return 0
    scratch = gpus[0]["scratch_chunks"]
    is_reused = content.get("reuse_resources") and scratch
    return ROUNDS + (SCRATCH_BYTES // scratch // min(units) if is_reused else 0)


# ---- what each operation does -------------------------------------------------------------


class _Sides(NamedTuple):
    sources: list[list[Span]]
    """Each a chunk on one rank, or on all ranks of a switch."""
    targets: list[list[Span]]


@dataclass
class _Reader:
    """One rank's operations."""

    gpu: Mapping[str, Any]
    gpus: Sequence[Mapping[str, Any]]
    parts: int
    rounds: int
    reuses_scratch: bool
    _counts: dict[Key, int] = field(default_factory=lambda: defaultdict(int))

    def read(self) -> Iterator[Move]:
        _check_fields(self.gpu, "gpu")
        for block in sorted(self.gpu["threadblocks"], key=lambda block: int(block["id"])):
            _check_fields(block, "threadblock")
            yield from self._read_block(block)

    def _read_block(self, block: Mapping[str, Any]) -> Iterator[Move]:
        waited, moved = "", ""
        for step, values in enumerate(block["ops"]):
            rounds: list[tuple[Mapping[str, Any], int | None]] = [(values, None)]
            if "ops" in values:
                rounds = [(each, part) for part in range(self.rounds) for each in values["ops"]]
            for each, part in rounds:
                name = each["name"]
                where = f"rank {self.gpu['id']}, thread block {block['id']}, step {step} ({name})"
                if name in ("nop", "barrier"):
                    waited, moved = "", ""
                elif waited and (each.get("src_buff") or name in SIGNALS | {"sem_release"}):
                    raise ScheduleError(f"race: {where} follows {waited} without a nop between")
                elif moved and name in {"signal", "rlxsignal", "sem_release"}:
                    raise ScheduleError(f"race: {where} follows {moved} without a nop between")
                if name in WAITS | {"sem_acquire"}:
                    waited = name
                elif each.get("dst_buff"):
                    moved = name
                yield from self._read_operation(block, step, each, part)

    def _read_operation(
        self, block: Mapping[str, Any], step: int, values: Mapping[str, Any], part: int | None
    ) -> Iterator[Move]:
        name, rank = values["name"], self.gpu["id"]
        bare = Operation(rank, block["id"], step, name)
        for sources, targets in self._list_moves(values, self._find_sides(block, values, part)):
            first = MAKES_PACKETS.get(name)
            taken = sources if name in TAKES_PACKETS else ()
            if name in SUMS_PACKETS:
                taken, sources = sources[1:], [*sources[1:], sources[0]]
            made = [] if first is None else targets[first:]
            yield Move(
                replace(bare, reads=_flatten(sources), writes=_flatten(targets)),
                makes_packets=_flatten(made), takes_packets=_flatten(taken),
            )  # fmt: skip
        signals, waits = self._find_signals(block, values)
        if name == "barrier":
            key = ("barrier", rank, values["barrier_id"])
            place = self._count((*key, block["id"]))
            yield Move(bare, signals=((*key, place, block["id"]),))
            waits = ((*key, place, values["num_threadblocks"]),)
        if signals or waits:
            yield Move(bare, signals=signals, waits=waits)

    def _count(self, key: Key) -> int:
        """How often it was counted before."""
        self._counts[key] += 1
        return self._counts[key] - 1

    def _list_moves(
        self, values: Mapping[str, Any], sides: _Sides
    ) -> Iterator[tuple[list[list[Span]], list[list[Span]]]]:
        name, (sources, targets) = values["name"], sides
        if name in COPIES:
            for source, target in zip(sources, targets, strict=True):
                # A rank's own packet is multicast to where it stands, too.
                yield [source], [[span for span in target if span not in source]]
        elif name in SUMS | SPREADS:
            yield sources, targets

    def _find_sides(
        self, block: Mapping[str, Any], values: Mapping[str, Any], part: int | None
    ) -> _Sides:
        found = []
        for side in ("src_buff", "dst_buff"):
            found.append(
                [
                    [
                        self._cut(Span(rank, buffer, 0, 0), chunk, values, part)
                        for rank, buffer in self._find_buffers(block, values, chunk)
                    ]
                    for chunk in values.get(side, ())
                ]
            )
        return _Sides(*found)

    def _find_buffers(
        self, block: Mapping[str, Any], values: Mapping[str, Any], chunk: Mapping[str, Any]
    ) -> list[tuple[int, Buffer]]:
        if "type" in chunk:
            return [(self.gpu["id"], Buffer(chunk["type"]))]
        kind = values["channel_type"]
        if "switch_channel_id" in chunk:
            channels = _list_of_kind(block["channels"], kind, "channel_ids")
            groups = [
                (Buffer(channel.get("buffer_type") or channel["buff"]), group["ranks"])
                for channel in self.gpu["channels"]
                if channel["channel_type"] == kind
                for group in channel["rank_groups"]
            ]
            buffer, ranks = groups[channels[chunk["switch_channel_id"]]]
            return [(rank, buffer) for rank in ranks]
        references = _list_of_kind(block["remote_buffer_refs"], kind, "remote_buffer_ids")
        remote = self.gpu["remote_buffers"][references[chunk["buffer_id"]]]
        return [(remote["rank"], Buffer(remote["type"]))]

    def _cut(
        self, span: Span, chunk: Mapping[str, Any], values: Mapping[str, Any], part: int | None
    ) -> Span:
        """The cells of a chunk that this thread block has to do with in this round."""
        lo, hi = chunk["index"] * self.parts, (chunk["index"] + chunk["size"]) * self.parts
        if part is not None:
            piece = (hi - lo) // self.rounds
            is_reused = self.reuses_scratch and span.buffer is Buffer.SCRATCH
            lo += piece * (part % (self.rounds - ROUNDS) if is_reused else part)
            hi = lo + piece
        if "tbg_info" in values:
            share = (hi - lo) // values["tbg_info"]["tbg_size"]
            lo += share * values["tbg_info"]["tb_id"]
            hi = lo + share
        return span._replace(lo=lo, hi=hi)

    def _find_signals(
        self, block: Mapping[str, Any], values: Mapping[str, Any]
    ) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """What it signals, and what it waits for, each the first, second, … of its kind."""
        name, rank = values["name"], self.gpu["id"]
        keys: list[Key]
        if name in ("sem_acquire", "sem_release"):
            keys = [("semaphore", rank, number) for number in values["semaphore_ids"]]
            is_signal = name == "sem_release"
        elif name in SIGNALS | WAITS:
            kind, is_signal = values["channel_type"], name in SIGNALS
            keys = []
            channels = _list_of_kind(block["channels"], kind, "channel_ids")
            peers = _list_of_kind(self.gpu["channels"], kind, "connected_to")
            for place in values["channel_ids"]:
                number = channels[place]
                peer = peers[number]
                ends = (rank, peer) if is_signal else (peer, rank)
                keys.append((kind, *ends, peers[:number].count(peer)))
        else:
            return (), ()
        counted = []
        for key in keys:
            place = self._count((*key, is_signal))
            if key[0] == "semaphore" and not is_signal:
                # The first ones find it free.
                place -= self.gpu["semaphores"][key[2]]["init_value"]
            if place >= 0:
                counted.append((*key, place))
        return (tuple(counted), ()) if is_signal else ((), tuple(counted))


def _list_of_kind(rows: Sequence[Mapping[str, Any]], kind: str, values: str) -> list[int]:
    """The values of all rows whose channels are of a kind, in their order."""
    kinds = ("channel_type", "access_channel_type")
    return [value for row in rows if kind in map(row.get, kinds) for value in row[values]]


def _flatten(spans: Sequence[Sequence[Span]]) -> tuple[Span, ...]:
    return tuple(span for each in spans for span in each)
