"""The same samples in different structures, and models that take them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.training.data.data_sets import DataSet, Split, make_toy
from mpiddp.training.data.data_sets import load as load_own
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.options.groups.data import AUTO
from mpiddp.training.task.task import Task


class Net(nn.Module):
    """Takes ten numbers, at once or in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, left: torch.Tensor, right: torch.Tensor | None = None) -> Any:
        return self.layers(left if right is None else torch.cat([left, right], dim=1))


FORMS = {
    "one tensor": lambda x, y: (x, y), "a pair": lambda x, y: ((x[:4], x[4:]), y),
    "three": lambda x, y: (x[:4], x[4:].numpy(), int(y)),
    "a dict": lambda x, y: {"right": x[4:], "labels": y, "left": x[:4]},
    "a dict of inputs": lambda x, y: ({"right": x[4:], "left": x[:4]}, y),
}  # fmt: skip
"""From ten numbers and a class to a sample."""
STREAMS = ("one tensor", "a dict")


class Samples(Sequence[Any]):
    """A split in another structure."""

    def __init__(self, split: Any, form: str) -> None:
        self.split, self.form = split, form

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, position: Any) -> Any:
        return FORMS[self.form](*self.split[position])


class Stream:
    """Samples of a split one after the other, in the order in which a run with the seed 0 takes
    those of the split. ``length`` is how many it says it has."""

    def __init__(self, split: Any, length: int | None = None, noise: float = 0) -> None:
        self.split, self.noise, self.epoch = split, noise, -1
        self.length = len(split) if length is None else length

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.split)))
        if self.epoch > 0:
            generator = torch.Generator().manual_seed(self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        for place in order:
            sample = self.split[place]
            if self.noise:
                sample = (sample[0] + self.noise * torch.rand_like(sample[0]), sample[1])
            yield sample


class TorchStream(Stream, IterableDataset[Any]):
    """The same as torch has it: with a ``__getitem__`` that raises."""


def load(form: str) -> DataSet:
    """147 samples, so that the last step of 2 x 8 has three."""
    found = make_toy(Configuration(samples=184))
    return DataSet(Samples(found.train, form), Samples(found.test, form), found.classes)


def iterate(form: str) -> DataSet:
    found = load(form)
    return DataSet(TorchStream(found.train), Stream(found.test), found.classes)


def load_stream(noise: float = 0) -> DataSet:
    """128 samples for training."""
    found = load_own(Configuration(data="synthetic", samples=160))
    return DataSet(TorchStream(found.train, noise=noise), Stream(found.test), found.classes)


def load_noise() -> DataSet:
    return load_stream(noise=0.1)


def load_arrays() -> DataSet:
    found = make_toy(Configuration(samples=184))

    def change(split: Any) -> Split:
        return Split({"left": split.features[:, :4], "right": split.features[:, 4:]}, split.labels)

    return DataSet(change(found.train), change(found.test), found.classes)


def train_each(session: Session, words: Sequence[str]) -> dict[str, str]:
    """Train with each structure, and on streams; the digest of the weights, and the test loss."""
    # Here, because it takes a second: workers that read samples import this module.
    from mpiddp.training.trainer import train

    torch.set_num_threads(1)
    found = {}
    loads = {form: partial(load, form) for form in FORMS} | {"a dict of inputs": load_arrays}
    loads |= {f"{form}, iterated": partial(iterate, form) for form in STREAMS}
    for form, chosen in loads.items():
        task = Task(Net, chosen)
        # Workers take long to start: one structure has them.
        option = {"a dict": "--accumulation-steps", "a dict, iterated": "--on-nan"}.get(form)
        workers = int(option in words)
        options = replace(parse([*words, "--name", form]), model=AUTO, workers=workers)
        row = train(options, session, find_failure_handler(session), task=task)
        found[form] = f"{row.parameters} {row.test_loss}"
    return found
