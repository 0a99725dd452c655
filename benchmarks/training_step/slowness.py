"""A worker that is made slow on purpose, in both jobs alike."""

from __future__ import annotations

import torch

from benchmarks.training_step.orders import Order
from mpiddp.training.rehearsal import rehearse, time_pass
from mpiddp.training.straggler import Slowdown, check_straggler, parse_straggler


def make_slowdown(
    order: Order,
    module: torch.nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    place: int,
    workers: tuple[int, ...],
) -> Slowdown | None:
    """As the trainer makes one. Raises ConfigurationError where that rank computes nothing."""
    if order.straggler is None:
        return None
    straggler = parse_straggler(order.straggler)
    check_straggler(straggler, workers)
    with rehearse(module, module, batch) as take_pass:
        seconds = time_pass(take_pass, batch[0].device)
    return Slowdown(straggler, place, workers, order.seed, seconds, batch[0].device)
