"""Which rank sees which samples, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data_sets import EVALUATION, SampleStream
from mpiddp.training.data.reading import HERE, BatchReader, BatchReading
from mpiddp.training.data.samples import Batch, Key, Samples
from mpiddp.wording import count_noun


@dataclass(frozen=True)
class Cut:
    """How ranks cut an order of samples into steps.

    Each step takes the next ``batch_size * ranks`` samples of the order, of which ranks take turns.
    So only the last step of an epoch has fewer, and ranks differ by one sample there.
    """

    batch_size: int
    """Samples of a rank and step."""
    rank: int
    ranks: int
    drops_last: bool = False
    """Whether a last step with fewer samples is left out."""

    @property
    def step_samples(self) -> int:
        """Samples of a whole step, on all ranks."""
        return self.batch_size * self.ranks

    def count(self, samples: int) -> int:
        """Steps that so many samples make."""
        rest = 0 if self.drops_last else self.step_samples - 1
        return (max(0, samples) + rest) // self.step_samples

    def find_smallest(self, samples: int) -> int:
        """The fewest samples of a rank's batch, if so many are cut."""
        rest = 0 if self.drops_last else samples % self.step_samples
        return max(1, rest // self.ranks) if rest else self.batch_size

    def cut(self, epoch: int, order: Sequence[int]) -> Iterator[Key]:
        """This rank's batches."""
        size, rank, ranks = self.step_samples, self.rank, self.ranks
        end = self.count(len(order)) * size
        for begin in range(0, end, size):
            samples = order[begin : begin + size]
            mine = samples[rank::ranks]
            weight = len(mine) * ranks / len(samples)
            # A model cannot take a batch without samples.
            yield Key(epoch, list(mine or samples[:1]), begin + size == end, weight)


@dataclass(frozen=True)
class TrainingBatches:
    """One rank's equal share of every training epoch, which it takes at its own pace.

    The order of samples is the same for all ranks. After equally many steps, all ranks together
    have taken the first samples of that order, so that another number of ranks can go on there.
    """

    reader: BatchReader
    samples: int
    """In an epoch, of all ranks."""
    seed: int
    cut: Cut
    shuffles: bool = True
    """Whether each epoch has another order; else it is that of the data."""
    follow: Callable[[int], Iterator[None]] | None = None
    """On a rank that only serves parameters: yields after each of the workers' next steps, up to a
    number of steps. Ends early if the workers have left."""

    def start(self, epoch: int, taken: int = 0) -> Iterator[Batch | None]:
        """This rank's batches of the rest of an epoch. A rank that only serves has a None for each
        step of the workers. ``taken``: samples of the epoch that all ranks have trained on."""
        if self.follow is not None:
            return self.follow(self.count(taken))
        return self.reader.read(self.make_keys(epoch, taken))

    def count(self, taken: int = 0) -> int:
        """Steps of an epoch that are left, the same on all ranks."""
        return self.cut.count(self.samples - taken)

    def find_samples(self, epoch: int, taken: int) -> list[int]:
        """The samples of this rank's next batch."""
        return next(self.make_keys(epoch, taken)).positions

    def make_keys(self, epoch: int, taken: int) -> Iterator[Key]:
        """The rest of the epoch's, one by one: a list of them would be work for the collector."""
        order: Sequence[int] = range(self.samples)
        if self.shuffles:
            generator = torch.Generator()
            generator.manual_seed(self.seed + epoch)
            order = torch.randperm(self.samples, generator=generator).tolist()
        return self.cut.cut(epoch, order[taken:])


def check_share(samples: int, ranks: int, batch_size: int) -> None:
    """Raise ConfigurationError, on all ranks alike, if a rank could not fill one batch."""
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


@dataclass(frozen=True)
class EvaluationBatches:
    """The test batches of one rank.

    Over all ranks every sample appears exactly once, so ranks may differ by one sample, and have
    none at all if there are more ranks than samples. Nothing collective may depend on the
    number of batches.
    """

    reader: BatchReader
    samples: int
    """Of all ranks."""
    cut: Cut

    def list_positions(self) -> list[int]:
        """Of this rank's samples."""
        return list(range(self.cut.rank, self.samples, self.cut.ranks))

    def __iter__(self) -> Iterator[Batch]:
        mine, size = self.list_positions(), self.cut.batch_size
        starts = range(0, len(mine), size)
        return self.reader.read(
            Key(EVALUATION, mine[start : start + size], start + size >= len(mine))
            for start in starts
        )

    def __len__(self) -> int:
        return -(-len(self.list_positions()) // self.cut.batch_size)


def make_training_batches(
    samples: Samples, cut: Cut, reading: BatchReading = HERE
) -> TrainingBatches:
    """Return a rank's training batches, in a new order in each epoch, which their seed decides.

    Those of a `SampleStream` have its order.
    """
    shuffles = not isinstance(samples.split, SampleStream)
    return TrainingBatches(
        BatchReader(samples, reading), len(samples.split), samples.seed, cut, shuffles
    )


def make_evaluation_batches(
    samples: Samples, cut: Cut, reading: BatchReading = HERE
) -> EvaluationBatches:
    return EvaluationBatches(BatchReader(samples, reading), len(samples.split), cut)
