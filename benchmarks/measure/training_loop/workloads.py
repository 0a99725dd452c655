"""What both loops train: a model, and samples that need no download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data_sets import DataSet, Split

TRAINER, BARE = "mpiddp.train", "a bare loop"
CLASSES = 10
TEST_SAMPLES = 10


@dataclass(frozen=True)
class Workload:
    """A model, and its samples."""

    model: str
    batch_size: int
    """Samples per rank and step."""
    shape: tuple[int, ...]
    """Of one sample."""
    samples: int
    """Of an epoch: full batches, on one rank and on two."""

    def make(self, seed: int) -> DataSet:
        """Noise."""
        generator = np.random.default_rng(seed)

        def draw(count: int) -> Split:
            features = generator.random((count, *self.shape), dtype=np.float32)
            return Split(features, generator.integers(CLASSES, size=count))

        return DataSet(draw(self.samples), draw(TEST_SAMPLES), CLASSES)


WORKLOADS = {
    # The trainer's own work shows where a step's arithmetic is little. Small digits, and epochs
    # that end in each round.
    "convnet": Workload("convnet", 16, (1, 8, 8), 2304),
    # CIFAR-10's images, and nearly as many: an epoch takes seconds on any GPU.
    "resnet18": Workload("resnet18", 64, (3, 32, 32), 49_920),
}


def find_workload(name: str) -> Workload:
    """Raises ConfigurationError."""
    if name not in WORKLOADS:
        raise ConfigurationError(f"--models: expected {' or '.join(WORKLOADS)}, found {name!r}")
    return WORKLOADS[name]
