"""The calls that Gloo does, in a Gloo backend that the first of them makes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from mpiddp.torch_backend.call_queue import DESTROYED, CallQueue
from mpiddp.torch_backend.members import Place, open_gloo
from mpiddp.torch_backend.tensors import (
    Reduction,
    Tensors,
    check_tensor,
    copy_contiguous,
    flatten,
    has_strides,
    is_waited_for,
)
from mpiddp.torch_internals import fill, set_gloo_timeout

MESSAGES = ("send", "recv", "recv_anysource")


class GlooCalls:
    def __init__(
        self, place: Place, calls: CallQueue, note_timeout: Callable[[timedelta], None]
    ) -> None:
        """``note_timeout``: is called if torch.distributed sets Gloo's timeout."""
        self._place = place
        self._calls = calls
        self._note_timeout = note_timeout
        self._gloo: Any = None
        self._making = threading.Lock()
        self._is_closed = False
        self.used: set[str] = set()
        """The calls so far, as Gloo names them."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._place = replace(self._place, timeout=timeout)
        if self._gloo is not None:
            set_gloo_timeout(self._gloo, timeout)

    def close(self) -> None:
        if self._gloo is not None:
            self._gloo.shutdown()
        self._gloo = None
        self._is_closed = True

    def find(self) -> Any:
        """The Gloo backend. Two ranks connect when they first exchange a message."""
        if self._is_closed:
            raise distributed.DistBackendError(DESTROYED)
        with self._making:  # Several threads may send messages.
            if self._gloo is None:
                self._gloo = open_gloo(self._place, "gloo", self._note_timeout)
        return self._gloo

    def ask(self, method: str, *values: Any) -> Any:
        """Call ``method`` of Gloo's backend; returns its work.

        ``values``: its arguments. The first holds the tensors of the result; the others are only
        read.
        """
        tensors = [tensor for value in values for tensor in flatten(value)]
        for tensor in tensors:
            check_tensor(tensor)
        self.used.add(method)
        call = getattr(self.find(), method)
        # A message must not wait in the queue of the calls, in which a peer may make others first:
        # Gloo refuses one with strides.
        if method in MESSAGES or not any(map(has_strides, tensors)):
            return call(*values)
        # Gloo takes no notice of strides.
        rows = [copy_contiguous(value) for value in values]
        work = call(*rows)
        results = [*flatten(values[0])]

        def finish() -> None:
            work.wait()
            for target, row in zip(results, flatten(rows[0]), strict=False):
                target.detach().copy_(row)

        return self._calls.make(method, finish, results, waits=False)

    def all_reduce(self, found: Tensors, reduction: Reduction) -> Any:
        reduction.check_for_gloo(found)
        if len(found) == 1:  # It may be sparse.
            options = fill(distributed.AllreduceOptions(), reduceOp=reduction.operator)
            return self.ask("allreduce", found, options)
        options = fill(distributed.AllreduceCoalescedOptions(), reduceOp=reduction.operator)
        return self.ask("allreduce_coalesced", found, options)

    def reduce(self, found: Tensors, root: int, reduction: Reduction) -> Any:
        reduction.check_for_gloo(found)
        options = fill(distributed.ReduceOptions(), reduceOp=reduction.operator, rootRank=root)
        return self.ask("reduce", found, options)

    def reduce_scatter(self, targets: Tensors, rows: list[Tensors], reduction: Reduction) -> Any:
        """A reduce-scatter of what mpiddp does not add: a part of Gloo's all-reduce."""
        sums = [torch.cat([each.reshape(-1) for each in row]) for row in rows]
        works = [self.all_reduce([each], reduction) for each in sums]

        def finish() -> None:
            for work, total, row, target in zip(works, sums, rows, targets, strict=True):
                work.wait()
                part = total.split([each.numel() for each in row])[self._place.rank]
                target.copy_(part.view(target.shape))

        return self._calls.make("reduce_scatter", finish, targets, waits=False)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, target_sizes: list[int],
        source_sizes: list[int], opts: Any = None,
    ) -> Any:  # fmt: skip
        if not (output.is_contiguous() and source.is_contiguous()):
            targets, sources = (
                list(tensor.split(sizes or tensor.shape[0] // self._place.size))
                for tensor, sizes in ((output, target_sizes), (source, source_sizes))
            )
            return self.alltoall(targets, sources, opts)
        values = () if opts is None else (opts,)
        return self.ask("alltoall_base", output, source, target_sizes, source_sizes, *values)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Through one tensor, which Gloo wants."""
        for tensor in (*outputs, *inputs):
            check_tensor(tensor)
        source = torch.cat([each.reshape(-1) for each in inputs])
        sizes = [each.numel() for each in outputs]
        target = source.new_empty(sum(sizes))
        self.used.add("alltoall_base")
        work = self.find().alltoall_base(target, source, sizes, [each.numel() for each in inputs])

        def finish() -> None:
            work.wait()
            for part, output in zip(target.split(sizes), outputs, strict=True):
                output.copy_(part.view(output.shape))

        return self._calls.make("all_to_all", finish, outputs, waits=is_waited_for(opts))
