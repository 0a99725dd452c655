"""Which rank sees which samples, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from mpiddp.errors import ConfigurationError
from mpiddp.launch.launcher.hostnames import count_noun
from mpiddp.training.data import Split

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Features of shape (samples, …), float32, and labels of shape (samples,), int64."""


class Samples(Dataset[Batch]):
    """A split that is read by whole batches: the index is a list of positions."""

    def __init__(self, split: Split) -> None:
        self.features = torch.from_numpy(split.features)
        self.labels = torch.from_numpy(split.labels)

    def __getitem__(self, positions: list[int]) -> Batch:
        index = torch.tensor(positions)
        return self.features[index], self.labels[index]


@dataclass(frozen=True)
class TrainingBatches:
    """One rank's share of every training epoch.

    All ranks have the same number of batches of the same sizes, so that averaging gradients
    over ranks averages over samples. For that up to ``ranks - 1`` samples, drawn anew in each
    epoch, are trained on twice.
    """

    loader: DataLoader[Batch]
    sampler: DistributedSampler[int]

    def start(self, epoch: int) -> Iterable[Batch]:
        """Return the batches of ``epoch``, in an order that only the seed and it decide."""
        self.sampler.set_epoch(epoch)
        return self.loader

    def __len__(self) -> int:
        return len(self.loader)


class SharedBatches:
    """An epoch's batches, of which every worker takes one that nobody has taken yet.

    A slow worker takes fewer of them. Every sample is trained on once.
    """

    def __init__(
        self, split: Split, batch_size: int, seed: int, workers: int, ticket: Callable[[], int]
    ) -> None:
        """``ticket`` tells which batch this worker should take next, counted from 0."""
        self._samples = Samples(split)
        self._sampler = _make_sampler(split, seed)
        self._order = BatchSampler(self._sampler, batch_size, drop_last=False)
        self._workers = workers
        self._ticket = ticket

    def start(self, epoch: int) -> Iterator[Batch]:
        """Return this worker's batches of ``epoch``; the seed and it decide what they hold."""
        self._sampler.set_epoch(epoch)
        order = list(self._order)
        while (number := self._ticket()) < len(order):
            yield self._samples[order[number]]

    def __len__(self) -> int:
        """For each worker, if all were equally quick."""
        return -(-len(self._order) // self._workers)


def check_share(samples: int, ranks: int, batch_size: int) -> None:
    """Raise ConfigurationError, on all ranks alike, where a rank could not fill one batch."""
    if samples < ranks:
        raise ConfigurationError(
            f"expected at least one training sample per rank, found "
            f"{count_noun(samples, 'sample')} for {ranks} ranks: start fewer ranks"
        )
    share = samples // ranks
    if batch_size > share:
        raise ConfigurationError(
            f"batch_size: expected at most {share}, a rank's share of {samples} training samples "
            f"on {ranks} ranks, found {batch_size}"
        )


def make_training_batches(
    split: Split, batch_size: int, seed: int, rank: int, ranks: int
) -> TrainingBatches:
    """Return the training batches of ``rank``, shuffled anew in each epoch."""
    samples = Samples(split)
    sampler = _make_sampler(split, seed, rank, ranks)
    batches = BatchSampler(sampler, batch_size, drop_last=False)
    return TrainingBatches(DataLoader(samples, batch_size=None, sampler=batches), sampler)


def make_evaluation_batches(
    split: Split, batch_size: int, rank: int, ranks: int
) -> DataLoader[Batch]:
    """Return the test batches of ``rank``.

    Over all ranks every sample appears exactly once, so ranks may differ by one sample, and have
    none at all where there are more ranks than samples. Nothing collective may depend on the
    number of batches.
    """
    share = range(rank, len(split), ranks)
    batches = BatchSampler(share, batch_size, drop_last=False)
    return DataLoader(Samples(split), batch_size=None, sampler=batches)


def _make_sampler(
    split: Split, seed: int, rank: int = 0, ranks: int = 1
) -> DistributedSampler[int]:
    # Of what it shares out it asks the number alone.
    positions: Any = range(len(split))
    return DistributedSampler(positions, ranks, rank, shuffle=True, seed=seed)
