"""Reads MSCCL's XML, the plans of microsoft/msccl, Azure/msccl and RCCL.

What a step does is taken from the interpreter (``src/collectives/device/msccl_interpreter.h``), not
from the compiler that wrote the plan: a step that receives and adds takes its own operand from
``srcbuf`` of its rank. A step waits until thread block ``depid`` has announced step ``deps`` or a
later one, and only steps with ``hasdep="1"`` announce themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.plans.plan import Buffer, Operation, Plan, Promise, Span

PROMISES = {
    "allreduce": Promise.ALL_REDUCE,
    "allgather": Promise.ALL_GATHER,
    "reduce_scatter": Promise.REDUCE_SCATTER,
    "reducescatter": Promise.REDUCE_SCATTER,
    "alltoall": Promise.ALL_TO_ALL,
}
SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
"""Messages in a connection's buffer: NCCL_STEPS is 8, and a chunk of Simple takes four of them."""
IGNORED = {"nchannels", "minBytes", "maxBytes", "nthreads", "maxcount", "nthreadblocks"}
"""Of the algorithm: when and how broadly it runs, and not what it does."""
FIELDS = {
    "algo": {"name", "proto", "nchunksperloop", "ngpus", "coll", "inplace", "outofplace"} | IGNORED,
    "gpu": {"id", "i_chunks", "o_chunks", "s_chunks"},
    "tb": {"id", "send", "recv", "chan"},
    "step": {
        "s", "type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps", "hasdep",
    },
}  # fmt: skip
OPTIONAL = {"outofplace"} | IGNORED
NOP = "nop"


class Kind(NamedTuple):
    """What a type of step does."""

    receives: bool = False
    reads: str = ""
    """``s`` for the source, ``d`` for the destination, in the order in which they are added."""
    writes: bool = False
    sends: bool = False


KINDS = {
    "s": Kind(reads="s", sends=True),
    "r": Kind(receives=True, writes=True),
    "rcs": Kind(receives=True, writes=True, sends=True),
    "rrs": Kind(receives=True, reads="s", sends=True),
    "rrc": Kind(receives=True, reads="s", writes=True),
    "rrcs": Kind(receives=True, reads="s", writes=True, sends=True),
    "cpy": Kind(reads="s", writes=True),
    "re": Kind(reads="ds", writes=True),
    NOP: Kind(),
}


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


def read_xml(path: Path) -> list[Plan]:
    """The plan, in place and out of place if it is said to work both ways.

    Raises ConfigurationError for a file that is no such plan, or has fields that are not known;
    ScheduleError for one that the interpreter would refuse, or could never finish.
    """
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ConfigurationError(f"expected MSCCL's XML: {error}") from None
    return list(read_tree(root))


def read_tree(root: ElementTree.Element) -> Iterator[Plan]:
    """The plans of an ``algo`` element; as ``read_xml``."""
    algo = _read_fields(root, "algo")
    promise = PROMISES.get(algo["coll"])
    if promise is None:
        raise ConfigurationError(
            f"coll={algo['coll']!r}: what it promises is not known; expected {', '.join(PROMISES)}"
        )
    ranks, chunks = _read_number(algo, "ngpus", 1), _read_number(algo, "nchunksperloop", 1)
    if promise is not Promise.ALL_REDUCE and chunks % ranks:
        raise ConfigurationError(f"{chunks} chunks are not shared evenly by {ranks} ranks")
    if algo["proto"] not in SLOTS:
        raise ConfigurationError(f"proto={algo['proto']!r}: expected {', '.join(SLOTS)}")
    gpus = sorted(root, key=lambda gpu: _read_number(gpu.attrib, "id"))
    if [int(gpu.attrib["id"]) for gpu in gpus] != list(range(ranks)):
        raise ConfigurationError(f"expected one gpu element for each of {ranks} ranks")
    sizes = tuple(_read_sizes(gpu, promise, chunks, ranks) for gpu in gpus)
    blocks = [block for gpu in gpus for block in _read_blocks(gpu, ranks)]
    operations = _link(blocks)
    ways = [bool(_read_number(algo, "inplace"))]
    if ways[0] and _read_number({"outofplace": "0"} | algo, "outofplace"):
        ways.append(False)
    for is_in_place in ways:
        yield Plan(
            algo["name"], promise, ranks, chunks, is_in_place, sizes, operations,
            slots=SLOTS[algo["proto"]],
        )  # fmt: skip


