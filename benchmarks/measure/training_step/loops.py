"""One contender on one rank: steps, and passes without synchronisation, against the clock."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks.measure.baselines.ddp_step import finish
from benchmarks.measure.training_step.synchronisations import LoopSpec
from benchmarks.measure.training_step.traffic import subtract
from benchmarks.records.workloads import draw_batch
from mpiddp.training.data.samples import Batch
from mpiddp.training.options.groups.straggler import Slowdown, check_straggler, parse_straggler
from mpiddp.training.records.network import read_counters
from mpiddp.training.wrapping.rehearsal import rehearse, time_pass

if TYPE_CHECKING:
    from mpiddp.training.step.optimizer_step import Update

WARM_STEPS = 3
"""Steps after the check, before the first that count: a buffer has its large pages from its third
visit."""
WARM_UP = 1
"""Untimed steps of a visit."""


@dataclass
class StepLoop:
    """Ready to take steps."""

    model: nn.Module
    """What takes a batch: a wrapper, or the module itself."""
    module: nn.Module
    update: Update
    workers: tuple[int, ...]
    place: int | None
    """This rank's among them; None where it only serves."""
    batch: Batch
    quiet: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Within it a pass is not synchronised."""
    bare: nn.Module | None = None
    """What takes such a pass, where it is not the model."""
    share: int | None = None
    """Samples of such a pass, where they are not the whole batch."""
    updates_here: bool = True
    """Whether ``finish_step`` is this rank's optimizer and nothing else."""
    slowdown: Slowdown | None = None
    step: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.batch.device


def draw(spec: LoopSpec, device: torch.device, place: int) -> Batch:
    """One worker's batch, on the device."""
    features, labels = draw_batch(spec.workload, spec.batch_size, spec.seed, place)
    return Batch(features.to(device), labels.to(device))


def make_slowdown(
    spec: LoopSpec, module: torch.nn.Module, batch: Batch, place: int, workers: tuple[int, ...]
) -> Slowdown | None:
    """A worker that is slow on purpose, in both jobs alike; None if none was asked for.

    Raises ConfigurationError if that rank computes nothing.
    """
    if spec.straggler is None:
        return None
    straggler = parse_straggler(spec.straggler)
    check_straggler(straggler, workers)
    with rehearse(module, module, batch) as take_pass:
        seconds = time_pass(take_pass, batch[0].device)
    return Slowdown(straggler, place, workers, spec.seed, seconds, batch[0].device)


def take_step(loop: StepLoop, watch: Stopwatch) -> None:
    """As the trainer does; ``watch`` times the update."""
    features, labels = loop.batch.inputs, loop.batch.targets
    if loop.slowdown is not None:
        loop.slowdown.wait(loop.step)
    loss = nn.functional.cross_entropy(loop.model(features), labels)
    loop.update.begin_step()
    torch.autograd.backward(loss)
    watch.mark()
    loop.update.finish_step()
    watch.mark()
    loop.step += 1


def take_pass(loop: StepLoop) -> None:
    """Forward and backward without synchronisation, and no update."""
    features, labels = loop.batch.inputs, loop.batch.targets
    if loop.slowdown is not None:
        loop.slowdown.wait(loop.step)
    with loop.quiet():
        outputs = (loop.bare or loop.model)(features[: loop.share])
        loss = nn.functional.cross_entropy(outputs, labels[: loop.share])
        loop.update.begin_step()
        torch.autograd.backward(loss)
    loop.step += 1


class Stopwatch:
    """Adds up a part of each step; on a GPU by its stream's events, which steps do not wait for."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._times: list[Any] = []

    def mark(self) -> None:
        """The part begins, or ends."""
        if self._is_gpu:
            # torch has no types for it.
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._times.append(event)
        else:
            self._times.append(time.perf_counter())

    def read(self) -> float:
        """The seconds so far; all that was begun must be finished."""
        pairs = zip(self._times[::2], self._times[1::2], strict=True)
        if self._is_gpu:
            return sum(1e-3 * float(begin.elapsed_time(end)) for begin, end in pairs)
        return float(sum(end - begin for begin, end in pairs))


def warm_up(loop: StepLoop, steps: int) -> None:
    if loop.place is None:
        return
    watch = Stopwatch(loop.device)
    for _ in range(steps):
        take_step(loop, watch)
    finish(loop.device)


def measure(
    loop: StepLoop, steps: int, barrier: Callable[[], object], *, counts: bool
) -> dict[str, Any]:
    """Time so many steps behind a barrier, one after the other, and passes without synchronisation.

    Returns this rank's ``samples`` and ``seconds`` of all steps, ``update`` of them, and
    ``compute``, of as many passes; nothing where the rank only serves. If it ``counts``, the bytes
    of its node's ``interfaces`` as well.
    """
    found: dict[str, Any] = {}
    gc.disable()
    try:
        warm_up(loop, WARM_UP)
        barrier()
        before = read_counters() if counts else {}
        barrier()
        if loop.place is not None:
            found |= _time_steps(loop, steps)
        barrier()
        if counts:
            found["interfaces"] = subtract(before, read_counters())
        if loop.place is not None:
            found["compute"] = _time_passes(loop, steps)
        # No rank sleeps again before all have finished.
        barrier()
    finally:
        gc.enable()
    return found


def _time_steps(loop: StepLoop, steps: int) -> dict[str, float]:
    watch = Stopwatch(loop.device)
    begin = time.perf_counter()
    for _ in range(steps):
        take_step(loop, watch)
    finish(loop.device)
    seconds = time.perf_counter() - begin
    update = watch.read() if loop.updates_here else 0.0
    return {"samples": steps * len(loop.batch[1]), "seconds": seconds, "update": update}


def _time_passes(loop: StepLoop, steps: int) -> float:
    count = max(1, steps // 2)
    begin = time.perf_counter()
    for _ in range(count):
        take_pass(loop)
    finish(loop.device)
    seconds = time.perf_counter() - begin
    return seconds / count * steps
