"""The ranks that torchrun starts, and that know no MPI: DDP, and one rank's loops without it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import mpiddp.torch_backend  # noqa: F401 - registers the backend
from benchmarks.measure.baselines import ddp_step
from benchmarks.measure.launching.worker_loop import TorchMember, describe_place
from benchmarks.measure.training_step.loops import StepLoop, draw, make_slowdown
from benchmarks.measure.training_step.synchronisations import (
    ALONE,
    BACKEND,
    DATA_PARALLEL,
    FUSED,
    LEARNING_RATE,
    MOMENTUM,
    WEIGHT_DECAY,
    LoopSpec,
)
from benchmarks.measure.training_step.traffic import add_up, list_transfers
from benchmarks.records.workloads import build
from mpiddp.errors import ConfigurationError
from mpiddp.training.data.samples import Batch


class TorchJob(TorchMember):
    """A rank of the group that torchrun describes; joins it."""

    def __init__(self) -> None:
        super().__init__(ddp_step.join())
        self.counts = os.environ["LOCAL_RANK"] == "0"
        self._group: distributed.ProcessGroup | None = None
        """Of the backend mpiddp, once it is asked for."""

    def greet(self) -> dict[str, Any]:
        computes = self.device.type == "cuda"
        return {
            "device": self.device.type,
            "gpu": torch.cuda.get_device_name() if computes else None,
            "gpus": torch.cuda.device_count() if computes else 0,
            "backend": distributed.get_backend(),
            **describe_place(),
        }

    def prepare(self, spec: LoopSpec) -> StepLoop | None:
        name = spec.contender.sync
        if name in (ALONE, DATA_PARALLEL) and self.rank != 0:
            return None
        module = build(spec.workload, spec.seed).to(self.device)
        if name == DATA_PARALLEL:
            return self._drive_all(spec, module)
        batch = draw(spec, self.device, self.rank)
        if name == ALONE:
            return StepLoop(module, module, make_step(module), (0,), 0, batch)
        everyone = tuple(range(self.size))
        slowdown = make_slowdown(spec, module, batch, self.rank, everyone)
        if name == BACKEND:
            model = DistributedDataParallel(module, process_group=self._find_group())
        else:
            model = ddp_step.wrap(module, self.device)
        step = make_step(model, fused=name == FUSED)
        return StepLoop(
            model, module, step, everyone, self.rank, batch,
            quiet=model.no_sync, slowdown=slowdown,
        )  # fmt: skip

    def _find_group(self) -> distributed.ProcessGroup:
        if self.device.type != "cpu":
            raise ConfigurationError("the backend mpiddp is for CPUs")
        if self._group is None:
            self._group = distributed.new_group(backend="mpiddp")
        return self._group

    def _drive_all(self, spec: LoopSpec, module: nn.Module) -> StepLoop:
        """``nn.DataParallel``: one process with as many GPUs as there are ranks."""
        found = torch.cuda.device_count() if self.device.type == "cuda" else 0
        if found < self.size:
            raise ConfigurationError(
                f"nn.DataParallel needs {self.size} GPUs in one process, found {found}"
            )
        if spec.straggler is not None:
            raise ConfigurationError("nn.DataParallel has no worker that can be slowed")
        shares = [draw(spec, self.device, place) for place in range(self.size)]
        features = torch.cat([share.inputs for share in shares])
        labels = torch.cat([share.targets for share in shares])
        model = nn.DataParallel(module, device_ids=list(range(self.size)))
        return StepLoop(
            model, module, make_step(module), (0,), 0, Batch(features, labels),
            bare=module, share=spec.batch_size,
        )  # fmt: skip

    def describe(self, spec: LoopSpec, loop: StepLoop) -> dict[str, Any]:
        """See ``worker.StepJob``. Gloo and NCCL tell nothing."""
        parameters = [each for each in loop.module.parameters() if each.requires_grad]
        count = sum(each.numel() for each in parameters)
        if spec.contender.sync != DATA_PARALLEL:
            return {"elements": count}
        from mpiddp.schedules.algorithms import gather_broadcast

        # Gradients to the first GPU, and parameters back; the samples are left out.
        messages = list_transfers(gather_broadcast(self.size), count, parameters[0].element_size())
        return {"elements": count, "traffic": add_up(messages, [0] * self.size)}

    def probe(self, size: int, iterations: int) -> list[float]:
        raise ConfigurationError("links are probed over MPI")


def make_step(model: nn.Module, *, fused: bool = False) -> ddp_step.Step:
    optimizer = ddp_step.make_optimizer(
        model, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, fused=fused or None
    )
    return ddp_step.Step(optimizer)
