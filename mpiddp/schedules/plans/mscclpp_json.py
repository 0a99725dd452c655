"""Reads MSCCL++'s execution plans in JSON, as its executor takes them.

What an operation does is taken from the executor (``src/core/include/execution_kernel.hpp``). Ranks
write to each other's memory; signals, semaphores, barriers and packets order them. A packet carries
a flag, so that who reads it waits for it. Chunks are cut where thread blocks share an operation,
and where operations are pipelined, so that several rounds of a pipeline are followed.

Two things are left to the executor: that a put through a port has read its source when a signal
follows it, and that relaxed signals are only used where no data passes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta, Struct

from mpiddp.errors import ConfigurationError, ContentError, ScheduleError
from mpiddp.files import convert, decode
from mpiddp.schedules.plans.mscclpp_order import Key, Move, link
from mpiddp.schedules.plans.plan import (
    MOST_BLOCKS,
    MOST_CHUNKS,
    MOST_OPERATIONS,
    MOST_RANKS,
    Buffer,
    Operation,
    Plan,
    Promise,
    Span,
)

T = TypeVar("T")

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
MOST_ROUNDS = 1 << 12
"""After which scratch memory is used again, at most."""
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


# ---- the file ------------------------------------------------------------------------------

Number = Annotated[int, Meta(ge=0, le=MOST_OPERATIONS)]
Count = Annotated[int, Meta(ge=0, le=MOST_CHUNKS)]


class _Chunk(Struct, frozen=True):
    index: Count
    size: Count
    type: Buffer | None = None
    buffer_id: Number | None = None
    switch_channel_id: Number | None = None


class _Cut(Struct, frozen=True):
    tb_id: Number
    tbg_size: Annotated[int, Meta(ge=1, le=MOST_BLOCKS)]


class _Iteration(Struct, frozen=True):
    unit_size: Annotated[int, Meta(ge=1)]


class _Plain(Struct, frozen=True, forbid_unknown_fields=True):
    """An operation."""

    name: str
    src_buff: tuple[_Chunk, ...] = ()
    dst_buff: tuple[_Chunk, ...] = ()
    channel_ids: tuple[Number, ...] = ()
    channel_type: str = ""
    reduce_op: str = "sum"
    tbg_info: _Cut | None = None
    barrier_id: Number | None = None
    num_threadblocks: Number = 0
    semaphore_ids: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in KNOWN:
            raise ContentError(f"operation {self.name!r} is not known")
        if self.reduce_op != "sum":
            raise ContentError(f"reduce_op {self.reduce_op!r}: expected sum")
        sides = len(self.src_buff), len(self.dst_buff)
        if (self.name in COPIES and sides[0] != sides[1]) or (
            self.name in SUMS | SPREADS and not all(sides)
        ):
            raise ContentError(f"{self.name} of {sides[0]} chunks to {sides[1]}")


class _Operation(_Plain, frozen=True, forbid_unknown_fields=True):
    """One that may be a pipeline of others."""

    iter_context: _Iteration | None = None
    ops: tuple[_Plain, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ops and self.iter_context is None:
            raise ContentError("a pipeline lacks iter_context")


class _OfBlock(Struct, frozen=True):
    """Which of the rank's channels, or remote buffers, of a kind a thread block uses."""

    channel_type: str = ""
    access_channel_type: str = ""
    channel_ids: tuple[Number, ...] = ()
    remote_buffer_ids: tuple[Number, ...] = ()


class _Group(Struct, frozen=True):
    ranks: tuple[Number, ...]


class _Channels(Struct, frozen=True):
    channel_type: str
    connected_to: tuple[Number, ...] = ()
    buffer_type: Buffer | None = None
    buff: Buffer | None = None
    rank_groups: tuple[_Group, ...] = ()


class _Remote(Struct, frozen=True):
    rank: Number
    type: Buffer


class _Semaphore(Struct, frozen=True):
    init_value: Number


