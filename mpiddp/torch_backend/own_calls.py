"""The collectives that mpiddp's schedules do, on what torch passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpiddp.collectives import SHARED
from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.planner import Request
from mpiddp.schedules.schedule import Collective
from mpiddp.torch_backend.members import Place
from mpiddp.torch_backend.tensors import OPERATORS, Flat, Operators, Tensors, find_kind, scale


def _request(kind: Collective, operator: str = "sum", root: int = 0) -> Request:
    """One object for equal calls, since plans are kept for the object."""
    key = (kind, operator, root)
    if key not in _requests:
        _requests[key] = Request(kind, root=root, operator=operator)
    return _requests[key]


_requests: dict[Any, Request] = {}
_IN_MEMORY = {
    operator: Request(Collective.REDUCE_SCATTER, "direct", SHARED, operator=operator)
    for operator in set(OPERATORS.values())
}
"""Reduce-scatters in which each rank writes only its own part."""


class OwnCalls:
    """Each method is a call, which returns once its result is there; one at a time."""

    def __init__(self, place: Place, make_communicator: Callable[[], Communicator]) -> None:
        """``make_communicator``: collective; called by the first call."""
        self._place = place
        self._make_communicator = make_communicator
        self._communicator: Communicator | None = None

    def find_communicator(self) -> Communicator:
        """Made by the first call, in which all ranks take part."""
        if self._communicator is None:
            self._communicator = self._make_communicator()
        return self._communicator

    def close(self) -> None:
        """Give back what the calls used. Collective."""
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None

    def barrier(self) -> None:
        self.find_communicator().barrier()

    def all_reduce(self, tensors: Tensors, operator: Any) -> None:
        request = _request(Collective.ALL_REDUCE, OPERATORS[find_kind(operator)])
        for tensor in tensors:
            with Flat(tensor) as flat:
                scale(flat, operator)
                self.find_communicator().run(request, flat)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        request = _request(Collective.BROADCAST, root=root)
        for tensor in tensors:
            with Flat(tensor) as flat:
                self.find_communicator().run(request, flat.view(torch.uint8))

    def reduce(self, tensors: Tensors, root: int, operator: Any) -> None:
        request = _request(Collective.REDUCE, OPERATORS[find_kind(operator)], root)
        for tensor in tensors:
            flat = tensor.detach().reshape(-1).clone()
            scale(flat, operator)
            self.find_communicator().run(request, flat)
            if self._place.rank == root:
                tensor.detach().copy_(flat.view(tensor.shape))

    def gather(self, outputs: Tensors, inputs: Tensors) -> None:
        request = _request(Collective.ALL_GATHER)
        for output, source in zip(outputs, inputs, strict=True):
            with Flat(output, keeps=False) as flat:
                count, rank = source.numel(), self._place.rank
                own = flat[count * rank : count * (rank + 1)]
                if own.data_ptr() != source.data_ptr():
                    own.copy_(source.detach().reshape(-1))
                self.find_communicator().run(request, flat.view(torch.uint8))

    def gather_lists(self, rows: list[Tensors], sources: Tensors) -> None:
        for row, source in zip(rows, sources, strict=True):
            sizes = [each.numel() for each in row]
            whole = source.detach().new_empty(sum(sizes))
            if len(set(sizes)) == 1:
                self.gather([whole], [source])
            else:
                parts = whole.split(sizes)
                parts[self._place.rank].copy_(source.detach().reshape(-1))
                for root, part in enumerate(parts):
                    self.broadcast([part], root)
            for part, target in zip(whole.split(sizes), row, strict=True):
                target.detach().copy_(part.view(target.shape))

    def scatter(self, outputs: Tensors, inputs: Tensors, operator: Any) -> None:
        for output, source in zip(outputs, inputs, strict=True):
            self._scatter_one(output, source.detach().contiguous().view(-1), operator)

    def _scatter_one(self, output: torch.Tensor, source: torch.Tensor, operator: Any) -> None:
        """``source`` stays as it is; ``output`` may be this rank's part of it."""
        communicator, name = self.find_communicator(), OPERATORS[find_kind(operator)]
        count, rank = output.numel(), self._place.rank
        begin, end = count * rank, count * (rank + 1)
        target = output.detach()
        if (
            find_kind(operator) == Operators.PREMUL_SUM
            or communicator.layout.transports[0] != SHARED
        ):
            copy = source.clone()
            scale(copy, operator)
            communicator.run(_request(Collective.REDUCE_SCATTER, name), copy)
            target.copy_(copy[begin:end].view(output.shape))
            return
        # No rank but this one reads or writes its part.
        own = source[begin:end]
        if target.data_ptr() == own.data_ptr():
            communicator.run(_IN_MEMORY[name], source)
            return
        kept = own.clone()
        communicator.run(_IN_MEMORY[name], source)
        target.copy_(own.view(output.shape))
        own.copy_(kept)

    def scatter_lists(self, targets: Tensors, rows: list[Tensors], operator: Any) -> None:
        for target, row in zip(targets, rows, strict=True):
            if len({each.numel() for each in row}) == 1:
                whole = torch.cat([each.detach().reshape(-1) for each in row])
                self._scatter_one(target, whole, operator)
                continue
            for root, each in enumerate(row):
                copy = each.detach().clone()
                self.reduce([copy], root, operator)
                if root == self._place.rank:
                    target.detach().copy_(copy.view(target.shape))
