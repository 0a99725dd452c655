"""A loss and a metric of one's own: a regression.

python -m mpiddp -n 2 examples/own_loss.py
"""

import numpy as np
import torch
from torch import nn

import mpiddp
from mpiddp.training.data import split_by_hash


def load(seed: int) -> mpiddp.DataSet:
    inputs = np.random.default_rng(seed).uniform(-2, 2, size=(2000, 1)).astype(np.float32)
    return split_by_hash(inputs, np.sin(inputs), classes=1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def add_errors(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over the samples; the mean is reported."""
    return (outputs - targets).abs().sum()


task = mpiddp.Task(build, load, nn.functional.mse_loss, {"mean_error": add_errors})
mpiddp.Trainer(task, epochs=5).fit()
