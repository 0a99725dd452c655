"""What a rank can measure; see the two jobs' modules, ``mpi_calls`` and ``torch_calls``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.measure.launching.worker_loop import Member
from benchmarks.records.contenders import Contender


@dataclass(frozen=True, kw_only=True)
class CallSpec(Contender):
    """What ranks are told to measure: a contender on one size."""

    bytes: int
    type: str
    """Of the elements, as torch names it."""
    iterations: int
    """Timed ones; 0 only checks."""
    operator: str = "sum"
    pairs: tuple[tuple[int, int], ...] = ()
    is_mutual: bool = False
    cold: bool = False
    """Whether the caches are emptied before each call."""
    overlap: bool = False
    """Whether ranks compute beside the call."""

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.type)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def count(self) -> int:
        return self.bytes // self.dtype.itemsize


def do_nothing() -> None:
    """In the place of a close or a barrier that is not needed."""


@dataclass(frozen=True)
class Exchange:
    """What a call sends to another rank, and receives from it: flat tensors of bytes (uint8)."""

    sent: torch.Tensor
    received: torch.Tensor
    sender: int
    """The rank whose bytes are received."""


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready to be timed."""

    call: Callable[[], object]
    """What is timed."""
    barrier: Callable[[], object]
    """What every timed call waits behind."""
    tensor: torch.Tensor | None = None
    """Flat; what the collective works on, in place; None if the call is no collective."""
    members: tuple[int, ...] | None = None
    """The ranks whose tensors are summed, and that know the sum; None for all."""
    close: Callable[[], None] = do_nothing
    part: torch.Tensor | None = None
    """The result of a reduce-scatter, unless it is in its place in the tensor."""
    ran: str = ""
    """The algorithm that a call runs; empty if its library does not tell."""
    start: Callable[[], Callable[[], object]] | None = None
    """Starts the call, and returns what waits for its end; None if a call cannot be started."""
    messages: int = 1
    """How many a call sends one after the other; its time is that of one of them."""
    device: torch.device | None = None
    """The GPU that does it; None for the CPU."""
    exchange: Exchange | None = None
    """Of a call that passes messages; None on ranks that take no part."""


class Calls(Member, Protocol):
    """One job's rank."""

    def prepare(self, spec: CallSpec) -> Prepared:
        """Make a contender ready. Raises ConfigurationError, on all ranks, if it cannot be."""

    def describe(self) -> dict[str, Any]:
        """``local_rank``, and what there is to say of how this job's collectives work."""


class Buffers:
    """The buffers of one size: all contenders that take one of a kind take the same one."""

    def __init__(self, allocate: Callable[[CallSpec], torch.Tensor]) -> None:
        self._allocate = allocate
        self._size: tuple[str, int] | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def find(self, spec: CallSpec) -> torch.Tensor:
        """A flat tensor; those of other sizes are given back first."""
        size = (spec.type, spec.bytes)
        if self._size != size:
            self._tensors.clear()
            self._size = size
        if spec.buffer not in self._tensors:
            self._tensors[spec.buffer] = self._allocate(spec)
        return self._tensors[spec.buffer]
