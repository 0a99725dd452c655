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
"""Key in DDP's logging data: the numbers of parameters, as in "3 2, 1 0" for two buckets."""
USUAL_RATE = 100
"""DDP's own interval of logging, in steps, after the first ten."""


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
        assert model.logger is not None
        model._set_ddp_runtime_logging_sample_rate(1)
        model.logger.set_runtime_stats_and_log()
        model._set_ddp_runtime_logging_sample_rate(USUAL_RATE)
        found = model._get_ddp_logging_data()[ORDER]
    return [int(each) for each in found.replace(",", " ").split()]


def _can_rebuild(model: DistributedDataParallel) -> bool:
    return not (model.static_graph or model.find_unused_parameters)


def list_sparse(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters, by their names, of which DDP expects sparse gradients.

    Of a parameter in several modules, the first one decides.
    """
    found, seen = {}, set()
    for prefix, each in module.named_modules():
        is_sparse = isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse
        for name, parameter in each.named_parameters(prefix, recurse=False):
            if is_sparse and parameter.requires_grad and parameter not in seen:
                found[name] = parameter
            seen.add(parameter)
    return found


class _Zeros(torch.autograd.Function):
    """Passes a tensor through; the backward pass gives a parameter a gradient of zeros."""

    @staticmethod
    def forward(
        ctx: Any, passed: torch.Tensor, parameter: nn.Parameter, is_sparse: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        ctx.layout = torch.sparse_coo if is_sparse else torch.strided
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (parameter,) = ctx.saved_tensors
        return gradient, torch.zeros_like(parameter, layout=ctx.layout), None


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
    trained = [
        each
        for name, each in model.module.named_parameters()
        if each.requires_grad and name not in model.parameters_to_ignore
    ]
    if sorted(order) != list(range(len(trained))):
        return  # The checkpoint is of another model, which its parameters say more clearly.
    module, sparse = model.module, set(list_sparse(model.module).values())
    used = [trained[number] for number in reversed(order)]
    model.module = _Use(module, [(each, each in sparse) for each in used])
    try:
        start = torch.zeros((), device=trained[0].device, requires_grad=True)
        torch.autograd.backward(model(start))
    finally:
        model.module = module
    for parameter in trained:
        parameter.grad = None
