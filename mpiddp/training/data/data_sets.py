"""Data sets: what they are for the trainer, and those that need no files but the package's."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.resources import files
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from mpiddp.errors import MpiddpError
from mpiddp.training.data.factories import call_factory, find_factory
from mpiddp.training.data.seeding import kept_generators, mix_seed, seed_cpu_generators
from mpiddp.training.data.structure import find_sample_shape, list_leaves, map_leaves, separate_one
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.data import parse_shape
from mpiddp.training.options.groups.registry import DATASETS

DIGITS = 10
IMAGE = (1, 8, 8)
"""Channels, height and width of the digits."""
TOY_FEATURES = 10
EVALUATION = 0
"""The epoch of samples that are not trained on."""


class MapStyle(Protocol):
    """A split whose samples are read one by one, for example a ``torch.utils.data.Dataset``.

        class Points:
            def __len__(self):
                return 100
            def __getitem__(self, position):
                return torch.tensor([position / 100]), position % 2
        split: mpiddp.training.MapStyle = Points()

    A sample is (inputs, target), each a tensor, an array or a number, or a tuple, list or dict of
    these; or (first, second, …, target); or a dict whose target is named ``labels``, ``label``,
    ``targets`` or ``target``. torch's ``default_collate`` makes batches of them. The model is
    called as ``model(inputs)``; with a tuple or list of inputs as ``model(*inputs)``, and with a
    dict as ``model(**inputs)``.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any:
        """A sample: what is fed to the model, and its target."""


class IterableStyle(Protocol):
    """A split whose samples come one after the other: a ``torch.utils.data.IterableDataset``, or
    any other object that has these methods and no ``__getitem__``.

        class Points:
            def __len__(self):
                return 100
            def __iter__(self):
                return ((torch.tensor([each / 100]), each % 2) for each in range(100))
        split: mpiddp.training.IterableStyle = Points()

    It yields the same samples in the same order on every rank, and the trainer shares them out:
    ranks take turns. A method ``set_epoch(epoch)``, if there is one, is called before each
    iteration, with an epoch that is counted from 1; with 0 for samples that are not trained on.
    """

    def __len__(self) -> int:
        """How many samples an iteration has."""

    def __iter__(self) -> Iterator[Any]:
        """Samples, as those of a `MapStyle`; or functions that return them, which are called on the
        rank that takes the sample."""


class StreamError(MpiddpError):
    """A split of iterable style does not give the samples that it should."""


