"""Times the stages of this rank's training steps, without waiting for a GPU.

The training loop calls the clock at the end of each stage. On a CPU the clock reads the time; on a
GPU it records an event in the stream, and reads the event once the GPU has passed it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import nn

from mpiddp.torch_internals import find_queue_after_backward
from mpiddp.training.data.samples import Work
from mpiddp.training.records.history import STAGES


class StepStage(IntEnum):
    """The stages of a step, as `STAGES` names them."""

    READ = 0
    """Waiting for a batch, as far as reading its samples was the work on it."""
    TRANSFORM = 1
    """Waiting for a batch, as far as transforming its samples was."""
    TRANSFER = 2
    """To the device."""
    FORWARD = 3
    """With the loss."""
    BACKWARD = 4
    COMMUNICATION = 5
    """Waiting for gradients, weights and buffers of other ranks."""
    UPDATE = 6


@dataclass
class Costs:
    """What one rank's steps of an epoch took, so far."""

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(StepStage))
    """Of each stage."""
    steps: int = 0
    data_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of reading and of transforming samples, here or in workers."""
    sent_bytes: float = 0.0
    """Of gradients and weights, to other ranks (`mpiddp.training.step.traffic`)."""
    exchange_seconds: float = 0.0
    """In which gradients were under way, hidden or not; 0 if that is not known."""

    def count_step(self) -> None:
        self.steps += 1

    def count_exchange(self, sent_bytes: float, seconds: float = 0.0) -> None:
        """Bytes were sent; gradients were under way for so long."""
        self.sent_bytes += sent_bytes
        self.exchange_seconds += seconds


class StageClock:
    """Of one rank on a CPU. Each moment belongs to one stage."""

    def __init__(self, *, waits: bool = True) -> None:
        """``waits``: whether a backward pass may wait for other ranks."""
        self.costs = Costs()
        """What is counted here."""
        self.waits = waits
        """Whether a backward pass is to be watched."""
        self.last_of_backward = StepStage.COMMUNICATION if waits else StepStage.BACKWARD
        """What a backward pass ends with."""
        self._last = time.perf_counter()
        self._queue_after_backward = find_queue_after_backward()
        self._end_computing = partial(self.end, StepStage.BACKWARD)

    def count_in(self, costs: Costs) -> None:
        """An epoch brings its own."""
        self.costs = costs

    def skip(self) -> None:
        """What was done since the last call belongs to no stage."""
        self._last = time.perf_counter()

    def end(self, stage: StepStage) -> None:
        """What was done since the last call belongs to ``stage``."""
        now = time.perf_counter()
        self.costs.seconds[stage] += now - self._last
        self._last = now

    def end_reading(self, work: Work) -> None:
        """A batch has come. Waiting for it is split as the work on it was, here or in a worker.

        What took longer than this work, such as the start of workers, is no transform.
        """
        now, (read, transform), costs = time.perf_counter(), work, self.costs
        waited, self._last = now - self._last, now
        costs.data_seconds[0] += read
        if transform:
            costs.data_seconds[1] += transform
            transform = min(transform, waited * transform / (read + transform))
            costs.seconds[StepStage.TRANSFORM] += transform
        costs.seconds[StepStage.READ] += waited - transform

    def read(self) -> Any:
        """This moment: of time.perf_counter, or on a GPU an event in its stream."""
        return time.perf_counter()

    def count_exchange(self, begin: Any, end: Any, *, is_waited_for: bool = False) -> None:
        """Gradients were exchanged from ``begin`` to ``end``, as `read` gives them.

        ``is_waited_for``: the backward pass waited meanwhile.
        """
        self._add_exchange(end - begin, is_waited_for)

    def _add_exchange(self, seconds: float, is_waited_for: bool) -> None:
        self.costs.count_exchange(0, seconds)
        if is_waited_for:
            self.move(seconds, StepStage.BACKWARD, StepStage.COMMUNICATION)

    def move(self, seconds: float, source: StepStage, target: StepStage) -> None:
        """Time that was counted in ``source`` belongs to ``target``."""
        self.costs.seconds[source] -= seconds
        self.costs.seconds[target] += seconds

    def watch(self, loss: torch.Tensor) -> None:
        """Have the backward pass of ``loss`` say when its computing ends.

        What follows within the same backward pass is waiting: DDP does it at the end, after this.
        """
        loss.register_hook(self._queue_end)

    def _queue_end(self, _: torch.Tensor) -> None:
        # Autograd calls what was queued first before what DDP queues, which waits for all buckets.
        self._queue_after_backward(self._end_computing)

    def settle(self) -> None:
        """Wait until all that was done has been counted."""


class GpuStageClock(StageClock):
    """Of one rank on a GPU. Waiting for a batch is timed on the CPU, all else in the stream."""

    def __init__(self, device: torch.device, *, waits: bool = True) -> None:
        super().__init__(waits=waits)
        self._device, self._module = device, torch.get_device_module(device)
        self._marks: deque[tuple[torch.Event, StepStage | None]] = deque()
        """In their order, with the stage that ends there; the first one has been counted."""
        self._exchanges: deque[tuple[torch.Event, torch.Event, bool]] = deque()
        """That are not counted yet: begin, end, and whether the backward pass waited."""

    def read(self) -> torch.Event:
        event: torch.Event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def count_exchange(self, begin: Any, end: Any, *, is_waited_for: bool = False) -> None:
        self._exchanges.append((begin, end, is_waited_for))

    def _record(self, stage: StepStage | None) -> None:
        self._marks.append((self.read(), stage))
        self._count()

    def _count(self) -> None:
        """Count what the GPU has passed."""
        while len(self._marks) > 1 and self._marks[1][0].query():
            begin, _ = self._marks.popleft()
            end, stage = self._marks[0]
            if stage is not None:
                self.costs.seconds[stage] += begin.elapsed_time(end) / 1000
        while self._exchanges and self._exchanges[0][1].query():
            begin, end, is_waited_for = self._exchanges.popleft()
            self._add_exchange(begin.elapsed_time(end) / 1000, is_waited_for)

    def skip(self) -> None:
        super().skip()
        self._record(None)

    def end_reading(self, work: Work) -> None:
        super().end_reading(work)
        self._record(None)

    def end(self, stage: StepStage) -> None:
        self._record(stage)

    def settle(self) -> None:
        if self._marks:
            self._marks[-1][0].synchronize()
            self._count()


def make_clock(device: torch.device, ranks: int) -> StageClock:
    waits = ranks > 1
    return GpuStageClock(device, waits=waits) if device.type != "cpu" else StageClock(waits=waits)


def time_buffers(clock: StageClock, model: nn.Module, module: nn.Module) -> None:
    """Count DDP's broadcast of rank 0's buffers, before each forward pass, as communication.

    ``model``: DDP's wrapper of ``module``.
    """
    if model is not module and next(module.buffers(), None) is not None:

        def end(_: nn.Module, __: object) -> None:
            if module.training:
                clock.end(StepStage.COMMUNICATION)

        module.register_forward_pre_hook(end)


assert tuple(stage.name.lower() for stage in StepStage) == STAGES
