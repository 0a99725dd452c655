"""A plan: what each thread block of each rank does, in order, and what it waits for.

A Schedule has steps that all ranks take together. A plan has none: thread blocks run side by side,
and only messages, signals and named dependencies order them. That is how MSCCL (Cowan et al.,
ASPLOS'23) and MSCCL++ (Shah et al., 2025) describe a collective.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpiddp.errors import ConfigurationError, ScheduleError

MOST_RANKS = 1 << 12
MOST_CHUNKS = 1 << 20
"""Of a buffer."""
MOST_BLOCKS = 1 << 13
"""Thread blocks of all ranks: eight on each of 1,024 ranks."""
MOST_OPERATIONS = 1 << 22
"""A ring of 1,024 ranks has half as many."""
MOST_WORK = 1 << 24
"""Chunks of memory of all ranks, and those that operations read and write."""


class Buffer(enum.Enum):
    """A rank's memory, by the letter that MSCCL and MSCCL++ give it."""

    INPUT = "i"
    OUTPUT = "o"
    SCRATCH = "s"


class Promise(enum.Enum):
    """What a plan is to do; chunks are counted over the whole result."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"

    def count_chunks(self, chunks: int, ranks: int) -> tuple[int, int]:
        """Those of each rank's input and of its output; ``chunks``: of the whole."""
        share = chunks // ranks
        inputs = share if self is Promise.ALL_GATHER else chunks
        return inputs, share if self is Promise.REDUCE_SCATTER else chunks


class Span(NamedTuple):
    """Chunks ``lo`` to ``hi`` (exclusive) of one of a rank's buffers."""

    rank: int
    buffer: Buffer
    lo: int
    hi: int


@dataclass(frozen=True)
class Operation:
    """One step of a thread block: it adds up what it reads and receives, and hands the sum on.

    Spans of one operation have the same length; operands are added from the left, the message
    first. Numbers of other operations are places in ``Plan.operations``.
    """

    rank: int
    block: int
    step: int
    kind: str
    """As its format calls it."""
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    message: int | None = None
    """The operation whose sum it receives."""
    after: tuple[int, ...] = ()
    """Operations that must have ended before it begins."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, thread block {self.block}, step {self.step}"
            f"{f' ({self.kind})' if self.kind else ''}"
        )


@dataclass(frozen=True)
class Plan:
    """A collective on ``ranks`` ranks, as operations block by block."""

    title: str
    promise: Promise
    ranks: int
    chunks: int
    """Of the buffer that is reduced, gathered to or scattered from."""
    is_in_place: bool
    """Whether the output lies where the input lies, or the smaller of them inside the larger."""
    sizes: tuple[tuple[int, int, int], ...]
    """Chunks of each rank's input, output and scratch."""
    operations: tuple[Operation, ...]
    parts: int = 1
    """Into how many of our chunks each of the file's was cut."""
    slots: int = 0
    """Messages that a connection holds before its sender must wait; 0 if there is no such limit."""
    scratches: int = 0
    """Scratch memories that calls take in turn; 0 if the runtime lets no other rank write there."""

    def __post_init__(self) -> None:
        """Raise ConfigurationError for what would take too much memory or time to prove."""
        spans = (span for each in self.operations for span in (*each.reads, *each.writes))
        blocks = len({(each.rank, each.block) for each in self.operations})
        for what, found, most in (
            ("ranks", self.ranks, MOST_RANKS),
            ("thread blocks", blocks, MOST_BLOCKS),
            ("operations", len(self.operations), MOST_OPERATIONS),
            ("chunks to look at", self.cells + sum(abs(s.hi - s.lo) for s in spans), MOST_WORK),
        ):
            if found > most:
                raise ConfigurationError(f"expected at most {most:,} {what}, found {found:,}")

    @property
    def share(self) -> int:
        """Chunks of one rank, if each has its own."""
        return self.chunks // self.ranks

    @cached_property
    def bases(self) -> dict[tuple[int, Buffer], int]:
        """Where each buffer begins if all memory of all ranks is numbered by chunks."""
        found: dict[tuple[int, Buffer], int] = {}
        end = 0
        for rank, (inputs, outputs, scratch) in enumerate(self.sizes):
            is_input_inside = self.is_in_place and self.promise is Promise.ALL_GATHER
            is_output_inside = self.is_in_place and self.promise is Promise.REDUCE_SCATTER
            own = rank * self.share
            start = end
            found[rank, Buffer.INPUT] = start + (own if is_input_inside else 0)
            end += outputs if is_input_inside else inputs
            if self.is_in_place:
                found[rank, Buffer.OUTPUT] = start + (own if is_output_inside else 0)
                end = max(end, start + outputs)
            else:
                found[rank, Buffer.OUTPUT] = end
                end += outputs
            found[rank, Buffer.SCRATCH] = end
            end += scratch
        found[self.ranks, Buffer.INPUT] = end
        return found

    @property
    def cells(self) -> int:
        """Chunks of memory of all ranks."""
        return self.bases[self.ranks, Buffer.INPUT]

    def locate(self, span: Span) -> range:
        """The numbers of its chunks among all memory."""
        base = self.bases[span.rank, span.buffer]
        return range(base + span.lo, base + span.hi)

    def name(self, span: Span) -> str:
        """As the file would call it."""
        low, high = span.lo // self.parts, (span.hi - 1) // self.parts
        chunks = f"chunk {low}" if low == high else f"chunks {low} to {high}"
        if span.hi - span.lo < self.parts:
            chunks = f"part {span.lo % self.parts + 1} of {self.parts} of {chunks}"
        return f"{chunks} of rank {span.rank}'s {span.buffer.name.lower()}"

    def check_bounds(self, spans: Iterable[Span], who: object) -> None:
        """Raise ScheduleError if a span is not inside its buffer."""
        order = (Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH)
        spans = list(spans)
        for span in spans:
            if not 0 <= span.rank < self.ranks or span.hi - span.lo != spans[0].hi - spans[0].lo:
                raise ScheduleError(f"{who}: {span} does not fit {spans[0]}, or has no such rank")
            size = self.sizes[span.rank][order.index(span.buffer)]
            if not 0 <= span.lo < span.hi <= size:
                raise ScheduleError(f"{who}: {self.name(span)} is not inside its {size} chunks")


def list_connections(plan: Plan) -> dict[tuple[int, int, int, int], list[tuple[int, int]]]:
    """The messages of each connection, as pairs of sending and receiving operation, in order."""
    found: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    for number, operation in enumerate(plan.operations):
        if operation.message is not None:
            sender = plan.operations[operation.message]
            key = (sender.rank, sender.block, operation.rank, operation.block)
            found.setdefault(key, []).append((operation.message, number))
    return found