class SampleStream:
    """A split of iterable style, read by position.

    A sample before the last one that was read begins a new iteration. What is drawn for a sample
    depends on seed, epoch and position alone, also if samples before it are skipped.
    """

    def __init__(self, data: IterableStyle, seed: int) -> None:
        self._data, self._seed = data, seed
        self._samples = len(data)
        self._epoch, self._next = EVALUATION, 0
        self._iterator: Iterator[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process begins an iteration of its own."""
        return SampleStream, (self._data, self._seed)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, position: int, /) -> Any:
        return self._first if position == 0 else self.take(EVALUATION, position)

    @cached_property
    def _first(self) -> Any:
        with kept_generators():
            return self.take(EVALUATION, 0)

    def take(self, epoch: int, position: int) -> Any:
        """A sample. Changes the generators' states. Raises StreamError."""
        if epoch != self._epoch or position < self._next:
            self._iterator, self._next = None, 0
        self._epoch = epoch
        while True:
            sample, is_there = self._advance(is_wanted=self._next == position)
            if not is_there:
                raise self._describe_length(f"{self._next}")
            if self._next > position:
                return sample

    def finish(self) -> None:
        """Raise StreamError if the iteration under way has not as many samples as it should."""
        while self._advance(is_wanted=False)[1]:
            if self._next > self._samples:
                raise self._describe_length("more")
        if self._next < self._samples:
            raise self._describe_length(f"{self._next}")

    def _describe_length(self, found: str) -> StreamError:
        return StreamError(
            f"expected {self._samples} samples in an iteration on each rank, as its __len__ says, "
            f"found {found}"
        )

    def _advance(self, *, is_wanted: bool) -> tuple[Any, bool]:
        """The next sample, and whether there is one. A function is called if it is wanted."""
        seed_cpu_generators(mix_seed(self._seed, self._epoch, self._next))
        try:
            if self._iterator is None:
                if (set_epoch := getattr(self._data, "set_epoch", None)) is not None:
                    set_epoch(self._epoch)
                self._iterator = iter(self._data)
            sample = next(self._iterator)
            if is_wanted and callable(sample):
                sample = sample()
        except StopIteration:
            return None, False
        except Exception as error:  # A data set's own.
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise StreamError(
                f"sample {self._next} cannot be read, and an exception ends the iteration (skip "
                f"the sample in __iter__): {text}"
            ) from error
        self._next += 1
        return sample, True

    def digest(self) -> bytes:
        """The data set's own, or that of the first sample."""
        if (own := getattr(self._data, "digest", None)) is not None:
            found: bytes = own()
            return found
        digest = hashlib.sha256()
        for each in list_leaves(separate_one(self[0])):
            digest.update(each.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.digest()


def by_position(split: Split | MapStyle | IterableStyle, seed: int) -> Split | MapStyle:
    """The split, or a `SampleStream` of one that can only be iterated."""
    if isinstance(split, IterableDataset) or not hasattr(split, "__getitem__"):
        return SampleStream(split, seed)
    return cast(MapStyle, split)


@dataclass(frozen=True)
class Split:
    """Samples and their classes or other targets, in memory.

        points = torch.rand(100, 2).numpy()
        split = mpiddp.training.Split(points, (points[:, 0] > 0.5).astype("int64"))

    If it fits, it is copied to the GPU once.
    """

    features: Any
    """An array (samples, …); or several, in a tuple, list or dict."""
    labels: NDArray[np.int64]
    """Shape (samples, …); classes are 0 to classes - 1."""
    convert: Callable[[Any], Any] | None = None
    """Makes of features, for any number of samples, what is fed to a model."""
    augment: Callable[[Any], Any] | None = None
    """Varies the features of one sample. What it draws comes from torch's default generator."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int, /) -> tuple[Any, torch.Tensor]:
        """Features that are varied and not yet converted, and the label."""
        features = map_leaves(lambda each: torch.as_tensor(each[position]), self.features)
        label = torch.as_tensor(self.labels[position])
        return features if self.augment is None else self.augment(features), label

    def read(self, positions: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """Converted features, and labels, of several samples."""
        index = torch.tensor(positions)

        def take(array: NDArray[Any]) -> torch.Tensor:
            # Half of the time that indexing takes.
            return torch.from_numpy(array).index_select(0, index)

        features = map_leaves(take, self.features)
        return features if self.convert is None else self.convert(features), take(self.labels)

    def wrap_transforms(self, wrap: Callable[[Any], Any]) -> Split:
        """The split with other functions in place of its own: those that ``wrap`` makes of them.

        The trainer times transforms with it, if a split of any kind has this method.
        """
        convert, augment = self.convert and wrap(self.convert), self.augment and wrap(self.augment)
        return replace(self, convert=convert, augment=augment)

    def digest(self) -> bytes:
        digest = hashlib.sha256()
        for array in (*list_leaves(self.features), self.labels):
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()


@dataclass(frozen=True)
class DataSet:
    """A training and a test split with the same classes.

        from mpiddp.training import DataSet, Split
        def load() -> DataSet:
            points = np.random.default_rng(0).normal(size=(500, 2)).astype(np.float32)
            labels = (points[:, 0] > 0).astype(np.int64)
            train, test = slice(0, 400), slice(400, 500)
            return DataSet(
                Split(points[train], labels[train]), Split(points[test], labels[test]), classes=2
            )

    It is the same on every rank, which trains on its part.
    """

    train: Split | MapStyle | IterableStyle
    test: Split | MapStyle | IterableStyle
    classes: int
    sample_shape: Any = None
    """That of what is fed to the model for one sample, if it should not be read for that."""

    @property
    def shape(self) -> Any:
        """Of what is fed to the model for one sample; of several inputs their shapes, in a list or
        dict as the inputs are."""
        if self.sample_shape is not None:
            return self.sample_shape
        return find_sample_shape(by_position(self.train, seed=0)[0])

    def digest(self) -> str:
        """Return a SHA-256, to compare between ranks: of all samples that are in memory.

        A split of another kind says by its method ``digest``, if it has one, what is compared.
        """
        sizes = self.shape, self.classes, len(self.train), len(self.test)
        digest = hashlib.sha256(repr(sizes).encode())
        for split in (self.train, self.test):
            if (own := getattr(split, "digest", None)) is not None:
                digest.update(own())
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
    resource = files("mpiddp.training.data") / "digits.csv.gz"
    with resource.open("rb") as file, gzip.open(file, "rt", encoding="ascii") as text:
        table = np.loadtxt(text, delimiter=",", dtype=np.uint8)
    features = (table[:, :-1] / np.float32(16)).astype(np.float32).reshape(-1, *IMAGE)
    return split_by_hash(features, table[:, -1].astype(np.int64), DIGITS)


def make_synthetic(configuration: Configuration) -> DataSet:
    """Return made-up samples: ten random prototypes, one per class, under noise."""
    generator = np.random.default_rng(configuration.seed)
    shape = parse_shape(configuration.shape)
    prototypes = generator.normal(size=(DIGITS, *shape))
    labels = generator.integers(DIGITS, size=configuration.samples)
    noise = generator.normal(size=(configuration.samples, *shape))
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
    order = np.array(
        sorted(range(len(labels)), key=lambda each: hashlib.sha256(str(each).encode()).digest())
    )
    tests = max(1, len(order) // 5)
    train, test = order[tests:], order[:tests]
    return DataSet(
        train=Split(features[train], labels[train]),
        test=Split(features[test], labels[test]),
        classes=classes,
    )
