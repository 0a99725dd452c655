"""Activation checkpointing: recomputes activations in the backward pass.

T. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, 2016.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint


def recompute(groups: Iterable[nn.Module]) -> None:
    """Have each of the groups keep nothing but its inputs between forward and backward pass.

    Names of parameters and buffers stay.
    """
    for group in groups:
        again = partial(_make_contexts, group)
        group.forward = partial(checkpoint, group.forward, use_reentrant=False, context_fn=again)


def _make_contexts(
    group: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first computation, and around the second one."""
    return nullcontext(), _keep_averages(group)


@contextmanager
def _keep_averages(group: nn.Module) -> Iterator[None]:
    """Normalisation takes no second account of the same samples in its running averages."""
    found = [each for each in group.modules() if isinstance(each, _NormBase)]
    before = [
        (each.momentum, None if each.num_batches_tracked is None else int(each.num_batches_tracked))
        for each in found
    ]
    for each in found:
        each.momentum = 0.0
    try:
        yield
    finally:
        for each, (momentum, count) in zip(found, before, strict=True):
            each.momentum = momentum
            if count is not None and each.num_batches_tracked is not None:
                each.num_batches_tracked.fill_(count)
