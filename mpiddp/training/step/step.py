"""One step of training: forward and backward passes over a batch, then an update."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.samples import Batch
from mpiddp.training.data.structure import call_model, count_samples, map_leaves, split_leaves
from mpiddp.training.records.metrics import Saved, Totals
from mpiddp.training.step.divergence import LossGuard, MarkedModel
from mpiddp.training.step.moving_average import MovingAverage
from mpiddp.training.step.optimizer_step import GuardedUpdate, LocalUpdate
from mpiddp.training.step.precision import Precision
from mpiddp.training.step.stages import StageClock, StepStage
from mpiddp.training.step.traffic import Traffic
from mpiddp.training.task.task import LossFunction

Compute: TypeAlias = Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]
"""From a model and a batch on its device to outputs, for the metrics, and the mean loss."""


@dataclass(frozen=True)
class Forward:
    """A forward pass, and its loss."""

    loss: LossFunction
    """Of training: with smoothed labels, if any."""
    precision: Precision
    memory_format: torch.memory_format = torch.preserve_format
    """Of inputs."""

    def __call__(
        self, model: nn.Module, batch: Batch, compute: Compute | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A model's outputs and its mean loss, for a batch on its device.

        ``compute``: a script's own, in place of the model and the loss.
        """
        if self.precision.dtype == torch.float32:
            return self._compute(model, batch, compute)
        with self.precision.autocast():
            return self._compute(model, batch, compute)

    def _compute(
        self, model: nn.Module, batch: Batch, compute: Compute | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if compute is not None:
            return compute(model, Batch(batch.inputs, batch.targets))
        inputs = batch.inputs
        if self.memory_format != torch.preserve_format:
            inputs = self._arrange(inputs)
        outputs = model(inputs) if isinstance(inputs, torch.Tensor) else call_model(model, inputs)
        return outputs, self.loss(outputs, batch.targets)

    def _arrange(self, inputs: Any) -> Any:
        """The inputs, as they are to be stored; of several, the images."""

        def store(tensor: torch.Tensor) -> torch.Tensor:
            is_image = tensor.dim() == 4
            return tensor.contiguous(memory_format=self.memory_format) if is_image else tensor

        return map_leaves(store, inputs)


UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""In DDP's error: the numbers of trained parameters."""
FEW = 4
"""Names in a message."""


def check_gradients(model: nn.Module) -> None:
    """After a backward pass: whether it has made all gradients that DDP waits for.

    ``model``: what has taken the pass. Raises ConfigurationError.
    """
    ddp: Any = model
    if not isinstance(ddp, DistributedDataParallel):
        ddp = getattr(model, "_orig_mod", None)
        if not isinstance(ddp, DistributedDataParallel):
            return
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        if (found := UNUSED.search(str(error))) is None:
            raise
        unused = [int(each) for each in found[1].split()]
    else:
        return
    raise ConfigurationError(_describe_unused(ddp, unused))


def _describe_unused(ddp: DistributedDataParallel, numbers: list[int]) -> str:
    module = ddp.module.module if isinstance(ddp.module, MarkedModel) else ddp.module
    names = {id(each): name for name, each in module.named_parameters()}
    trained = [each for each in ddp.module.parameters() if each.requires_grad]
    unused = [names.get(id(trained[number]), "") for number in numbers]
    listed = ", ".join(unused[:FEW]) + (f" and {len(unused) - FEW} more" if unused[FEW:] else "")
    advice = "give --find-unused-parameters, or have the loss depend on them"
    if ddp.find_unused_parameters:
        advice = "have the loss depend on all outputs of the model"
    return (
        "parallel: ddp expected a gradient of each trained parameter in every pass, found none of "
        f"{listed}: {advice}"
    )


@dataclass(frozen=True)
class Engine:
    """A model, and how its weights are changed."""

    model: nn.Module
    """What takes a batch: DDP's wrapper, or the module itself."""
    module: nn.Module
    update: GuardedUpdate
    guard: LossGuard
    forward: Forward
    passes: int = 1
    """Forward and backward passes that a step's batch is cut into."""
    hold: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around all passes of a step but the last: ranks exchange gradients in the last one only."""
    clock: StageClock = field(default_factory=StageClock)
    traffic: Traffic = field(default_factory=Traffic)
    about: str = ""
    """How ranks share the model: a line for the console, or nothing."""
    gathers: bool = False
    """Whether every forward pass is collective, and parameters are parts of sharded ones."""

    @contextmanager
    def at_average(self) -> Iterator[None]:
        """Within it the module goes by the moving average of its weights, if there is one, and
        has the same weights on all ranks. Collective."""
        with self.united(), nullcontext() if self.average is None else self.average.applied():
            yield

    @property
    def average(self) -> MovingAverage | None:
        """The moving average of the weights, if there is one."""
        return self.update.average if isinstance(self.update, LocalUpdate) else None

    def united(self) -> AbstractContextManager[object]:
        """Within it the module has the same weights on all ranks. Collective."""
        return self.update.united() if isinstance(self.update, LocalUpdate) else nullcontext()

    def take_step(
        self,
        batch: Batch,
        device: torch.device,
        totals: Totals,
        describe: Callable[[], str],
        compute: Compute | None = None,
    ) -> torch.Tensor | None:
        """Change the weights by a batch of this rank. Collective.

        ``totals`` gets the batch's loss and metrics; ``describe`` names step, rank and samples;
        ``compute`` is a script's own. The clock gets the time since it was last told of a stage's
        end.

        Returns the loss if it is not finite: the step is left out then, on all ranks. Raises
        MpiddpError if such a loss ends the run.
        """
        guard, update, clock = self.guard, self.update, self.clock
        before: Saved | None = None
        if guard.skips:
            before = totals.save()
            guard.begin_step()
        update.begin_step()
        bad: torch.Tensor | None = None
        *first, part = split_batch(batch, self.passes) if self.passes > 1 else (batch,)
        for each in first:
            with self.hold():
                loss, is_good = self._take_pass(each.to(device), totals, describe, compute)
            bad = bad if is_good else loss
        loss, is_good = self._take_pass(part.to(device), totals, describe, compute)
        bad = bad if is_good else loss
        check_gradients(self.model)
        if not update.finish_step(is_bad=bad is not None):
            guard.restore()
        if update.averages_weights:
            update.exchange_weights()
        if bad is not None and before is not None:
            totals.restore(before)
            totals.leave_out()
        clock.end(self.traffic.update_stage)
        clock.costs.count_step()
        return bad

    def _take_pass(
        self, part: Batch, totals: Totals, describe: Callable[[], str], compute: Compute | None
    ) -> tuple[torch.Tensor, bool]:
        """A forward and a backward pass. Returns the loss, and whether the step may be taken."""
        clock, forward, weight = self.clock, self.forward, part.weight
        clock.end(StepStage.TRANSFER)
        outputs, loss = forward(self.model, part, compute)
        value = self.guard.examine(loss, describe)
        weighted = loss if weight == 1 else loss * weight
        scaler = forward.precision.scaler
        if scaler is not None:
            weighted = scaler.scale(weighted)
        if clock.waits:
            clock.watch(weighted)
        clock.end(StepStage.FORWARD)
        torch.autograd.backward(weighted)
        clock.end(clock.last_of_backward)
        if self.traffic.counts_passes:
            self.traffic.count(clock)
        if weight > 0:
            totals.add(loss.detach() if value is None else value, outputs, part.targets)
            clock.end(StepStage.FORWARD)
        return loss, value is None or math.isfinite(value)


def split_batch(batch: Batch, passes: int) -> list[Batch]:
    """Cut a batch into ``passes`` parts, each with its share of the batch's weight.

    The sum of the parts' mean losses, each times its weight, is the batch's mean loss times the
    batch's. A batch with fewer samples has its first part again, with the weight 0, so that every
    rank takes as many passes.
    """
    if passes == 1:
        return [batch]
    inputs, targets = (split_leaves(each, passes) for each in (batch.inputs, batch.targets))
    total = count_samples(batch.targets)
    return [
        Batch(part, target, batch.weight * count / total)
        if (count := count_samples(target))
        else Batch(inputs[0], targets[0], 0.0)
        for part, target in zip(inputs, targets, strict=True)
    ]
