"""Which rank sees which samples, and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.launch.launcher.hostnames import count_noun
from mpiddp.training.data import Split

SHOWN = 8
"""Sample numbers in a message."""


class Batch(NamedTuple):
    """One rank's samples of a forward pass.

        def compute(model, batch: mpiddp.Batch):
            outputs = model(batch.inputs)
            return outputs, torch.nn.functional.cross_entropy(outputs, batch.targets)

    Ranks may have different numbers of samples in the last step of an epoch.
    """

    inputs: torch.Tensor
    """Shape (samples, …)."""
    targets: torch.Tensor
    """Shape (samples, …); labels are int64."""
    weight: float = 1.0
    """Factor of the mean loss: with it, the average of the ranks' gradients is that of the mean
    over all samples of the step. 0 where the step had no sample for this rank: the one here is
    another rank's, and is not counted."""


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
        return Batch(self.features[index], self.labels[index])

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

    def cut(self, order: Sequence[int]) -> Iterator[Part]:
        """This rank's batches."""
        for step in range(self.count(len(order))):
            begin = step * self.step_samples
            samples = order[begin : begin + self.step_samples]
            mine = samples[self.rank :: self.ranks]
            # A model cannot take a batch without samples.
            yield Part(list(mine or samples[:1]), len(mine) * self.ranks / len(samples))


@dataclass(frozen=True)
class Part:
    """The samples of one rank's batch, by position, and its ``Batch.weight``."""

    positions: list[int]
    weight: float


class Share(Sampler[list[int]]):
    """One rank's part of the samples of an epoch, in an order that is the same for all ranks.

    After as many steps, all ranks together have taken the first samples of that order. So other
    ranks can go on from there.
    """

    def __init__(self, samples: int, seed: int, cut: Cut) -> None:
        self._samples, self._seed, self.cut = samples, seed, cut
        self._epoch = self._taken = 0

    def begin(self, epoch: int, taken: int) -> None:
        self._epoch, self._taken = epoch, taken

    def count(self, taken: int) -> int:
        """Steps that are left, the same on all ranks."""
        return self.cut.count(self._samples - taken)

    def list_parts(self) -> Iterator[Part]:
        generator = torch.Generator()
        generator.manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        return self.cut.cut(order[self._taken :])

    def __iter__(self) -> Iterator[list[int]]:
        return (part.positions for part in self.list_parts())


@dataclass(frozen=True)
class TrainingBatches:
    """One rank's share of every training epoch. Every sample is taken once."""

    loader: DataLoader[Batch]
    share: Share
    samples: Samples

    def find_samples(self, number: int) -> list[int]:
        """The samples of batch ``number``, counted from 0 since ``start``."""
        return next(itertools.islice(self.share.list_parts(), number, None)).positions

    def start(self, epoch: int, taken: int = 0) -> Iterator[Batch]:
        """Return the batches of ``epoch``, in an order that only the seed and it decide.

        ``taken``: how many of its samples all ranks, whatever their number, have trained on.
        """
        self.share.begin(epoch, taken)
        return (
            batch._replace(weight=part.weight)
            for batch, part in zip(self.loader, self.share.list_parts(), strict=True)
        )

    def count(self, taken: int = 0) -> int:
        """Steps of an epoch that are left, once so many samples were taken."""
        return self.share.count(taken)

    def __len__(self) -> int:
        return self.count()


class SharedBatches:
    """An epoch's batches, of which every worker takes one that nobody has taken yet.

    A slow worker takes fewer of them. Every sample is taken once. Each batch is a step, so that all
    weigh 1.
    """

    def __init__(
        self,
        split: Split,
        seed: int,
        cut: Cut,
        ticket: Callable[[], int],
        *,
        skips: bool = False,
    ) -> None:
        """
        Args:
            cut: of any rank.
            ticket: tells which batch this worker should take next, counted from 0.
            skips: whether a sample that cannot be read is left out.
        """
        self.samples = Samples(split, skips=skips)
        self._share = Share(len(split), seed, replace(cut, rank=0, ranks=1))
        self._workers = cut.ranks
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
        order = list(self._share)
        while (number := self._ticket()) < len(order):
            self._present = order[number]
            yield self.samples[self._present]

    def count(self, taken: int = 0) -> int:
        """For each worker, if all were equally quick."""
        return -(-self._share.count(0) // self._workers)

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
    split: Split, seed: int, cut: Cut, *, skips: bool = False
) -> TrainingBatches:
    """Return the training batches of a rank, shuffled anew in each epoch.

    With ``skips`` a sample that cannot be read is left out of its batch.
    """
    samples = Samples(split, skips=skips)
    share = Share(len(split), seed, cut)
    return TrainingBatches(_load(samples, share), share, samples)


def make_evaluation_batches(
    split: Split, batch_size: int, rank: int, ranks: int, *, skips: bool = False
) -> DataLoader[Batch]:
    """Return the test batches of ``rank``.

    Over all ranks every sample appears exactly once, so ranks may differ by one sample, and have
    none at all where there are more ranks than samples. Nothing collective may depend on the
    number of batches.
    """
    samples = Samples(split, "test", skips=skips)
    return _load(samples, BatchSampler(range(rank, len(split), ranks), batch_size, drop_last=False))


def _load(samples: Samples, order: Iterable[list[int]]) -> DataLoader[Batch]:
    # A loader draws a number whenever it begins; not from the generator that dropout uses, whose
    # state would depend on how often a run was interrupted.
    return DataLoader(samples, batch_size=None, sampler=order, generator=torch.Generator())
