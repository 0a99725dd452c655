"""The ranks that torchrun starts, and that know no MPI: Gloo, and NCCL where there are GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed

from benchmarks.baselines import framework_collectives
from benchmarks.collectives.contenders import (
    ALL_GATHER,
    ALL_REDUCE,
    GLOO,
    POINT_TO_POINT,
    REDUCE_SCATTER,
)
from benchmarks.collectives.ranks import exchange
from benchmarks.collectives.ranks.calls import Buffers, CallSpec, Prepared
from benchmarks.launching.worker_loop import TorchMember, describe_place
from mpiddp.errors import ConfigurationError
from mpiddp.launch.device import nccl


class TorchCalls(TorchMember):
    """A rank of the group that torchrun describes; joins it."""

    def __init__(self) -> None:
        distributed.init_process_group("gloo")
        super().__init__(torch.device("cpu"))
        self._nccl: distributed.ProcessGroup | None = None
        self._buffers = Buffers(self._allocate)
        local_rank = int(os.environ["LOCAL_RANK"])
        if framework_collectives.every_rank_has_a_gpu(local_rank):
            torch.cuda.set_device(local_rank)
            self._nccl = distributed.new_group(backend="nccl")

    def _allocate(self, spec: CallSpec) -> torch.Tensor:
        return torch.empty(spec.count, dtype=spec.dtype, device=_find_device(spec))

    def prepare(self, spec: CallSpec) -> Prepared:
        device = _find_device(spec)
        group = None if spec.maker == GLOO else self._nccl
        if spec.quantity == POINT_TO_POINT:
            return exchange.prepare_exchange(spec, device, group)
        if spec.quantity in (REDUCE_SCATTER, ALL_GATHER) and spec.count % self.size:
            raise ConfigurationError(f"it needs {self.size} parts of one length")
        tensor = self._buffers.find(spec)
        call = framework_collectives.prepare(tensor, group, spec.quantity, spec.operator or "sum")
        return Prepared(
            call,
            distributed.barrier,  # The default group is Gloo's.
            tensor,
            ran="ring" if (spec.maker, spec.quantity) == (GLOO, ALL_REDUCE) else "",
            start=_start_with(call, device),
            device=device if device.type == "cuda" else None,
        )

    def greet(self) -> dict[str, Any]:
        if self._nccl is None:
            return {"nccl": None, "gpu": None, **describe_place()}
        version = ".".join(map(str, nccl.find_version()))
        gpu = {"nccl": version, "gpu": torch.cuda.get_device_name()}
        return {**gpu, **describe_place()}

    def describe(self) -> dict[str, Any]:
        return {}

    def is_first_of_node(self) -> bool:
        return os.environ["LOCAL_RANK"] == "0"


def _find_device(spec: CallSpec) -> torch.device:
    if spec.maker == GLOO:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _start_with(call: Callable[..., Any], device: torch.device) -> Callable[[], Callable[[], Any]]:
    def start() -> Callable[[], Any]:
        work = call(async_op=True)
        return work.wait if device.type == "cpu" else partial(_wait_on_gpu, work)

    return start


def _wait_on_gpu(work: distributed.Work) -> None:
    work.wait()
    torch.cuda.current_stream().synchronize()
