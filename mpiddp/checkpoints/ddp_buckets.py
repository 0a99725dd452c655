"""DDP's buckets: the same in the first step after a restart as in an uninterrupted run.

DDP sums gradients in buckets. It fills them in the order of the model's parameters in the first
step, and from the second step on in the order in which the first backward pass made gradients. How
an all-reduce cuts a bucket decides the order of its additions, so a resumed run would differ in the
last bits. A checkpoint therefore holds the order, and a restart takes one pass that makes gradients
in this order: without data, before the state is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
    numbers = {id(each): number for number, each in enumerate(_list_trained(model))}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [numbers[id(each)] for bucket in buckets for each in bucket.parameters()]


def _can_rebuild(model: DistributedDataParallel) -> bool:
    return not (model.static_graph or model.find_unused_parameters)


def _list_trained(model: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = model.parameters_to_ignore
    named = model.module.named_parameters()
    return [each for name, each in named if each.requires_grad and name not in ignored]


class _Sum(nn.Module):
    """Uses parameters one after the other, so that their gradients come in the opposite order."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.module = module
        """Whose buffers DDP broadcasts."""
        self._used = list(parameters)

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        for parameter in self._used:
            total = total + 0 * parameter.sum()
        return total


def restore_bucket_order(model: nn.Module, order: Sequence[int] | None) -> None:
    """Have DDP arrange its buckets in this order; before its first step. Collective.

    Gradients, which are zero or None, are None afterwards. Buffers become rank 0's.
    """
    if order is None or not isinstance(model, DistributedDataParallel) or not _can_rebuild(model):
        return
    trained = _list_trained(model)
    if sorted(order) != list(range(len(trained))):
        return  # The checkpoint is of another model, which its parameters say more clearly.
    module = model.module
    model.module = _Sum(module, [trained[number] for number in reversed(order)])
    try:
        torch.autograd.backward(model(torch.zeros((), device=trained[0].device)))
    finally:
        model.module = module
    for parameter in trained:
        parameter.grad = None
