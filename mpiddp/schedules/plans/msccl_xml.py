"""Reads MSCCL's XML, the plans of microsoft/msccl, Azure/msccl and RCCL.

What a step does is taken from the interpreter (``src/collectives/device/msccl_interpreter.h``), not
from the compiler that wrote the plan: a step that receives and adds takes its own operand from
``srcbuf`` of its rank. A step waits until thread block ``depid`` has announced step ``deps`` or a
later one, and only steps with ``hasdep="1"`` announce themselves.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from mpiddp.errors import ConfigurationError, ContentError, ScheduleError
from mpiddp.files import decode_xml
from mpiddp.schedules.plans.plan import (
    MOST_CHUNKS,
    MOST_OPERATIONS,
    MOST_RANKS,
    Buffer,
    Operation,
    Plan,
    Promise,
    Span,
)

PROMISES = {
    "allreduce": Promise.ALL_REDUCE,
    "allgather": Promise.ALL_GATHER,
    "reduce_scatter": Promise.REDUCE_SCATTER,
    "reducescatter": Promise.REDUCE_SCATTER,
    "alltoall": Promise.ALL_TO_ALL,
}
SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
"""Messages in a connection's buffer: NCCL_STEPS is 8, and a chunk of Simple takes four of them."""
NOP = "nop"


class StepKind(NamedTuple):
    """What a type of step does."""

    receives: bool = False
    reads: str = ""
    """``s`` for the source, ``d`` for the destination, in the order in which they are added."""
    writes: bool = False
    sends: bool = False


KINDS = {
    "s": StepKind(reads="s", sends=True),
    "r": StepKind(receives=True, writes=True),
    "rcs": StepKind(receives=True, writes=True, sends=True),
    "rrs": StepKind(receives=True, reads="s", sends=True),
    "rrc": StepKind(receives=True, reads="s", writes=True),
    "rrcs": StepKind(receives=True, reads="s", writes=True, sends=True),
    "cpy": StepKind(reads="s", writes=True),
    "re": StepKind(reads="ds", writes=True),
    NOP: StepKind(),
}


# ---- the elements --------------------------------------------------------------------------

Number = Annotated[int, Meta(ge=0, le=MOST_OPERATIONS)]
Count = Annotated[int, Meta(ge=0, le=MOST_CHUNKS)]
OrNone = Annotated[int, Meta(ge=-1, le=MOST_OPERATIONS)]
"""-1 for none."""


class _StepElement(Struct, frozen=True, forbid_unknown_fields=True):
    s: Number
    type: str
    srcbuf: Buffer
    srcoff: OrNone
    dstbuf: Buffer
    dstoff: OrNone
    cnt: Count
    depid: OrNone
    deps: OrNone
    hasdep: Number

    def __post_init__(self) -> None:
        if self.type not in KINDS:
            raise ContentError(
                f"type={self.type!r} of a step is not known: expected {', '.join(KINDS)}"
            )


class _BlockElement(Struct, frozen=True, forbid_unknown_fields=True):
    id: Number
    send: OrNone
    recv: OrNone
    chan: Number
    step: tuple[_StepElement, ...] = ()


class _Gpu(Struct, frozen=True, forbid_unknown_fields=True):
    id: Number
    i_chunks: Count
    o_chunks: Count
    s_chunks: Count
    tb: tuple[_BlockElement, ...] = ()


class _Algorithm(
    Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"min_bytes": "minBytes", "max_bytes": "maxBytes"},
):
    name: str
    proto: str
    nchunksperloop: Annotated[int, Meta(ge=1, le=MOST_CHUNKS)]
    ngpus: Annotated[int, Meta(ge=1, le=MOST_RANKS)]
    coll: str
    inplace: Number
    outofplace: Number = 0
    gpu: tuple[_Gpu, ...] = ()
    # When and how broadly it runs, and not what it does.
    nchannels: str = ""
    min_bytes: str = ""
    max_bytes: str = ""
    nthreads: str = ""
    maxcount: str = ""
    nthreadblocks: str = ""


@dataclass(frozen=True)
class _Step:
    operation: Operation
    """Without the message and the causes."""
    element: _StepElement
    place: int
    """Among all operations."""

    def __str__(self) -> str:
        return str(self.operation)


@dataclass(frozen=True)
class _Block:
    rank: int
    element: _BlockElement
    steps: tuple[_Step, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}, thread block {self.element.id}"


# ---- the steps of a rank -------------------------------------------------------------------


def read_xml(data: bytes) -> Iterator[Plan]:
    """The plan, in place and out of place if it is said to work both ways.

    Raises ConfigurationError for a file that is no such plan, or has fields that are not known;
    ScheduleError for one that the interpreter would refuse, or could never finish.
    """
    algo = decode_xml(data, "algo", _Algorithm)
    ranks, chunks = algo.ngpus, algo.nchunksperloop
    for name, known in (("coll", PROMISES), ("proto", SLOTS)):
        if (found := getattr(algo, name)) not in known:
            raise ConfigurationError(f"{name}={found!r} is not known: expected {', '.join(known)}")
    promise = PROMISES[algo.coll]
    if promise is not Promise.ALL_REDUCE and chunks % ranks:
        raise ConfigurationError(f"{chunks} chunks are not shared evenly by {ranks} ranks")
    gpus = sorted(algo.gpu, key=lambda gpu: gpu.id)
    if [gpu.id for gpu in gpus] != list(range(ranks)):
        raise ConfigurationError(f"expected one gpu element for each of {ranks} ranks")
    sizes = tuple(_find_sizes(gpu, promise, chunks, ranks) for gpu in gpus)
    blocks: list[_Block] = []
    places = itertools.count()
    for gpu in gpus:
        blocks += _list_blocks(gpu, ranks, places)
    operations = _link(blocks)
    for is_in_place in (True, False) if algo.inplace and algo.outofplace else (bool(algo.inplace),):
        yield Plan(
            algo.name, promise, ranks, chunks, is_in_place, sizes, operations,
            slots=SLOTS[algo.proto],
        )  # fmt: skip


