"""Which rank sees which samples, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.launch.launcher.hostnames import count_noun
from mpiddp.training.data import Split

SHOWN = 8
"""Sample numbers in a message."""

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Features of shape (samples, …), float32, and labels of shape (samples,), int64."""


class Samples(Dataset[Batch]):
    """A split that is read by whole batches: the index is a list of positions."""

    def __init__(self, split: Split, what: str = "training", *, skips: bool = False) -> None:
        """
        Args:
            what: the split's name, for messages.
            skips: whether a sample that cannot be read is left out of its batch.
        """
        self.features = torch.from_numpy(split.features)
        self.labels = torch.from_numpy(split.labels)
        self.what = what
        self.skips = skips
        self.left_out: list[UnreadableSampleError] = []
        """What nobody has reported yet."""

    def read(self, positions: list[int]) -> Batch:
        index = torch.tensor(positions)
        return self.features[index], self.labels[index]

    def __getitem__(self, positions: list[int]) -> Batch:
        try:
            return self.read(positions)
        except Exception:
            return self.read(self._find_readable(positions))

    def _find_readable(self, positions: list[int]) -> list[int]:
        """Those that can be read. Raises UnreadableSampleError where the others end the run."""
        bad: dict[int, Exception] = {}
        for position in positions:
            try:
                self.read([position])
            except Exception as error:
                bad[position] = error
        if not bad:
            return positions
        found = UnreadableSampleError(self.what, bad)
        good = [position for position in positions if position not in bad]
        if not self.skips or not good:
            raise found from next(iter(bad.values()))
        self.left_out.append(found)
        return good


class UnreadableSampleError(MpiddpError):
    """The data set raised an exception for these samples."""

    def __init__(self, what: str, bad: Mapping[int, Exception]) -> None:
        error = next(iter(bad.values()))
        super().__init__(
            f"{what} {describe_numbers(list(bad))} cannot be read: {type(error).__name__}: {error}"
        )


def describe_numbers(numbers: Sequence[int]) -> str:
    """Name samples by their positions in the split, counted from 0."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"sample{'s' * (len(numbers) != 1)} {shown}{more}"


@dataclass(frozen=True)
class TrainingBatches:
    """One rank's share of every training epoch.

    All ranks have the same number of batches of the same sizes, so that averaging gradients
    over ranks averages over samples. For that up to ``ranks - 1`` samples, drawn anew in each
    epoch, are trained on twice.
    """

    loader: DataLoader[Batch]
    share: Share
    batch_size: int
    samples: Samples

    def find_samples(self, number: int) -> list[int]:
        """The samples of batch ``number``, counted from 0 since ``start``."""
        order = BatchSampler(self.share, self.batch_size, drop_last=False)
        return next(itertools.islice(order, number, None))

    def start(self, epoch: int, taken: int = 0) -> Iterable[Batch]:
        """Return the batches of ``epoch``, in an order that only the seed and it decide.

        ``taken``: how many of its samples all ranks, whatever their number, have trained on.
        """
        self.share.begin(epoch, taken)
        return self.loader

    def count(self, taken: int = 0) -> int:
        """Batches of an epoch that are left, once so many samples were taken."""
        return -(-self.share.count(taken) // self.batch_size)

    def __len__(self) -> int:
        return self.count()


class Share(Sampler[int]):
    """One rank's part of the samples: every ``ranks``-th of an order that is the same for all.

    After as many steps, all ranks together have taken the first samples of that order. So other
    ranks can go on from there.
    """

    def __init__(self, samples: int, seed: int, rank: int, ranks: int) -> None:
        self._samples, self._seed, self._rank, self._ranks = samples, seed, rank, ranks
        self._epoch = self._taken = 0

    def begin(self, epoch: int, taken: int) -> None:
        self._epoch, self._taken = epoch, taken

    def count(self, taken: int) -> int:
        """Samples of this rank, and of each other, that are left."""
        return -(-max(0, self._samples - taken) // self._ranks)

    def __len__(self) -> int:
        return self.count(self._taken)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        left = order[self._taken :]
        missing = len(self) * self._ranks - len(left)
        again = [order[each % self._samples] for each in range(missing)]
        return iter((left + again)[self._rank :: self._ranks])


class SharedBatches:
    """An epoch's batches, of which every worker takes one that nobody has taken yet.

    A slow worker takes fewer of them. Every sample is trained on once.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        seed: int,
        workers: int,
        ticket: Callable[[], int],
        *,
        skips: bool = False,
    ) -> None:
        """
        Args:
            ticket: tells which batch this worker should take next, counted from 0.
            skips: whether a sample that cannot be read is left out.
        """
        self.samples = Samples(split, skips=skips)
        self._share = Share(len(split), seed, 0, 1)
        self._order = BatchSampler(self._share, batch_size, drop_last=False)
        self._workers = workers
        self._ticket = ticket
        self._present: list[int] = []

    def find_samples(self, number: int) -> list[int]:
        """The samples of the batch that this worker has; it is not its ``number``-th."""
        return self._present

    def start(self, epoch: int, taken: int = 0) -> Iterator[Batch]:
        """Return this worker's batches of ``epoch``; the seed and it decide what they hold.

        An epoch is not interrupted: ``taken`` is 0.
        """
        self._share.begin(epoch, taken)
        order = list(self._order)
        while (number := self._ticket()) < len(order):
            self._present = order[number]
            yield self.samples[self._present]

    def count(self, taken: int = 0) -> int:
        """For each worker, if all were equally quick."""
        return -(-len(self._order) // self._workers)

    def __len__(self) -> int:
        return self.count()


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
    split: Split, batch_size: int, seed: int, rank: int, ranks: int, *, skips: bool = False
) -> TrainingBatches:
    """Return the training batches of ``rank``, shuffled anew in each epoch.

    With ``skips`` a sample that cannot be read is left out of its batch.
    """
    samples = Samples(split, skips=skips)
    share = Share(len(split), seed, rank, ranks)
    return TrainingBatches(_load(samples, share, batch_size), share, batch_size, samples)


def make_evaluation_batches(
    split: Split, batch_size: int, rank: int, ranks: int, *, skips: bool = False
) -> DataLoader[Batch]:
    """Return the test batches of ``rank``.

    Over all ranks every sample appears exactly once, so ranks may differ by one sample, and have
    none at all where there are more ranks than samples. Nothing collective may depend on the
    number of batches.
    """
    samples = Samples(split, "test", skips=skips)
    return _load(samples, range(rank, len(split), ranks), batch_size)


def _load(samples: Samples, share: Iterable[int], batch_size: int) -> DataLoader[Batch]:
    batches = BatchSampler(share, batch_size, drop_last=False)
    # A loader draws a number whenever it begins; not from the generator that dropout uses, whose
    # state would depend on how often a run was interrupted.
    return DataLoader(samples, batch_size=None, sampler=batches, generator=torch.Generator())
