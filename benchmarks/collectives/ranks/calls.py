"""What a rank of ``python -m benchmarks allreduce`` can measure; see the two jobs'
modules, ``mpi_calls`` and ``torch_calls``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.collectives.contenders import Contender
from benchmarks.launching.worker_loop import Member


@dataclass(frozen=True, kw_only=True)
class CallSpec(Contender):
    """What ranks are told to measure: a contender on one size."""

    bytes: int
    type: str
    """Of the elements, as torch names it."""
    iterations: int
    """Timed ones; 0 only checks."""

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.type)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def count(self) -> int:
        return self.bytes // self.dtype.itemsize


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready to be timed."""

    call: Callable[[], object]
    """What is timed."""
    barrier: Callable[[], object]
    """What every timed call waits behind."""
    tensor: torch.Tensor | None = None
    """Flat; what the call sums in place. None where it sums nothing."""
    members: tuple[int, ...] | None = None
    """The ranks whose tensors are summed, and that know the sum; None for all."""
    close: Callable[[], None] = _do_nothing


class Calls(Member, Protocol):
    """One job's rank."""

    def prepare(self, spec: CallSpec) -> Prepared:
        """Make a contender ready. Raises ConfigurationError, on all ranks, if it cannot be."""

    def describe(self) -> dict[str, Any]:
        """What there is to say of how this job's collectives work."""