class _ThreadBlock(Struct, frozen=True, forbid_unknown_fields=True):
    id: Number
    ops: tuple[_Operation, ...]
    channels: tuple[_OfBlock, ...] = ()
    remote_buffer_refs: tuple[_OfBlock, ...] = ()


class _Rank(Struct, frozen=True, forbid_unknown_fields=True):
    id: Number
    input_chunks: Count
    output_chunks: Count
    scratch_chunks: Count
    threadblocks: tuple[_ThreadBlock, ...]
    channels: tuple[_Channels, ...] = ()
    remote_buffers: tuple[_Remote, ...] = ()
    semaphores: tuple[_Semaphore, ...] = ()


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    collective: str
    inplace: bool
    gpus: Annotated[tuple[_Rank, ...], Meta(min_length=1, max_length=MOST_RANKS)]
    reuse_resources: bool = False
    use_double_scratch_buffer: bool = False
    # When and how broadly it runs, and not what it does.
    protocol: Any = None
    num_threads_per_block: Any = None
    buffer_alignment: Any = None
    min_message_size: Any = None
    max_message_size: Any = None


def read_json(data: bytes) -> list[Plan]:
    """The plan.

    Raises ConfigurationError for a file that is no such plan, or has fields that are not known;
    ScheduleError for one that could never end.
    """
    return [read_content(decode(data, dict))]


def read_content(content: Mapping[str, Any]) -> Plan:
    """The plan of a parsed file; as ``read_json``."""
    file = convert(content, _File)
    promise = PROMISES.get(file.collective)
    if promise is None:
        raise ConfigurationError(
            f"collective {file.collective!r}: what it promises is not known; expected "
            f"{', '.join(PROMISES)}"
        )
    gpus = sorted(file.gpus, key=lambda gpu: gpu.id)
    ranks, rounds = len(gpus), _find_rounds(file, gpus)
    if [gpu.id for gpu in gpus] != list(range(ranks)):
        raise ConfigurationError(f"expected one gpu for each of {ranks} ranks")
    parts = _find_parts(gpus) * max(rounds, 1)
    chunks = _find_chunks(gpus[0], promise, ranks) * parts
    ends = promise.count_chunks(chunks, ranks)
    moves = [
        move
        for gpu in gpus
        for move in _Reader(gpu, gpus, parts, rounds, file.reuse_resources).read()
    ]
    plan = Plan(
        file.name, promise, ranks, chunks, file.inplace,
        tuple((*ends, gpu.scratch_chunks * parts) for gpu in gpus),
        tuple(move.operation for move in moves),
        parts=parts, scratches=1 + file.use_double_scratch_buffer,
    )  # fmt: skip
    return replace(plan, operations=link(moves))


def _find_chunks(gpu: _Rank, promise: Promise, ranks: int) -> int:
    inputs, outputs = gpu.input_chunks, gpu.output_chunks
    if promise is Promise.ALL_GATHER:
        return outputs or inputs * ranks
    return inputs or outputs * (ranks if promise is Promise.REDUCE_SCATTER else 1)


def _list_operations(gpus: Sequence[_Rank]) -> Iterator[_Plain]:
    for gpu in gpus:
        for block in gpu.threadblocks:
            for operation in block.ops:
                yield operation
                yield from operation.ops


def _find_parts(gpus: Sequence[_Rank]) -> int:
    """Into how many parts a chunk is cut."""
    parts = 1
    for operation in _list_operations(gpus):
        if operation.tbg_info is not None:
            parts = math.lcm(parts, operation.tbg_info.tbg_size)
        if parts > MOST_CHUNKS:
            raise ConfigurationError(f"expected at most {MOST_CHUNKS:,} parts of a chunk")
    return parts