def _find_sizes(gpu: _Gpu, promise: Promise, chunks: int, ranks: int) -> tuple[int, int, int]:
    inputs, outputs = promise.count_chunks(chunks, ranks)
    for name, found, expected in (
        ("i_chunks", gpu.i_chunks, inputs),
        ("o_chunks", gpu.o_chunks, outputs),
    ):
        if found not in (0, expected):
            raise ScheduleError(
                f"rank {gpu.id}: {name} is {found}, but {chunks} chunks on {ranks} ranks make "
                f"{expected}"
            )
    return inputs, outputs, gpu.s_chunks


def _list_blocks(gpu: _Gpu, ranks: int, places: Iterator[int]) -> list[_Block]:
    found = []
    for tb in sorted(gpu.tb, key=lambda tb: tb.id):
        steps = tuple(_Step(_make_operation(gpu.id, tb.id, e), e, next(places)) for e in tb.step)
        block = _Block(gpu.id, tb, steps)
        if gpu.id in (tb.send, tb.recv) or max(tb.send, tb.recv) >= ranks:
            raise ScheduleError(
                f"{block}: a peer must be another of {ranks} ranks, found send={tb.send}, "
                f"recv={tb.recv}"
            )
        if [each.s for each in tb.step] != list(range(len(steps))):
            raise ScheduleError(f"{block}: its steps are not numbered 0 to {len(steps) - 1}")
        found.append(block)
    if [block.element.id for block in found] != list(range(len(found))):
        raise ScheduleError(
            f"rank {gpu.id}: its thread blocks are not numbered 0 to {len(found) - 1}"
        )
    return found


def _make_operation(rank: int, block: int, step: _StepElement) -> Operation:
    kind = KINDS[step.type]
    source = Span(rank, step.srcbuf, step.srcoff, step.srcoff + step.cnt)
    target = Span(rank, step.dstbuf, step.dstoff, step.dstoff + step.cnt)
    reads = tuple({"s": source, "d": target}[side] for side in kind.reads)
    return Operation(rank, block, step.s, step.type, reads, (target,) if kind.writes else ())


# ---- who waits for whom -------------------------------------------------------------------


def _link(blocks: Sequence[_Block]) -> tuple[Operation, ...]:
    messages = _match_messages(blocks)
    announced = {
        (block.rank, block.element.id): [step for step in block.steps if _announces(step.element)]
        for block in blocks
    }
    operations: list[Operation] = []
    for block in blocks:
        for step in block.steps:
            other, least = step.element.depid, step.element.deps
            after: tuple[int, ...] = ()
            if other >= 0:
                causes = announced.get((block.rank, other), [])
                place = bisect_left(causes, least, key=lambda cause: cause.element.s)
                if place == len(causes):
                    raise ScheduleError(
                        f"deadlock: {step} waits for thread block {other}, step {least}, which "
                        "never says that it is done (hasdep=1)"
                    )
                after = (causes[place].place,)
            operations.append(
                replace(step.operation, message=messages.get(step.place), after=after)
            )
    return tuple(operations)


def _announces(step: _StepElement) -> bool:
    return step.hasdep == 1 and step.type != NOP


def _match_messages(blocks: Sequence[_Block]) -> dict[int, int]:
    """For each receiving step the sending one: a connection keeps the order of its messages."""
    sent: dict[tuple[int, int, int], list[_Step]] = defaultdict(list)
    expected: dict[tuple[int, int, int], list[_Step]] = defaultdict(list)
    users: dict[tuple[bool, tuple[int, int, int]], _Block] = {}
    for block in blocks:
        for step in block.steps:
            kind = KINDS[step.element.type]
            for is_send, needed, peer in (
                (True, kind.sends, block.element.send),
                (False, kind.receives, block.element.recv),
            ):
                if not needed:
                    continue
                if peer < 0:
                    side = "to send to" if is_send else "to receive from"
                    raise ScheduleError(f"{step}: its thread block has no rank {side}")
                ends = (block.rank, peer) if is_send else (peer, block.rank)
                key = (*ends, block.element.chan)
                other = users.setdefault((is_send, key), block)
                if other is not block:
                    raise ScheduleError(
                        f"race: {other} and thread block {block.element.id} both use channel "
                        f"{block.element.chan} from rank {ends[0]} to rank {ends[1]}"
                    )
                (sent if is_send else expected)[key].append(step)
    found = {}
    for key in sorted(sent.keys() | expected.keys()):
        outgoing, incoming = sent[key], expected[key]
        for sender, receiver in zip(outgoing, incoming, strict=False):
            counts = sender.element.cnt, receiver.element.cnt
            if counts[0] != counts[1]:
                raise ScheduleError(
                    f"{sender} sends {counts[0]} chunks, {receiver} expects {counts[1]}"
                )
            found[receiver.place] = sender.place
        _check_all_matched(key, outgoing, incoming)
    return found


def _check_all_matched(
    key: tuple[int, int, int], outgoing: Sequence[_Step], incoming: Sequence[_Step]
) -> None:
    source, target, channel = key
    if len(outgoing) > len(incoming):
        step = outgoing[len(incoming)]
        raise ScheduleError(f"{step}: nobody on rank {target} receives it (channel {channel})")
    if len(incoming) > len(outgoing):
        step = incoming[len(outgoing)]
        raise ScheduleError(
            f"deadlock: {step} waits for a message that rank {source} never sends (channel "
            f"{channel})"
        )
