"""A loss that is not finite: the run ends there, or no rank applies that step.

To end, the rank that has found it fails before its backward pass: the gradients of that step never
come together, so no rank's weights change. To leave the step out, all ranks must know of it. DDP
averages one more number with the gradients, which is above 0 if any rank's loss was not finite,
and parameter servers drop gradients that are marked. Neither needs an additional message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.torch_internals import leave_uncompiled


class _Mark(torch.autograd.Function):
    """Passes a model's outputs through; the backward pass gives ``flag`` its gradient."""

    @staticmethod
    def forward(
        ctx: Any, outputs: torch.Tensor, flag: torch.Tensor, model: MarkedModel
    ) -> torch.Tensor:
        ctx.model = model
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, ctx.model.make_mark(), None


class MarkedModel(nn.Module):
    """A model with one more number to average, which says whether a rank's loss was not finite.

    It goes into DDP in the model's place. DDP averages the number in a bucket with gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        like = next(each for each in module.parameters() if each.requires_grad)
        self.flag = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        self.loss: torch.Tensor | None = None
        """Of the present step; None in passes that count for nothing."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._mark(self.module(*inputs, **named))

    @leave_uncompiled
    def _mark(self, outputs: Any) -> Any:
        # Not compiled: a compiled backward pass would give the mark of the pass that it was made
        # in, whatever the loss is.
        count = 0

        def mark(tensor: torch.Tensor) -> Any:
            nonlocal count
            if not tensor.requires_grad:
                return tensor
            count += 1
            return _Mark.apply(tensor, self.flag, self)  # type: ignore[no-untyped-call]

        # Each of them: the loss may need only one.
        marked = tree_map_only(torch.Tensor, mark, outputs)
        if torch.is_grad_enabled() and count == 0:
            raise ConfigurationError(
                "on_nan: skip expects a model that returns tensors with gradients, alone or in "
                f"tuples, lists and dictionaries, found {type(outputs).__name__}: return one of "
                "these, or give --on-nan stop"
            )
        return marked

    def make_mark(self) -> torch.Tensor:
        """1 if this rank's loss is not finite, else 0; on the device, without waiting for it."""
        if self.loss is None:
            return torch.zeros_like(self.flag)
        return (~torch.isfinite(self.loss)).to(self.flag.dtype).view(1)

    def begin_step(self) -> None:
        self.flag.grad = None

    def is_refused(self, *, is_bad: bool) -> bool:
        """Whether any rank's loss was not finite, after a backward pass; the same on all ranks."""
        gradient = self.flag.grad
        return gradient is not None and gradient.item() != 0


class SharedRefusal:
    """Refuses a step on all ranks if DDP does not average gradients, by one more all-reduce."""

    def __init__(self, device: torch.device) -> None:
        self._flag = torch.zeros((), dtype=torch.int32, device=device)

    def begin_step(self) -> None:
        """Nothing of the step before is left."""

    def is_refused(self, *, is_bad: bool) -> bool:
        """After a backward pass: whether any rank's loss was not finite. Collective."""
        self._flag.fill_(is_bad)
        dist.all_reduce(self._flag, op=dist.ReduceOp.MAX)
        return bool(self._flag.item())


class LossGuard:
    """Looks at each loss of one rank."""

    def __init__(self, module: nn.Module, *, skips: bool, marked: MarkedModel | None) -> None:
        """
        Args:
            module: whose weights are trained. A step that is left out changes no buffer of it.
            skips: whether steps are left out; they end the run otherwise.
            marked: what tells the other ranks, with DDP.
        """
        self._module = module
        self.skips = skips
        self._marked = marked
        self._buffers = list(module.buffers()) if skips else []
        self._saved = [torch.empty_like(each) for each in self._buffers]
        self._late: tuple[torch.Tensor, torch.Event, Callable[[], str]] | None = None

    def begin_step(self) -> None:
        """Before a forward pass."""
        if self._buffers:
            torch._foreach_copy_(self._saved, self._buffers)

    def examine(self, loss: torch.Tensor, describe: Callable[[], str]) -> float | None:
        """Before the backward pass: the loss; None on a GPU if no step is skipped: read later.

        ``describe`` names step, rank and samples. Raises MpiddpError if the loss is not finite and
        the run is to end, which is also where skipping cannot help, since the weights themselves
        are not finite. On a GPU the run ends one step later.
        """
        if self._marked is not None:
            self._marked.loss = loss.detach()
        if not loss.is_cpu and not self.skips:
            self._examine_later(loss, describe)
            return None
        value: float = loss.item()
        if not math.isfinite(value):
            self._refuse(value, describe)
        return value

    def settle(self) -> None:
        """After the last step of an epoch, and before weights are saved. Raises MpiddpError."""
        if self._late is not None:
            value, event, describe = self._late
            self._late = None
            event.synchronize()
            if not math.isfinite(found := value.item()):
                self._refuse(found, describe)

    def restore(self) -> None:
        """After a step that was left out: buffers are as they were before it."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._saved)

    def _examine_later(self, loss: torch.Tensor, describe: Callable[[], str]) -> None:
        self.settle()
        value = torch.empty((), dtype=loss.dtype, pin_memory=True)
        value.copy_(loss.detach(), non_blocking=True)
        event = torch.get_device_module(loss.device).Event()
        event.record()
        self._late = value, event, describe

    def _refuse(self, value: float, describe: Callable[[], str]) -> None:
        """Raise MpiddpError, unless leaving out the step helps."""
        found = f"expected a finite training loss, found {value} {describe()}"
        if not self.skips:
            raise MpiddpError(
                f"{found}: training has diverged, or a sample is bad; try a smaller "
                "--learning-rate, or --on-nan skip"
            )
        if not all(torch.isfinite(each).all() for each in self._module.parameters()):
            raise MpiddpError(
                f"{found}: the weights are not finite any more, so that leaving out the step would "
                "not help; try a smaller --learning-rate"
            )


def refuse_divergence(what: str, loss: float, epoch: int) -> None:
    """Raise MpiddpError if an epoch's mean loss is not finite. ``what``: training or test."""
    if not math.isfinite(loss):
        raise MpiddpError(
            f"expected a finite {what} loss, found {loss} in epoch {epoch}: training has "
            "diverged; try a smaller --learning-rate"
        )
