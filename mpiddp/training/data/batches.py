"""Which rank sees which samples, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data import EVALUATION, Stream
from mpiddp.training.data.reading import HERE, Reader, Reading
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
    rank: int = 0
    ranks: int = 1
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


class Share:
    """One rank's part of the samples of an epoch, in an order that is the same for all ranks.

    After as many steps, all ranks together have taken the first samples of that order. So other
    ranks can go on from there.
    """

    def __init__(self, samples: int, seed: int, cut: Cut, *, shuffles: bool = True) -> None:
        """``shuffles``: whether each epoch has another order; else it is that of the data."""
        self.samples, self.seed, self.cut, self.shuffles = samples, seed, cut, shuffles
        self._epoch = self._taken = 0

    def begin(self, epoch: int, taken: int) -> None:
        self._epoch, self._taken = epoch, taken

    def count(self, taken: int) -> int:
        """Steps that are left, the same on all ranks."""
        return self.cut.count(self.samples - taken)

    def make_keys(self) -> Iterator[Key]:
        """The rest of the epoch's, one by one: a list of them would be work for the collector."""
        order: Sequence[int] = range(self.samples)
        if self.shuffles:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self._epoch)
            order = torch.randperm(self.samples, generator=generator).tolist()
        return self.cut.cut(self._epoch, order[self._taken :])


class BatchSource(Protocol):
    """Where one rank's batches of an epoch come from."""

    @property
    def reader(self) -> Reader: ...

    @property
    def is_shared(self) -> bool:
        """Whether ranks take different numbers of batches, so that they pass no place together."""

    def find_samples(self, number: int) -> list[int]:
        """The samples of batch ``number``, counted from 0 since ``start``."""

    def start(self, epoch: int, taken: int = 0, steps: int | None = None) -> Iterator[Batch | None]:
        """The rest of an epoch, of which all ranks have taken so many samples.

        None is a step of the others. Ranks that share batches pause after ``steps`` on average.
        """

    def count(self, taken: int = 0) -> int:
        """Steps of an epoch that are left, once so many samples were taken."""

    def sum_up(self, steps: int, gather: Callable[[Any], list[Any]]) -> tuple[int, int]:
        """Samples and steps that all ranks together have taken, this one ``steps`` of them.

        ``gather``: every rank's value. Collective.
        """


@dataclass(frozen=True)
class TrainingBatches:
    """One rank's share of every training epoch. Every sample is taken once."""

    reader: Reader
    share: Share
    is_shared = False

    def find_samples(self, number: int) -> list[int]:
        return next(itertools.islice(self.share.make_keys(), number, None)).positions

    def start(self, epoch: int, taken: int = 0, steps: int | None = None) -> Iterator[Batch]:
        """Return the batches of ``epoch``, in an order that only the seed and it decide.

        ``taken``: how many of its samples all ranks, whatever their number, have trained on. Ranks
        that take equally many batches need not pause.
        """
        self.share.begin(epoch, taken)
        return self.reader.read(self.share.make_keys())

    def count(self, taken: int = 0) -> int:
        return self.share.count(taken)

    def sum_up(self, steps: int, gather: Callable[[Any], list[Any]]) -> tuple[int, int]:
        return steps * self.share.cut.step_samples, steps


class SharedBatches:
    """An epoch's batches, of which every worker takes one that nobody has taken yet.

    A slow worker takes fewer of them. Every sample is taken once. Each batch is a step, so that all
    weigh 1.
    """

    is_shared = True

    def __init__(self, reader: Reader, share: Share, ticket: Callable[[], int]) -> None:
        """
        Args:
            share: any rank's.
            ticket: tells which batch this worker should take next, counted from 0.
        """
        self.reader = reader
        cut = replace(share.cut, rank=0, ranks=1)
        self._share = Share(share.samples, share.seed, cut, shuffles=share.shuffles)
        self._workers = share.cut.ranks
        self._ticket = ticket
        self._present: list[int] = []

    def find_samples(self, number: int) -> list[int]:
        """The samples of the batch that this worker has; it is not its ``number``-th."""
        return self._present

    def start(self, epoch: int, taken: int = 0, steps: int | None = None) -> Iterator[Batch]:
        """Return this worker's batches of ``epoch``; the seed and it decide what a batch holds.

        ``taken``: how many of its samples all workers have trained on. ``steps``: after how many
        steps they pause, on average; None for the end of the epoch.
        """
        self._share.begin(epoch, taken)
        most = None if steps is None else steps * self._workers
        keys = list(itertools.islice(self._share.make_keys(), most))
        while (number := self._ticket()) < len(keys):
            self._present = keys[number].positions
            yield from self.reader.read([keys[number]])

    def count(self, taken: int = 0) -> int:
        return self._count_steps(self._share.count(taken))

    def sum_up(self, steps: int, gather: Callable[[Any], list[Any]]) -> tuple[int, int]:
        """What they have taken are the first batches of the epoch's rest.

        If workers have left, each still has a batch: samples count up to the first of these, and
        those behind it that others have trained on are taken again.
        """
        found = gather((steps, self._ticket()))
        done = sum(steps for steps, _ in found)
        first = min(done, *(ticket for _, ticket in found))
        return first * self._share.cut.batch_size, self._count_steps(done)

    def _count_steps(self, batches: int) -> int:
        """Of each worker, for so many batches of all, if all were equally quick."""
        return -(-batches // self._workers)


@dataclass(frozen=True)
class FollowedBatches:
    """Of a rank that only serves parameters: it computes nothing, and counts the others' steps."""

    source: TrainingBatches | SharedBatches
    """The workers'."""
    follow: Callable[[int], Iterator[None]]
    """Returns from so many steps of workers that take equally many, one after the other. Ends
    early if they have left."""

    @property
    def reader(self) -> Reader:
        return self.source.reader

    @property
    def is_shared(self) -> bool:
        return self.source.is_shared

    def find_samples(self, number: int) -> list[int]:
        return []

    def start(self, epoch: int, taken: int = 0, steps: int | None = None) -> Iterator[None]:
        return iter(()) if self.is_shared else self.follow(self.count(taken))

    def count(self, taken: int = 0) -> int:
        return self.source.count(taken)

    def sum_up(self, steps: int, gather: Callable[[Any], list[Any]]) -> tuple[int, int]:
        return self.source.sum_up(steps, gather)


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

    reader: Reader
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


def make_training_batches(samples: Samples, cut: Cut, reading: Reading = HERE) -> TrainingBatches:
    """Return a rank's training batches, in a new order in each epoch, which their seed decides.

    Those of a `Stream` have its order.
    """
    shuffles = not isinstance(samples.split, Stream)
    share = Share(len(samples.split), samples.seed, cut, shuffles=shuffles)
    return TrainingBatches(Reader(samples, reading), share)


def make_evaluation_batches(
    samples: Samples, cut: Cut, reading: Reading = HERE
) -> EvaluationBatches:
    return EvaluationBatches(Reader(samples, reading), len(samples.split), cut)
