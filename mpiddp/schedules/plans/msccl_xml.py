"""Reads MSCCL's XML, the plans of microsoft/msccl, Azure/msccl and RCCL.

What a step does is taken from the interpreter (``src/collectives/device/msccl_interpreter.h``), not
from the compiler that wrote the plan: a step that receives and adds takes its own operand from
``srcbuf`` of its rank. A step waits until thread block ``depid`` has announced step ``deps`` or a
later one, and only steps with ``hasdep="1"`` announce themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


# ---- the steps of a rank -------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    rank: int
    block: int
    number: int
    kind: str
    source: Span
    target: Span
    waits: tuple[int, int] | None
    """Block and step."""
    announces: bool

    @property
    def count(self) -> int:
        return self.source.hi - self.source.lo

    def __str__(self) -> str:
        return f"rank {self.rank}, thread block {self.block}, step {self.number} ({self.kind})"


@dataclass(frozen=True)
class _Block:
    rank: int
    number: int
    sends_to: int
    receives_from: int
    channel: int
    steps: tuple[_Step, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}, thread block {self.number}"


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
    blocks = [block for gpu in gpus for block in _list_blocks(gpu, ranks)]
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


def _list_blocks(gpu: _Gpu, ranks: int) -> list[_Block]:
    found = []
    for tb in gpu.tb:
        steps = tuple(_make_step(each, gpu.id, tb.id) for each in tb.step)
        block = _Block(gpu.id, tb.id, tb.send, tb.recv, tb.chan, steps)
        if gpu.id in (tb.send, tb.recv) or max(tb.send, tb.recv) >= ranks:
            raise ScheduleError(
                f"{block}: a peer must be another of {ranks} ranks, found send={tb.send}, "
                f"recv={tb.recv}"
            )
        if [step.number for step in steps] != list(range(len(steps))):
            raise ScheduleError(f"{block}: its steps are not numbered 0 to {len(steps) - 1}")
        found.append(block)
    found.sort(key=lambda block: block.number)
    if [block.number for block in found] != list(range(len(found))):
        raise ScheduleError(
            f"rank {gpu.id}: its thread blocks are not numbered 0 to {len(found) - 1}"
        )
    return found


def _make_step(step: _StepElement, rank: int, block: int) -> _Step:
    source = Span(rank, step.srcbuf, step.srcoff, step.srcoff + step.cnt)
    target = Span(rank, step.dstbuf, step.dstoff, step.dstoff + step.cnt)
    waits = None if step.depid < 0 else (step.depid, step.deps)
    announces = step.hasdep == 1 and step.type != NOP
    return _Step(rank, block, step.s, step.type, source, target, waits, announces)


# ---- who waits for whom -------------------------------------------------------------------


def _link(blocks: Sequence[_Block]) -> tuple[Operation, ...]:
    places: dict[tuple[int, int, int], int] = {}
    for block in blocks:
        for step in block.steps:
            places[block.rank, block.number, step.number] = len(places)
    messages = _match_messages(blocks, places)
    announced = {
        (block.rank, block.number): [step.number for step in block.steps if step.announces]
        for block in blocks
    }
    operations: list[Operation] = []
    for block in blocks:
        for step in block.steps:
            kind = KINDS[step.kind]
            after: tuple[int, ...] = ()
            if step.waits is not None:
                other, least = step.waits
                numbers = announced.get((block.rank, other), [])
                place = bisect_left(numbers, least)
                if place == len(numbers):
                    raise ScheduleError(
                        f"deadlock: {step} waits for thread block {other}, step {least}, which "
                        "never says that it is done (hasdep=1)"
                    )
                after = (places[block.rank, other, numbers[place]],)
            sides = {"s": step.source, "d": step.target}
            operations.append(
                Operation(
                    block.rank, block.number, step.number, step.kind,
                    tuple(sides[side] for side in kind.reads),
                    (step.target,) if kind.writes else (),
                    messages.get(len(operations)), after,
                )
            )  # fmt: skip
    return tuple(operations)


def _match_messages(
    blocks: Sequence[_Block], places: Mapping[tuple[int, int, int], int]
) -> dict[int, int]:
    """For each receiving step the sending one: a connection keeps the order of its messages."""
    sent: dict[tuple[int, int, int], list[_Step]] = defaultdict(list)
    expected: dict[tuple[int, int, int], list[_Step]] = defaultdict(list)
    users: dict[tuple[bool, tuple[int, int, int]], _Block] = {}
    for block in blocks:
        for step in block.steps:
            kind = KINDS[step.kind]
            for is_send, needed, peer in (
                (True, kind.sends, block.sends_to),
                (False, kind.receives, block.receives_from),
            ):
                if not needed:
                    continue
                if peer < 0:
                    side = "to send to" if is_send else "to receive from"
                    raise ScheduleError(f"{step}: its thread block has no rank {side}")
                ends = (block.rank, peer) if is_send else (peer, block.rank)
                key = (*ends, block.channel)
                other = users.setdefault((is_send, key), block)
                if other is not block:
                    raise ScheduleError(
                        f"race: {other} and thread block {block.number} both use channel "
                        f"{block.channel} from rank {ends[0]} to rank {ends[1]}"
                    )
                (sent if is_send else expected)[key].append(step)
    found = {}
    for key in sorted(sent.keys() | expected.keys()):
        outgoing, incoming = sent[key], expected[key]
        for sender, receiver in zip(outgoing, incoming, strict=False):
            if sender.count != receiver.count:
                raise ScheduleError(
                    f"{sender} sends {sender.count} chunks, {receiver} expects {receiver.count}"
                )
            found[_find(places, receiver)] = _find(places, sender)
        _check_all_matched(key, outgoing, incoming)
    return found


def _find(places: Mapping[tuple[int, int, int], int], step: _Step) -> int:
    return places[step.rank, step.block, step.number]


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
