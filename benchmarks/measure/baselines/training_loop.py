"""A training loop as somebody writes it who needs nothing but speed. It knows nothing of mpiddp.

All samples lie on the device and are taken by an index that is drawn once per epoch; there is no
loader. The optimizer is fused, gradients are views of DDP's buckets, and nothing waits for a loss.
What was tried beside that, on CPUs: ``torch.from_numpy`` in each step, a ``DataLoader`` without
workers, copies of gradients into buckets, and one tensor of sums whose elements are added to, all
of them slower; ``static_graph``: no difference. Outputs that are kept, and counted at an epoch's
end, save about a hundredth of the convnet's step, but take memory with each sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import cast

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Settings:
    """What the trainer beside it has, too."""

    batch_size: int
    """Samples per rank and step."""
    learning_rate: float
    momentum: float
    weight_decay: float
    precision: str
    """``fp32`` or ``bf16``."""
    channels_last: bool
    compile: bool


def take_steps(
    model: nn.Module, features: torch.Tensor, labels: torch.Tensor, settings: Settings
) -> Iterator[None]:
    """Train without end, in the default process group; returns after each step. Collective.

    ``features``: all training samples, (samples, …), with their ``labels``, on the device.
    """
    device = features.device
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    if settings.channels_last:
        features = features.contiguous(memory_format=layout)
    # torch's types leave out memory_format.
    model = model.to(device, memory_format=layout)  # type: ignore[call-overload]
    wrapped: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if settings.compile:
        wrapped = cast(nn.Module, torch.compile(wrapped, dynamic=False))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.learning_rate, momentum=settings.momentum, nesterov=True,
        weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip
    loss_function = nn.CrossEntropyLoss()
    narrow = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
    for epoch in count():
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(labels), generator=generator)[rank::ranks].to(device)
        loss_sum = torch.zeros((), device=device)
        correct = torch.zeros((), dtype=torch.int64, device=device)
        for index in order.split(settings.batch_size):
            inputs, targets = features[index], labels[index]
            optimizer.zero_grad(set_to_none=True)
            with narrow:
                outputs = wrapped(inputs)
                loss = loss_function(outputs, targets)
            loss.backward()
            optimizer.step()
            loss_sum.add_(loss.detach(), alpha=len(targets))
            correct += (outputs.argmax(dim=1) == targets).sum()
            yield
        sums = torch.stack([loss_sum, correct.to(loss_sum.dtype)])
        distributed.all_reduce(sums)
        # For what a script would print.
        sums.tolist()
