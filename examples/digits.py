"""A model of one's own, trained on the digits that come with mpiddp.

python -m mpiddp -n 2 examples/digits.py
"""

import torch
from torch import nn

from mpiddp.training import Task, Trainer


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    width = torch.Size(shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, classes))


trainer = Trainer(Task(model=build), data="digits", epochs=5, learning_rate=0.1)
trainer.fit()
