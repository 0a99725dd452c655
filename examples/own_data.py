"""Data of one's own: any torch dataset, the same on every rank, which trains on its part.

python -m mpiddp -n 2 examples/own_data.py
"""

import torch
from torch.utils.data import Dataset

from mpiddp.training import DataSet, Task, Trainer


class Circle(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points in a square; the class says whether they lie in a circle."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.points = 2 * torch.rand(samples, 2, generator=generator) - 1

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = self.points[position]
        return point, (point.square().sum() < 0.6).long()


def load(seed: int) -> DataSet:
    return DataSet(Circle(1600, seed), Circle(400, seed + 1), classes=2)


trainer = Trainer(Task(data=load), model="mlp", epochs=5, batch_size=8)
trainer.fit()
