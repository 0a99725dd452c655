"""A loss and a metric of one's own: a regression.

python -m mpiddp -n 2 examples/own_loss.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mpiddp.training import DataSet, Task, Trainer


def load(seed: int) -> DataSet:
    inputs = 4 * torch.rand(2000, 1, generator=torch.Generator().manual_seed(seed)) - 2
    data = TensorDataset(inputs, inputs.sin())
    train, test = torch.utils.data.random_split(data, [1600, 400], torch.Generator())
    return DataSet(train, test, classes=1)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def add_errors(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over the samples; the mean is reported."""
    return (outputs - targets).abs().sum()


task = Task(build, load, nn.functional.mse_loss, {"mean_error": add_errors})
Trainer(task, epochs=5).fit()
