"""The ranks that torchrun starts, and that know no MPI: Gloo, and NCCL where there are GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from benchmarks.baselines import gloo_all_reduce
from benchmarks.collectives.ranks.calls import CallSpec, Prepared
from benchmarks.launching.worker_loop import TorchMember, describe_place
from mpiddp.launch.device import nccl


class TorchCalls(TorchMember):
    """A rank of the group that torchrun describes; joins it."""

    def __init__(self) -> None:
        distributed.init_process_group("gloo")
        super().__init__(torch.device("cpu"))
        self._nccl: distributed.ProcessGroup | None = None
        self._buffers: dict[tuple[str, str, int], torch.Tensor] = {}
        local_rank = int(os.environ["LOCAL_RANK"])
        if gloo_all_reduce.every_rank_has_a_gpu(local_rank):
            torch.cuda.set_device(local_rank)
            self._nccl = distributed.new_group(backend="nccl")

    def prepare(self, spec: CallSpec) -> Prepared:
        device = "cpu" if spec.maker == "gloo" else "cuda"
        key = (device, spec.type, spec.bytes)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(spec.count, dtype=spec.dtype, device=device)
        tensor = self._buffers[key]
        group = None if spec.maker == "gloo" else self._nccl
        call = gloo_all_reduce.prepare(tensor, group)
        if device == "cuda":
            call = finish_with(call)
        # The default group is Gloo's.
        return Prepared(call, distributed.barrier, tensor)

    def greet(self) -> dict[str, Any]:
        if self._nccl is None:
            return {"nccl": None, "gpu": None, **describe_place()}
        version = ".".join(map(str, nccl.find_version()))
        gpu = {"nccl": version, "gpu": torch.cuda.get_device_name()}
        return {**gpu, **describe_place()}

    def describe(self) -> dict[str, Any]:
        return {}


def finish_with(call: Callable[[], object]) -> Callable[[], None]:
    """The call and all that it started on the GPU."""

    def call_and_wait() -> None:
        call()
        torch.cuda.synchronize()

    return call_and_wait
