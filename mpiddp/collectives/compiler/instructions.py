"""The instructions of one rank in a collective, in order, independent of addresses.

Numbers are elements of the buffer, or of a scratch space beside it. Messages are numbered; each is
prepared once, started and finished once per run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Source(enum.Enum):
    """Where a value that is to be added lies."""

    OWN = "own buffer"
    PEER = "a peer's buffer"
    SCRATCH = "scratch"


class Operand(NamedTuple):
    source: Source
    rank: int
    """Whose buffer it is; who sent it, if it lies in the scratch space."""
    start: int
    """Its first element, in that buffer or in the scratch space."""


class ProgramMessage(NamedTuple):
    """Something that is sent, or received."""

    sends: bool
    step: int
    peer: int
    start: int
    """First element, in the own buffer or in the scratch space."""
    length: int
    scratch: bool
    """Whether it leaves from the scratch space, or lands there."""
    tag: int
    """Its number among all messages from its source to its destination."""


class Wait(NamedTuple):
    """Until ``rank`` has reached ``stage``; ``step`` says where in the schedule this is."""

    step: int
    rank: int
    stage: int


class Publish(NamedTuple):
    """That this rank has reached ``stage``."""

    stage: int


class Fetch(NamedTuple):
    """Elements of a peer's buffer into the scratch space."""

    step: int
    rank: int
    start: int
    length: int
    slot: int


class Pack(NamedTuple):
    """Own elements into the scratch space, from where they leave beside others."""

    start: int
    length: int
    slot: int


class Push(NamedTuple):
    """Own elements into the same place of a peer's buffer."""

    step: int
    rank: int
    start: int
    length: int


class Reduce(NamedTuple):
    """Operands, from the left, into the own buffer."""

    step: int
    start: int
    length: int
    operands: tuple[Operand, ...]
    final: bool
    """Whether every contribution is in the result."""


class Start(NamedTuple):
    """Messages, by number."""

    messages: tuple[int, ...]


class Finish(NamedTuple):
    message: int


Instruction = Wait | Publish | Fetch | Pack | Push | Reduce | Start | Finish


@dataclass(frozen=True)
class RankProgram:
    """One rank's part of a collective on ``count`` elements."""

    rank: int
    count: int
    instructions: tuple[Instruction, ...]
    messages: tuple[ProgramMessage, ...]
    scratch: int
    """Elements of the scratch space."""
    partners: tuple[int, ...]
    """The ranks in whose memory this one works."""
    block: int
    """The most elements that one instruction adds or copies."""
