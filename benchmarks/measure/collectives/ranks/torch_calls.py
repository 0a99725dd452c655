"""The ranks that torchrun starts, and that know no MPI: Gloo, and NCCL if there are GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed

import mpiddp.torch_backend  # noqa: F401 - registers the backend
from benchmarks.measure.baselines import framework_collectives
from benchmarks.measure.collectives.ranks.calls import Buffers, CallSpec, Exchange, Prepared
from benchmarks.measure.launching.worker_loop import TorchMember, describe_place
from benchmarks.records.contenders import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKEND,
    GLOO,
    NCCL,
    POINT_TO_POINT,
    REDUCE_SCATTER,
)
from mpiddp.errors import ConfigurationError
from mpiddp.launch.device import nccl


class TorchCalls(TorchMember):
    """A rank of the group that torchrun describes; joins it."""

    def __init__(self) -> None:
        distributed.init_process_group("gloo")
        super().__init__(torch.device("cpu"))
        self._groups: dict[str, distributed.ProcessGroup] = {}
        """Those of other backends than Gloo, by maker."""
        self._buffers = Buffers(self._allocate)
        local_rank = int(os.environ["LOCAL_RANK"])
        if framework_collectives.every_rank_has_a_gpu(local_rank):
            torch.cuda.set_device(local_rank)
            self._groups[NCCL] = distributed.new_group(backend="nccl")

    def _allocate(self, spec: CallSpec) -> torch.Tensor:
        return torch.empty(spec.count, dtype=spec.dtype, device=_find_device(spec))

    def prepare(self, spec: CallSpec) -> Prepared:
        device = _find_device(spec)
        if spec.maker == BACKEND and BACKEND not in self._groups:
            self._groups[BACKEND] = distributed.new_group(backend="mpiddp")
        group = self._groups.get(spec.maker)
        if spec.quantity == POINT_TO_POINT:
            return prepare_exchange(spec, device, group)
        if spec.quantity in (REDUCE_SCATTER, ALL_GATHER) and spec.count % self.size:
            raise ConfigurationError(f"it needs {self.size} parts of one length")
        if spec.operator == "average" and not spec.dtype.is_floating_point:
            raise ConfigurationError(f"an average of {spec.type} is no integer")
        tensor = self._buffers.find(spec)
        call = framework_collectives.prepare(tensor, group, spec.quantity, spec.operator or "sum")
        return Prepared(
            call,
            distributed.barrier,  # The default group is Gloo's.
            tensor,
            ran="ring" if (spec.maker, spec.quantity) == (GLOO, ALL_REDUCE) else "",
            start=lambda: call(async_op=True).wait,
            device=device if device.type == "cuda" else None,
        )

    def greet(self) -> dict[str, Any]:
        if NCCL not in self._groups:
            return {"nccl": None, "gpu": None, **describe_place()}
        version = ".".join(map(str, nccl.find_version()))
        gpu = {"nccl": version, "gpu": torch.cuda.get_device_name()}
        return {**gpu, **describe_place()}

    def describe(self) -> dict[str, Any]:
        return {"local_rank": int(os.environ["LOCAL_RANK"])}


def _find_device(spec: CallSpec) -> torch.device:
    if spec.maker in (GLOO, BACKEND):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def prepare_exchange(
    spec: CallSpec, device: torch.device, group: distributed.ProcessGroup | None
) -> Prepared:
    """A message from rank 0 to rank 1 and back; or one in each direction at once."""
    rank = distributed.get_rank()
    other = 1 - rank
    source, target = (torch.zeros(spec.bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange() -> None:
        works = [
            distributed.isend(source, other, group=group),
            distributed.irecv(target, other, group=group),
        ]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()

    def lead() -> None:
        distributed.send(source, other, group=group)
        distributed.recv(target, other, group=group)

    def follow() -> None:
        distributed.recv(target, other, group=group)
        distributed.send(source, other, group=group)

    call = exchange if spec.is_mutual else (lead, follow)[rank]
    return Prepared(
        call,
        distributed.barrier,
        exchange=Exchange(source, target, other),
        ran="send and receive" if spec.is_mutual else "send, receive",
        messages=1 if spec.is_mutual else 2,
        device=device if device.type == "cuda" else None,
    )
