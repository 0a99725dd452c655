"""Forward and backward passes for timing, without lasting effects."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpiddp.training.data.samples import Batch
from mpiddp.training.data.seeding import fork_generators
from mpiddp.training.data.structure import call_model
from mpiddp.training.step.step import Compute, check_gradients
from mpiddp.training.task.task import cross_entropy

WARM_UP, PASSES = 3, 20
"""Passes before those that are timed, and these."""


def compute_plainly(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs, and the mean cross entropy."""
    outputs = call_model(model, batch.inputs)
    return outputs, cross_entropy(outputs, batch.targets)


@contextlib.contextmanager
def rehearse(
    model: nn.Module, module: nn.Module, batch: Batch, compute: Compute = compute_plainly
) -> Iterator[Callable[[], None]]:
    """Yields a function that takes a pass over ``batch``; restores all state at the end.

    Gradients are None at the end; buffers and random generators are restored.
    ``model`` is what takes a batch: DDP's wrapper of ``module``, or itself. The batch lies on the
    module's device.
    """
    device = batch.device

    def take_pass() -> None:
        torch.autograd.backward(compute(model, batch)[1])
        check_gradients(model)
        model.zero_grad(set_to_none=True)

    buffers = [buffer.clone() for buffer in module.buffers()]
    with fork_generators(device):
        yield take_pass
    for buffer, before in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(before)


def takes_one_sample(module: nn.Module, batch: Batch, compute: Compute) -> bool:
    """Whether a pass over one sample of ``batch`` is possible: batch normalisation may need two.

    The batch lies on the module's device. Nothing is left of it.
    """
    if not any(isinstance(each, _BatchNorm) for each in module.modules()):
        return True
    with rehearse(module, module, batch.first(), compute) as take_pass:
        try:
            take_pass()
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return False
    return True


def time_pass(take_pass: Callable[[], object], device: torch.device) -> float:
    """Seconds that a pass takes here and now: the median of some."""
    seconds = [time_once(take_pass, device) for _ in range(WARM_UP + PASSES)]
    return statistics.median(seconds[WARM_UP:])


def find_medians(seconds: Iterable[Sequence[float]], device: torch.device) -> list[float]:
    """The median of each on the slowest rank. Collective."""
    medians = torch.tensor([statistics.median(each) for each in seconds], device=device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    found: list[float] = medians.tolist()
    return found


def time_once(take_pass: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    take_pass()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.perf_counter() - begin