def _find_rounds(file: _File, gpus: Sequence[_Rank]) -> int:
    """How many rounds of its pipelines are followed; 0 if it has none.

    With ``reuse_resources`` enough that scratch memory is used again.
    """
    operations = [each for gpu in gpus for block in gpu.threadblocks for each in block.ops]
    units = [each.iter_context.unit_size for each in operations if each.ops and each.iter_context]
    if not units:
        return 0
    scratch = gpus[0].scratch_chunks
    reused = SCRATCH_BYTES // scratch // min(units) if file.reuse_resources and scratch else 0
    count = sum(len(each.ops) for each in operations) * (ROUNDS + reused)
    if reused > MOST_ROUNDS or count > MOST_OPERATIONS:
        raise ConfigurationError(
            f"scratch memory of {scratch} chunks with a unit_size of {min(units)} is used again "
            f"after {reused:,} rounds of {count:,} operations: expected at most {MOST_ROUNDS:,} "
            f"and {MOST_OPERATIONS:,}"
        )
    return ROUNDS + reused


# ---- what each operation does -------------------------------------------------------------


class _Sides(NamedTuple):
    sources: list[list[Span]]
    """Each a chunk on one rank, or on all ranks of a switch."""
    targets: list[list[Span]]


@dataclass
class _Reader:
    """One rank's operations."""

    gpu: _Rank
    gpus: Sequence[_Rank]
    parts: int
    rounds: int
    reuses_scratch: bool
    _counts: dict[Key, int] = field(default_factory=lambda: defaultdict(int))

    def read(self) -> Iterator[Move]:
        for block in sorted(self.gpu.threadblocks, key=lambda block: block.id):
            yield from self._read_block(block)

    def _read_block(self, block: _ThreadBlock) -> Iterator[Move]:
        waited, moved = "", ""
        for step, values in enumerate(block.ops):
            rounds: list[tuple[_Plain, int | None]] = [(values, None)]
            if values.ops:
                rounds = [(each, part) for part in range(self.rounds) for each in values.ops]
            for each, part in rounds:
                name = each.name
                where = f"rank {self.gpu.id}, thread block {block.id}, step {step} ({name})"
                if name in ("nop", "barrier"):
                    waited, moved = "", ""
                elif waited and (each.src_buff or name in SIGNALS | {"sem_release"}):
                    raise ScheduleError(f"race: {where} follows {waited} without a nop between")
                elif moved and name in {"signal", "rlxsignal", "sem_release"}:
                    raise ScheduleError(f"race: {where} follows {moved} without a nop between")
                if name in WAITS | {"sem_acquire"}:
                    waited = name
                elif each.dst_buff:
                    moved = name
                yield from self._read_operation(block, step, each, part)

    def _read_operation(
        self, block: _ThreadBlock, step: int, values: _Plain, part: int | None
    ) -> Iterator[Move]:
        name, rank = values.name, self.gpu.id
        bare = Operation(rank, block.id, step, name)
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
            key = ("barrier", rank, values.barrier_id)
            place = self._count((*key, block.id))
            yield Move(bare, signals=((*key, place, block.id),))
            waits = ((*key, place, values.num_threadblocks),)
        if signals or waits:
            yield Move(bare, signals=signals, waits=waits)

    def _count(self, key: Key) -> int:
        """How often it was counted before."""
        self._counts[key] += 1
        return self._counts[key] - 1

    def _list_moves(
        self, values: _Plain, sides: _Sides
    ) -> Iterator[tuple[list[list[Span]], list[list[Span]]]]:
        name, (sources, targets) = values.name, sides
        if name in COPIES:
            for source, target in zip(sources, targets, strict=True):
                # A rank's own packet is multicast to where it stands, too.
                yield [source], [[span for span in target if span not in source]]
        elif name in SUMS | SPREADS:
            yield sources, targets

    def _find_sides(self, block: _ThreadBlock, values: _Plain, part: int | None) -> _Sides:
        found = [
            [
                [
                    self._cut(Span(rank, buffer, 0, 0), chunk, values, part)
                    for rank, buffer in self._find_buffers(block, values, chunk)
                ]
                for chunk in side
            ]
            for side in (values.src_buff, values.dst_buff)
        ]
        return _Sides(*found)

    def _find_buffers(
        self, block: _ThreadBlock, values: _Plain, chunk: _Chunk
    ) -> list[tuple[int, Buffer]]:
        if chunk.type is not None:
            return [(self.gpu.id, chunk.type)]
        kind = values.channel_type
        if chunk.switch_channel_id is not None:
            channels = _list_of_kind(block.channels, kind, "channel_ids")
            groups = [
                (channel.buffer_type or channel.buff or Buffer.INPUT, group.ranks)
                for channel in self.gpu.channels
                if channel.channel_type == kind
                for group in channel.rank_groups
            ]
            number = _pick(channels, chunk.switch_channel_id, f"{kind} channel of the block")
            buffer, ranks = _pick(groups, number, f"group of {kind} channels")
            return [(rank, buffer) for rank in ranks]
        references = _list_of_kind(block.remote_buffer_refs, kind, "remote_buffer_ids")
        number = _pick(references, chunk.buffer_id, f"remote buffer over {kind} of the block")
        remote = _pick(self.gpu.remote_buffers, number, "remote buffer")
        return [(remote.rank, remote.type)]

    def _cut(self, span: Span, chunk: _Chunk, values: _Plain, part: int | None) -> Span:
        """The cells of a chunk that this thread block has to do with in this round."""
        lo, hi = chunk.index * self.parts, (chunk.index + chunk.size) * self.parts
        if part is not None:
            piece = (hi - lo) // self.rounds
            is_reused = self.reuses_scratch and span.buffer is Buffer.SCRATCH
            lo += piece * (part % (self.rounds - ROUNDS) if is_reused else part)
            hi = lo + piece
        if values.tbg_info is not None:
            share = (hi - lo) // values.tbg_info.tbg_size
            lo += share * values.tbg_info.tb_id
            hi = lo + share
        return span._replace(lo=lo, hi=hi)

    def _find_signals(
        self, block: _ThreadBlock, values: _Plain
    ) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """What it signals, and what it waits for, each the first, second, … of its kind."""
        name, rank = values.name, self.gpu.id
        keys: list[Key]
        if name in ("sem_acquire", "sem_release"):
            keys = [("semaphore", rank, number) for number in values.semaphore_ids]
            is_signal = name == "sem_release"
        elif name in SIGNALS | WAITS:
            kind, is_signal = values.channel_type, name in SIGNALS
            keys = []
            channels = _list_of_kind(block.channels, kind, "channel_ids")
            peers = _list_of_kind(self.gpu.channels, kind, "connected_to")
            for place in values.channel_ids:
                number = _pick(channels, place, f"{kind} channel of the block")
                peer = _pick(peers, number, f"{kind} channel")
                ends = (rank, peer) if is_signal else (peer, rank)
                keys.append((kind, *ends, peers[:number].count(peer)))
        else:
            return (), ()
        counted = []
        for key in keys:
            place = self._count((*key, is_signal))
            if key[0] == "semaphore" and not is_signal:
                # The first ones find it free.
                place -= _pick(self.gpu.semaphores, key[2], "semaphore").init_value
            if place >= 0:
                counted.append((*key, place))
        return (tuple(counted), ()) if is_signal else ((), tuple(counted))


def _list_of_kind(
    rows: Sequence[_OfBlock] | Sequence[_Channels], kind: str, values: str
) -> list[int]:
    """The values of all rows whose channels are of a kind, in their order."""
    return [
        value
        for row in rows
        if kind in (row.channel_type, getattr(row, "access_channel_type", None))
        for value in getattr(row, values)
    ]


def _pick(values: Sequence[T], place: int | None, what: str) -> T:
    if place is None or place >= len(values):
        raise ConfigurationError(f"expected one of {len(values)} {what}s, found number {place}")
    return values[place]


def _flatten(spans: Sequence[Sequence[Span]]) -> tuple[Span, ...]:
    return tuple(span for each in spans for span in each)
