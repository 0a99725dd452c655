"""Whether a contender trains what it should: a few steps, compared with one process's.

That process takes every worker's samples in each step, and averages their gradients by itself.
How far the parameters have moved is compared, since that is what the synchronisation decides; the
parameters themselves hardly change in a few steps. Dropout is left out meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.measure.baselines import ddp_step
from benchmarks.measure.training_step.loops import StepLoop, Stopwatch, draw, take_step
from benchmarks.measure.training_step.synchronisations import (
    CHECKED_STEPS,
    LEARNING_RATE,
    MOMENTUM,
    WEIGHT_DECAY,
)
from benchmarks.records.workloads import build

if TYPE_CHECKING:
    from benchmarks.measure.training_step.synchronisations import LoopSpec

SAMPLE = 4096
"""Parameters that are looked at, evenly spread."""


def take_checked_steps(spec: LoopSpec, loop: StepLoop) -> dict[str, Any]:
    """The first steps of a loop: a ``digest`` of its parameters, and a ``sample`` of their way."""
    slowdown, loop.slowdown = loop.slowdown, None
    if loop.place is not None:
        with without_dropout(loop.module):
            for _ in range(CHECKED_STEPS):
                take_step(loop, Stopwatch(loop.device))
    loop.update.settle()
    loop.slowdown = slowdown
    return {"digest": digest(loop.module), "sample": sample_way(spec, loop.module)}


def compute_alone(spec: LoopSpec, workers: int, device: torch.device) -> dict[str, Any]:
    """The expected result of these steps, from one process: a ``sample`` of the parameters' way."""
    module = build(spec.workload, spec.seed).to(device)
    optimizer = ddp_step.make_optimizer(module, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY)
    batches = [draw(spec, device, place) for place in range(workers)]
    with without_dropout(module):
        for _ in range(CHECKED_STEPS):
            optimizer.zero_grad()
            for features, labels, _ in batches:
                loss = nn.functional.cross_entropy(module(features), labels)
                torch.autograd.backward(loss / workers)
            optimizer.step()
    return {"sample": sample_way(spec, module)}


@contextlib.contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Every process would drop other values."""
    dropped = [each for each in module.modules() if isinstance(each, nn.Dropout) and each.training]
    for each in dropped:
        each.eval()
    try:
        yield
    finally:
        for each in dropped:
            each.train()


def flatten(module: nn.Module) -> torch.Tensor:
    """Its parameters, in their order, on the CPU."""
    return torch.cat([each.detach().flatten().cpu() for each in module.parameters()])


def digest(module: nn.Module) -> str:
    return hashlib.sha256(flatten(module).numpy().tobytes()).hexdigest()


def sample_way(spec: LoopSpec, module: nn.Module) -> list[float]:
    before, after = flatten(build(spec.workload, spec.seed)), flatten(module)
    count = len(after)
    places = torch.arange(min(count, SAMPLE)) * count // min(count, SAMPLE)
    way: list[float] = (after[places].double() - before[places].double()).tolist()
    return way