def _read_fields(element: ElementTree.Element, tag: str) -> dict[str, str]:
    if element.tag != tag:
        raise ConfigurationError(f"expected an element {tag}, found {element.tag}")
    fields = element.attrib
    if fields.keys() == FIELDS[tag]:
        return fields
    if unknown := sorted(fields.keys() - FIELDS[tag]):
        raise ConfigurationError(
            f"element {tag} has fields that are not known: {', '.join(unknown)}"
        )
    if missing := sorted(FIELDS[tag] - OPTIONAL - fields.keys()):
        raise ConfigurationError(f"element {tag} lacks {', '.join(missing)}")
    return fields


def _read_number(fields: Mapping[str, str], name: str, least: int = -1) -> int:
    text = fields.get(name, "")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigurationError(f"{name}: expected an integer >= {least}, found {text!r}")
    return value


def _read_sizes(
    gpu: ElementTree.Element, promise: Promise, chunks: int, ranks: int
) -> tuple[int, int, int]:
    fields = _read_fields(gpu, "gpu")
    inputs, outputs = promise.count_chunks(chunks, ranks)
    for name, expected in (("i_chunks", inputs), ("o_chunks", outputs)):
        if (found := _read_number(fields, name, 0)) not in (0, expected):
            raise ScheduleError(
                f"rank {fields['id']}: {name} is {found}, but {chunks} chunks on {ranks} ranks "
                f"make {expected}"
            )
    return inputs, outputs, _read_number(fields, "s_chunks", 0)


def _read_blocks(gpu: ElementTree.Element, ranks: int) -> list[_Block]:
    rank = int(gpu.attrib["id"])
    found = []
    for element in gpu:
        fields = _read_fields(element, "tb")
        number, channel = _read_number(fields, "id", 0), _read_number(fields, "chan", 0)
        send, recv = _read_number(fields, "send"), _read_number(fields, "recv")
        steps = tuple(_read_step(step, rank, number) for step in element)
        block = _Block(rank, number, send, recv, channel, steps)
        if rank in (send, recv) or max(send, recv) >= ranks:
            raise ScheduleError(
                f"{block}: a peer must be another of {ranks} ranks, found send={send}, recv={recv}"
            )
        if [step.number for step in steps] != list(range(len(steps))):
            raise ScheduleError(f"{block}: its steps are not numbered 0 to {len(steps) - 1}")
        found.append(block)
    found.sort(key=lambda block: block.number)
    if [block.number for block in found] != list(range(len(found))):
        raise ScheduleError(
            f"rank {rank}: its thread blocks are not numbered 0 to {len(found) - 1}"
        )
    return found


def _read_step(element: ElementTree.Element, rank: int, block: int) -> _Step:
    fields = _read_fields(element, "step")
    kind, count = fields["type"], _read_number(fields, "cnt", 0)
    if kind not in KINDS:
        raise ConfigurationError(
            f"type={kind!r} of a step is not known; expected {', '.join(KINDS)}"
        )
    spans = []
    for side in ("src", "dst"):
        try:
            buffer = Buffer(fields[f"{side}buf"])
        except ValueError:
            raise ConfigurationError(
                f"{side}buf: expected i, o or s, found {fields[f'{side}buf']!r}"
            ) from None
        low = _read_number(fields, f"{side}off")
        spans.append(Span(rank, buffer, low, low + count))
    other = _read_number(fields, "depid")
    waits = None if other < 0 else (other, _read_number(fields, "deps", 0))
    announces = _read_number(fields, "hasdep", 0) == 1 and kind != NOP
    number = _read_number(fields, "s", 0)
    return _Step(rank, block, number, kind, spans[0], spans[1], waits, announces)


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
                said = next(
                    (each for each in announced.get((block.rank, other), ()) if each >= least), None
                )
                if said is None:
                    raise ScheduleError(
                        f"deadlock: {step} waits for thread block {other}, step {least}, which "
                        "never says that it is done (hasdep=1)"
                    )
                after = (places[block.rank, other, said],)
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
