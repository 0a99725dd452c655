"""The collectives that mpiddp's schedules do, on what torch passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import distributed

from mpiddp.collectives import SHARED, TORCH
from mpiddp.collectives.communicator import Communicator, tell_autograd
from mpiddp.collectives.planner import CallRequest
from mpiddp.collectives.transport.operators import name_type
from mpiddp.process.cpus import count_cores
from mpiddp.schedules.schedule import Collective
from mpiddp.torch_backend.members import Place, make_group_communicator, open_gloo
from mpiddp.torch_backend.tensors import OPERATORS, Flat, Operators, Reduction, Tensors
from mpiddp.torch_internals import fill, infer, set_gloo_timeout


@cache
def _request(kind: Collective, operator: str = "sum", root: int = 0) -> CallRequest:
    """One object for equal calls, since plans are kept for the object."""
    return CallRequest(kind, root=root, operator=operator)


_IN_MEMORY = {
    operator: CallRequest(Collective.REDUCE_SCATTER, "direct", SHARED, operator=operator)
    for operator in set(OPERATORS.values())
}
"""Reduce-scatters in which each rank writes only its own part."""


SMALL_BYTES = 1 << 10
"""Bytes below which Gloo's all-reduce is quicker than a reduce-scatter over its connections."""
SOON, LATER = 2e-4, 1e-2
"""Seconds before a thread begins a call that no other waits for: if there are cores for such
threads; and if there are none, so that it would share a core with the backward pass."""
SWAPPED = 1 << 16
"""Elements that are exchanged at a time."""


