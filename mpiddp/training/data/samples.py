"""Samples of a split, read by whole batches, with what is drawn for each of them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import Dataset, default_collate

from mpiddp.errors import MpiddpError
from mpiddp.training.data.data_sets import MapStyle, SampleStream, Split, StreamError
from mpiddp.training.data.device_data import DeviceSplit
from mpiddp.training.data.seeding import kept_generators, mix_seed, seed_cpu_generators
from mpiddp.training.data.structure import FormError, list_leaves, map_leaves, separate

SHOWN = 8
"""Sample numbers in a message."""


class Batch(NamedTuple):
    """One rank's samples of a forward pass.

        def compute(model, batch: mpiddp.training.Batch):
            outputs = model(batch.inputs)
            return outputs, torch.nn.functional.cross_entropy(outputs, batch.targets)

    Ranks may have different numbers of samples in the last step of an epoch.
    """

    inputs: Any
    """Shape (samples, …); or a list or dict of such tensors, as the data's samples have them."""
    targets: Any
    """Shape (samples, …), or a list or dict of such tensors; labels are int64."""
    weight: float = 1.0
    """Factor of the mean loss: with it, the average of the ranks' gradients is that of the mean
    over all samples of the step. 0 if the step had no sample for this rank: the one here is
    another rank's, and is not counted."""

    def to(self, device: torch.device) -> Batch:
        """The batch on the device. A copy from pinned memory to a GPU is not waited for."""
        inputs, targets = self.inputs, self.targets
        are_single = isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        if are_single and inputs.device == device == targets.device:
            return self
        move = partial(torch.Tensor.to, device=device, non_blocking=device.type != "cpu")
        return self._replace(inputs=map_leaves(move, inputs), targets=map_leaves(move, targets))

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        found: torch.device = list_leaves(self.inputs)[0].device
        return found

    def first(self) -> Batch:
        """The batch's first sample alone."""

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:1]

        return Batch(map_leaves(take, self.inputs), map_leaves(take, self.targets))


class Key(NamedTuple):
    """What a loader asks for."""

    epoch: int
    """Counted from 1, or EVALUATION."""
    positions: list[int]
    """In the split."""
    is_last: bool = False
    """Whether the reader asks for no more in this epoch."""
    weight: float = 1.0
    """The batch's."""


Work: TypeAlias = tuple[float, float]
"""Seconds of reading a batch and of transforming it, in the process that did so."""


