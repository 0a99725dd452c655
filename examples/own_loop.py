"""A loop of one's own, whose samples are mixed in pairs (Zhang et al., mixup, ICLR 2018).

python -m mpiddp -n 2 examples/own_loop.py
"""

import torch
from torch import nn

from mpiddp.training import Batch, Trainer


def mix(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs, which the metrics are of, and the loss."""
    share = torch.distributions.Beta(0.2, 0.2).sample()
    other = torch.randperm(len(batch.targets))
    outputs = model(share * batch.inputs + (1 - share) * batch.inputs[other])
    first = nn.functional.cross_entropy(outputs, batch.targets)
    second = nn.functional.cross_entropy(outputs, batch.targets[other])
    return outputs, share * first + (1 - share) * second


trainer = Trainer(data="digits", epochs=4)
for step in trainer.steps():
    step.take(mix if step.epoch < 4 else None)