class OwnCalls:
    """Each method is a call, which returns once its result is there; one at a time."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._communicator: Communicator | None = None
        self._is_made = True
        """False while the communicator is being made, and if that has failed."""
        self._gloo: Any = None
        self._goes_through_gloo = False
        """Whether each message does; known after the first call."""
        self.delay = SOON
        """SOON or LATER."""

    def find_communicator(self) -> Communicator:
        """Made by the first call, in which all ranks take part."""
        if self._communicator is None:
            self._is_made = False
            self._communicator = make_group_communicator(self._place, self._find_gloo)
            self._is_made = True
            layout = self._communicator.layout
            self._goes_through_gloo = layout.transports[0] == TORCH
            # A call inside a node is work for cores: only one that is free hides it.
            is_crowded = len(layout.sizes) == 1 and count_cores() < 2 * layout.size
            self.delay = LATER if is_crowded else SOON
        return self._communicator

    @property
    def has_failed(self) -> bool:
        """Whether a call failed or was interrupted, so that the ranks' next ones do not match."""
        own = self._communicator
        return not self._is_made or (own is not None and own.has_failed)

    def describe_call(self) -> dict[str, Any]:
        """What is known of the call that is under way, for reports of a hang."""
        return self._communicator.describe_call() if self._communicator is not None else {}

    def _find_gloo(self) -> Any:
        """For messages between nodes without MPI, and for what Gloo then does as a whole."""
        if self._gloo is None:
            self._gloo = open_gloo(self._place, "messages")
        return self._gloo

    def _find_whole(self, reduction: Reduction | None = None) -> Any:
        """Gloo's backend if each message would go through it, and it has the reduction; else None.

        Then Gloo's own collectives are quicker, except for its reduce-scatter.
        """
        is_average = reduction is not None and reduction.name == "average"
        self.find_communicator()
        return None if is_average or not self._goes_through_gloo else self._find_gloo()

    def find_direct(self, tensors: Tensors, reduction: Reduction | None = None) -> Any:
        """Gloo's backend if it can begin such a call itself, on these tensors; else None.

        It can from the group's second call on. What else is done in Python for a small call takes
        as long as the call.
        """
        if not self._goes_through_gloo or (reduction is not None and reduction.factor is not None):
            return None
        if self.find_communicator().is_checked:
            return None
        is_flat = all(tensor.is_contiguous() for tensor in tensors)
        return self._find_whole(reduction) if is_flat else None

    def find_shortcut(self, tensors: Any, reduction: Reduction) -> Callable[[], None] | None:
        """A function that makes an all-reduce as an earlier one on the same memory; None if there
        was none."""
        if self._communicator is None or type(tensors) is not list or len(tensors) != 1:
            return None
        if reduction.factor is not None:
            return None
        tensor = tensors[0]
        try:
            shortcut = self._communicator.find_shortcut(tensor, (reduction.name,))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None  # A tensor without memory.
        if shortcut is None:
            return None
        return partial(self._communicator.make, shortcut, tensor)

    def _compare(self, call: str, tensor: torch.Tensor) -> None:
        """With MPIDDP_DEBUG; for what the communicator sees as bytes, or does not see."""
        communicator = self.find_communicator()
        if communicator.is_checked:
            communicator.compare(f"{call} of {tensor.numel()} {name_type(tensor.dtype)}")

    def set_timeout(self, timeout: timedelta) -> None:
        self._place = replace(self._place, timeout=timeout)
        if self._communicator is not None:
            self._communicator.waiter.set_seconds(timeout.total_seconds())
        if self._gloo is not None:
            set_gloo_timeout(self._gloo, timeout)

    def close(self) -> None:
        """Give back what the calls used. Collective."""
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None
        self._goes_through_gloo = False
        if self._gloo is not None:
            self._gloo.shutdown()
        self._gloo = None

    def barrier(self) -> None:
        if gloo := self._find_whole():
            gloo.barrier().wait()
        else:
            self.find_communicator().barrier()

    def all_reduce(self, tensors: Tensors, reduction: Reduction, infers: bool = False) -> None:
        """``infers``: whether the program is in inference mode: a call is remembered for
        that mode alone."""
        request = _request(Collective.ALL_REDUCE, reduction.name)
        communicator, gloo = self.find_communicator(), self._find_whole(reduction)
        for tensor in tensors:
            if gloo is None and reduction.factor is None and tensor.is_contiguous():
                plain = tensor.detach()
                communicator.run(request, plain)
                with infer(infers):
                    communicator.remember(request, plain, (reduction.name,))
                continue
            self._compare(f"all-reduce ({reduction.name})", tensor)
            with Flat(tensor) as flat:
                reduction.scale(flat)
                if gloo is not None:
                    start_all_reduce(gloo, flat, reduction).wait()
                else:
                    communicator.run(request, flat)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        request, gloo = _request(Collective.BROADCAST, root=root), self._find_whole()
        for tensor in tensors:
            self._compare(f"broadcast from {root}", tensor)
            with Flat(tensor) as flat:
                if gloo is not None:
                    start_broadcast(gloo, flat, root).wait()
                else:
                    self.find_communicator().run(request, flat.view(torch.uint8))

    def reduce(self, tensors: Tensors, root: int, reduction: Reduction) -> None:
        request = _request(Collective.REDUCE, reduction.name, root)
        for tensor in tensors:
            flat = tensor.detach().reshape(-1).clone()
            reduction.scale(flat)
            self.find_communicator().run(request, flat)
            if self._place.rank == root:
                tensor.detach().copy_(flat.view(tensor.shape))

    def gather(self, outputs: Tensors, inputs: Tensors) -> None:
        request, gloo = _request(Collective.ALL_GATHER), self._find_whole()
        for output, source in zip(outputs, inputs, strict=True):
            self._compare("all-gather", source)
            with Flat(output, keeps=False) as flat:
                count, rank = source.numel(), self._place.rank
                own = flat[count * rank : count * (rank + 1)]
                if own.data_ptr() != source.data_ptr():
                    own.copy_(source.detach().reshape(-1))
                if gloo is not None and count:
                    start_gather(gloo, flat, own.clone()).wait()
                else:
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

    def scatter(self, outputs: Tensors, inputs: Tensors, reduction: Reduction) -> None:
        for output, source in zip(outputs, inputs, strict=True):
            self._scatter_one(output, source.contiguous().view(-1), reduction)

    def _scatter_one(self, output: torch.Tensor, whole: torch.Tensor, reduction: Reduction) -> None:
        """``whole`` stays as it is; ``output`` may be this rank's part of it."""
        # Not detach(): autograd would take what the call leaves as it is for changed.
        source = whole.data
        communicator, name = self.find_communicator(), reduction.name
        count, rank = output.numel(), self._place.rank
        begin, end = count * rank, count * (rank + 1)
        target = output.detach()
        if reduction.factor is not None or communicator.layout.transports[0] != SHARED:
            copy = source.clone()
            if source.nbytes < SMALL_BYTES and self._find_whole(reduction) is not None:
                self.all_reduce([copy], reduction)
            else:
                reduction.scale(copy)
                communicator.run(_request(Collective.REDUCE_SCATTER, name), copy)
            target.copy_(copy[begin:end].view(output.shape))
            return
        # No rank but this one reads or writes its part.
        own = source[begin:end]
        if target.data_ptr() == own.data_ptr():
            communicator.run(_IN_MEMORY[name], source)
            tell_autograd(target)
            return
        # New memory costs more: the kernel clears its pages. But the others read all of ``source``.
        is_apart = target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        is_room = is_apart and target.is_contiguous()
        kept = target.view(-1) if is_room else torch.empty_like(own)
        kept.copy_(own)
        communicator.run(_IN_MEMORY[name], source)
        _swap(own, kept)
        if not is_room:
            target.copy_(kept.view(output.shape))

    def scatter_lists(self, targets: Tensors, rows: list[Tensors], reduction: Reduction) -> None:
        for target, row in zip(targets, rows, strict=True):
            if len({each.numel() for each in row}) == 1:
                whole = torch.cat([each.detach().reshape(-1) for each in row])
                self._scatter_one(target, whole, reduction)
                continue
            for root, each in enumerate(row):
                copy = each.detach().clone()
                self.reduce([copy], root, reduction)
                if root == self._place.rank:
                    target.detach().copy_(copy.view(target.shape))


def start_all_reduce(gloo: Any, tensor: torch.Tensor, reduction: Reduction) -> Any:
    operator = Operators.SUM if reduction.name == "sum" else reduction.operator
    return gloo.allreduce([tensor], fill(distributed.AllreduceOptions(), reduceOp=operator))


def start_broadcast(gloo: Any, tensor: torch.Tensor, root: int) -> Any:
    options = fill(distributed.BroadcastOptions(), rootRank=root)
    return gloo.broadcast([_as_bytes(tensor)], options)


def start_gather(gloo: Any, output: torch.Tensor, source: torch.Tensor) -> Any:
    parts = _as_bytes(output).chunk(output.numel() // source.numel())
    return gloo.allgather([[*parts]], [_as_bytes(source)])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor of any type."""
    return tensor.detach().view(-1).view(torch.uint8)


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the elements of two flat tensors, in pieces that stay in a core's cache."""
    for left, right in zip(one.split(SWAPPED), other.split(SWAPPED), strict=True):
        piece = left.clone()
        left.copy_(right)
        right.copy_(piece)