class Stopwatch:
    """Adds up the time of functions, also in the process to which it is sent with them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return partial(self._time, function)

    def _time(self, function: Callable[[Any], Any], value: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(value)
        finally:
            self.seconds += time.perf_counter() - begin


class Answer(NamedTuple):
    """What it gets. Errors are values: another process cannot raise here."""

    batch: Batch | None
    """None if nothing could be read, or what could not be read ends the run."""
    problem: MpiddpError | None
    """UnreadableSampleError, or BatchError without a batch."""
    work: Work = (0.0, 0.0)


class UnreadableSampleError(MpiddpError):
    """The data set raised an exception for some samples."""

    def __init__(self, text: str, positions: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.positions = tuple(positions)
        """Of the samples, in the split."""


class BatchError(MpiddpError):
    """Samples that can be read do not make a batch."""


@dataclass(frozen=True)
class Samples(Dataset[Answer]):
    """A split; what is drawn for a sample depends on seed, epoch and position alone."""

    split: Split | MapStyle | DeviceSplit
    what: str = "training"
    """The split's name, for messages."""
    seed: int = 0
    skips: bool = False
    """Whether a sample that cannot be read is left out of its batch."""
    watch: Stopwatch = field(default_factory=Stopwatch, repr=False, compare=False)
    """Of transforms, if `time_transforms` has made these samples."""

    def time_transforms(self) -> Samples:
        """The same, with the time of the split's transforms apart in each answer."""
        wrap_transforms = getattr(self.split, "wrap_transforms", None)
        if wrap_transforms is None:
            return self
        watch = Stopwatch()
        return replace(self, split=wrap_transforms(watch.wrap), watch=watch)

    def read(self, key: Key) -> Batch:
        """Raises whatever the data set raises."""
        split = self.split
        if isinstance(split, DeviceSplit) or (isinstance(split, Split) and split.augment is None):
            inputs, targets = split.read(key.positions)
            return Batch(inputs, targets, key.weight)
        pairs = []
        with kept_generators():
            for position in key.positions:
                if isinstance(split, SampleStream):
                    pairs.append(split.take(key.epoch, position))
                    continue
                seed_cpu_generators(mix_seed(self.seed, key.epoch, position))
                pairs.append(split[position])
            if isinstance(split, SampleStream) and key.is_last:
                split.finish()
        if not isinstance(split, Split):
            return Batch(*separate(default_collate(pairs)), key.weight)
        features, labels = zip(*pairs, strict=True)
        is_single = isinstance(features[0], torch.Tensor)
        joined = torch.stack(features) if is_single else default_collate(list(features))
        if split.convert is not None:
            joined = split.convert(joined)
        return Batch(joined, torch.stack(labels), key.weight)

    def __getitem__(self, key: Key) -> Answer:
        begin, before = time.perf_counter(), self.watch.seconds
        batch: Batch | None = None
        problem: Exception | None = None
        try:
            batch = self.read(key)
        except Exception as error:  # Also a data set's own.
            problem = error
        if problem is not None:
            batch, problem = self._read_without(problem, key)
        transform = self.watch.seconds - before
        return Answer(batch, problem, (time.perf_counter() - begin - transform, transform))

    def _read_without(self, error: Exception, key: Key) -> tuple[Batch | None, MpiddpError | None]:
        """What can be read of a key whose reading has raised ``error``, and what is wrong."""
        if isinstance(error, FormError):
            what = f"{self.what} {describe_numbers(key.positions)}"
            return None, BatchError(f"{what} make no batch: {error}")
        if isinstance(error, StreamError):
            found = BatchError(f"{self.what} data: {error}")
            found.add_note("".join(traceback.format_exception(error)).rstrip())
            return None, found
        good, problem = self._try_each(key)
        if problem is not None and (not self.skips or not good):
            return None, problem
        try:
            return self.read(key._replace(positions=good)), problem
        except Exception as error:  # Each can be read: it is torch's collation that raises.
            text = " ".join(f"{type(error).__name__}: {error}".split())
            what = f"{self.what} {describe_numbers(good)} do not make a batch: {text}"
            return None, BatchError(what)

    def find_readable(self, key: Key, count: int) -> list[int]:
        """The first ``count`` of the key's positions that can be read, or fewer."""
        found = (each for each in key.positions if self._try_one(key.epoch, each) is None)
        return list(islice(found, count))

    def _try_one(self, epoch: int, position: int) -> Exception | None:
        try:
            self.read(Key(epoch, [position]))
        except Exception as error:  # A data set's own.
            return error
        return None

    def _try_each(self, key: Key) -> tuple[list[int], UnreadableSampleError | None]:
        """Those that can be read, and what is wrong with the others."""
        tried = {each: self._try_one(key.epoch, each) for each in key.positions}
        bad = {position: error for position, error in tried.items() if error is not None}
        good = [position for position in key.positions if position not in bad]
        return good, describe_problem(self.what, bad) if bad else None


def describe_problem(what: str, bad: Mapping[int, Exception]) -> UnreadableSampleError:
    """What is wrong with these samples of ``what``, with the first exception's traceback."""
    error = next(iter(bad.values()))
    found = UnreadableSampleError(
        f"{what} {describe_numbers(list(bad))} cannot be read: {type(error).__name__}: {error}",
        list(bad),
    )
    found.add_note("".join(traceback.format_exception(error)).rstrip())
    return found


def describe_numbers(numbers: Sequence[int]) -> str:
    """Name samples by their positions in the split, counted from 0."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"sample{'s' * (len(numbers) != 1)} {shown}{more}"
