"""The data sets: each is loaded whole, in numpy, and split in the same way by every rank."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from mpiddp.training.config import Configuration
from mpiddp.training.factories import call_factory, find_factory
from mpiddp.training.registry import DATASETS

DIGITS = 10
IMAGE = (1, 8, 8)
"""Channels, height and width of the digits, and of synthetic images."""
TOY_FEATURES = 10


@dataclass(frozen=True)
class Split:
    """Samples and their classes, as they are fed to a model."""

    features: NDArray[np.float32]
    """Shape (samples, …)."""
    labels: NDArray[np.int64]
    """Shape (samples,); 0 to classes - 1."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DataSet:
    """A training and a test split with the same classes.

        def load() -> mpiddp.DataSet:
            points = np.random.normal(size=(500, 2)).astype(np.float32)
            return split_by_hash(points, (points[:, 0] > 0).astype(np.int64), classes=2)

    It is the same on every rank, which trains on its part.
    """

    train: Split
    test: Split
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.train.features.shape[1:]

    def digest(self) -> str:
        """Return the SHA-256 of all samples and labels, to compare between ranks."""
        digest = hashlib.sha256(repr((self.shape, self.classes, len(self.train))).encode())
        for split in (self.train, self.test):
            digest.update(split.features.tobytes())
            digest.update(split.labels.tobytes())
        return digest.hexdigest()


def load(configuration: Configuration) -> DataSet:
    """Load the data set that the configuration names, or that its factory returns.

    Raises ConfigurationError.
    """
    name = configuration.data
    if name in DATASETS:
        factory = partial(find_factory("data", DATASETS[name].loader), configuration)
        return call_factory("data", factory, DataSet)
    return call_factory("data", find_factory("data", name), DataSet, seed=configuration.seed)


def load_digits(_: Configuration) -> DataSet:
    """Return 1,797 handwritten digits, 1 x 8 x 8, scaled to 0…1.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998
    (digits.LICENSE.txt). The split depends on nothing in the configuration.
    """
    resource = files("mpiddp.training") / "digits.csv.gz"
    with resource.open("rb") as file, gzip.open(file, "rt", encoding="ascii") as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.uint8)
    features = (table[:, :-1] / np.float32(16)).astype(np.float32).reshape(-1, *IMAGE)
    return split_by_hash(features, table[:, -1].astype(np.int64), DIGITS)


def make_synthetic(configuration: Configuration) -> DataSet:
    """Return made-up images, 1 x 8 x 8: ten random prototypes, one per class, under noise."""
    generator = np.random.default_rng(configuration.seed)
    prototypes = generator.normal(size=(DIGITS, *IMAGE))
    labels = generator.integers(DIGITS, size=configuration.samples)
    noise = generator.normal(size=(configuration.samples, *IMAGE))
    features = (prototypes[labels] + noise).astype(np.float32)
    return split_by_hash(features, labels, DIGITS)


def make_toy(configuration: Configuration) -> DataSet:
    """Return made-up points of 10 numbers, in 2 classes on the two sides of a random plane."""
    generator = np.random.default_rng(configuration.seed)
    normal = generator.normal(size=TOY_FEATURES)
    features = generator.normal(size=(configuration.samples, TOY_FEATURES)).astype(np.float32)
    labels = (features @ normal > 0).astype(np.int64)
    return split_by_hash(features, labels, 2)


def split_by_hash(
    features: NDArray[np.float32], labels: NDArray[np.int64], classes: int
) -> DataSet:
    """Split 80/20 in an order that is the same for every seed, machine and version of numpy.

    Args:
        features: shape (samples, …), at least two samples.
        labels: shape (samples,).
        classes: how many different labels there may be.
    """
    order = np.array(sorted(range(len(labels)), key=_hash))
    tests = max(1, len(order) // 5)
    train, test = order[tests:], order[:tests]
    return DataSet(
        train=Split(features[train], labels[train]),
        test=Split(features[test], labels[test]),
        classes=classes,
    )


def _hash(index: int) -> bytes:
    return hashlib.sha256(str(index).encode()).digest()
