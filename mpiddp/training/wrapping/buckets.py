"""Measures how many gradients DDP should send at once: ``--bucket-mb auto``."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from mpiddp.training.data.samples import Batch
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.parallelism import AUTO_BUCKET
from mpiddp.training.step.step import Compute
from mpiddp.training.wrapping.overlap import warm_up
from mpiddp.training.wrapping.parallel import replicate
from mpiddp.training.wrapping.rehearsal import find_medians, rehearse, time_once

SIZES = (1, 5, 25, 100)
"""In MB. Small buckets leave earlier, large ones take fewer messages."""
VISITS, PASSES = 2, 3
"""How often each size is visited, in turns, and how many passes are timed then."""


def settle(
    configuration: Configuration, module: nn.Module, batch: Batch, compute: Compute
) -> Configuration:
    """Choose the size of DDP's buckets by measurement, if that is open; collective.

    All ranks choose the same one. Nothing else is left of the passes. ``batch`` lies on the
    module's device.
    """
    if configuration.bucket_mb != AUTO_BUCKET:
        return configuration
    sizes = list_sizes(module)
    if len(sizes) == 1:
        return replace(configuration, bucket_mb=str(sizes[0]))
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(VISITS):
        for size in sizes:
            chosen = replace(configuration, bucket_mb=str(size))
            seconds[size] += _time_passes(chosen, module, batch, compute)
    medians = find_medians(seconds.values(), batch.device)
    return replace(configuration, bucket_mb=str(sizes[medians.index(min(medians))]))


def list_sizes(module: nn.Module) -> list[int]:
    """Those that differ in what they do: one that takes all gradients is enough."""
    trained = [each for each in module.parameters() if each.requires_grad]
    total = sum(each.numel() * each.element_size() for each in trained)
    smaller = [size for size in SIZES if size * 2**20 < total]
    return [*smaller, *SIZES[len(smaller) : len(smaller) + 1]]


def _time_passes(
    configuration: Configuration, module: nn.Module, batch: Batch, compute: Compute
) -> list[float]:
    device = batch.device
    replica = replicate(module, device, configuration)
    seconds = []
    with rehearse(replica.model, module, batch, compute) as take_pass:
        warm_up(take_pass)
        for _ in range(PASSES):
            dist.barrier()
            seconds.append(time_once(take_pass, device))
    # Its hooks on the parameters go with it; the next wrapper must find none.
    del replica, take_pass
    gc.collect()
    return seconds
