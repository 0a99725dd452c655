"""DDP's buckets: the same in the first step after a restart as in an uninterrupted run.

DDP sums gradients in buckets. It fills them in the order of the model's parameters in the first
step, and from the second step on in the order in which the first backward pass made gradients. How
an all-reduce cuts a bucket decides the order of its additions, so a resumed run would differ in the
last bits. A checkpoint therefore holds the order, and a restart takes one pass that makes gradients
in this order: without data, before the state is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ORDER = "rebuilt_per_bucket_param_indices"
"""In DDP's account of itself: the numbers of parameters, as in "3 2, 1 0" for two buckets."""
USUAL_RATE = 100
"""Steps between two of these accounts, after the first ten."""


def read_bucket_order(model: nn.Module) -> list[int] | None:
    """Numbers of the trained parameters in the order of DDP's buckets; between two steps.

    None if DDP has not taken a step yet, or never changes its buckets, and for other models.
    Collective.
    """
    if not isinstance(model, DistributedDataParallel) or not _can_rebuild(model):
        return None
    # The next forward pass would do so, now that gradients have been made once.
    if not (model.reducer._rebuild_buckets() or model._has_rebuilt_buckets):
        return None
    # Read by the forward pass, which then finds nothing to rebuild.
    model._has_rebuilt_buckets = True
    if not (found := model._get_ddp_logging_data().get(ORDER)):
        # No forward pass has written it yet.
        model._set_ddp_runtime_logging_sample_rate(1)
        model.logger.set_runtime_stats_and_log()
        model._set_ddp_runtime_logging_sample_rate(USUAL_RATE)
        found = model._get_ddp_logging_data()[ORDER]
    return [int(each) for each in found.replace(",", " ").split()]


def _can_rebuild(model: DistributedDataParallel) -> bool:
    return not (model.static_graph or model.find_unused_parameters)


class _Zeros(torch.autograd.Function):
    """Passes a tensor through; the backward pass gives a parameter a gradient of zeros."""

    @staticmethod
    def forward(
        ctx: Any, passed: torch.Tensor, parameter: nn.Parameter, is_sparse: bool
    ) -> torch.Tensor:
        ctx.parameter, ctx.is_sparse = parameter, is_sparse
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        layout = torch.sparse_coo if ctx.is_sparse else torch.strided
        return gradient, torch.zeros_like(ctx.parameter, layout=layout), None


class _Use(nn.Module):
    """Uses parameters one after the other, so that their gradients come in the opposite order."""

    def __init__(self, module: nn.Module, used: Sequence[tuple[nn.Parameter, bool]]) -> None:
        """``used``: with each parameter, whether DDP expects sparse gradients."""
        super().__init__()
        self.module = module
        """Whose buffers DDP broadcasts."""
        self._used = used

    def forward(self, passed: torch.Tensor) -> torch.Tensor:
        for parameter, is_sparse in self._used:
            passed = _Zeros.apply(passed, parameter, is_sparse)  # type: ignore[no-untyped-call]
        return passed


def restore_bucket_order(model: nn.Module, order: Sequence[int] | None) -> None:
    """Have DDP arrange its buckets in this order; before its first step. Collective.

    Gradients, which are zero or None, are None afterwards. Buffers become rank 0's.
    """
    if order is None or not isinstance(model, DistributedDataParallel) or not _can_rebuild(model):
        return
    # What DDP was made from.
    trained, are_sparse = model._build_params_for_reducer()
    if sorted(order) != list(range(len(trained))):
        return  # The checkpoint is of another model, which its parameters say more clearly.
    module, numbers = model.module, list(reversed(order))
    model.module = _Use(module, [(trained[each], are_sparse[each]) for each in numbers])
    try:
        start = torch.zeros((), device=trained[0].device, requires_grad=True)
        torch.autograd.backward(model(start))
    finally:
        model.module = module
    for parameter in trained:
        parameter.grad = None
