"""The same samples in different structures, and models that take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.training.data.data import DataSet, Split, make_toy
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.options.groups.model import AUTO
from mpiddp.training.task.task import Task
from mpiddp.training.trainer import train


class Net(nn.Module):
    """Takes ten numbers, at once or in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, left: torch.Tensor, right: torch.Tensor | None = None) -> Any:
        return self.layers(left if right is None else torch.cat([left, right], dim=1))


FORMS = {
    "one tensor": lambda x, y: (x, y),
    "a pair": lambda x, y: ((x[:4], x[4:]), y),
    "three": lambda x, y: (x[:4], x[4:].numpy(), int(y)),
    "a dict": lambda x, y: {"right": x[4:], "labels": y, "left": x[:4]},
    "a dict of inputs": lambda x, y: ({"right": x[4:], "left": x[:4]}, y),
}
"""From ten numbers and a class to a sample."""


class Samples(Sequence[Any]):
    """A split in another structure."""

    def __init__(self, split: Any, form: str) -> None:
        self.split, self.form = split, form

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, position: Any) -> Any:
        return FORMS[self.form](*self.split[position])


def load(form: str) -> DataSet:
    """147 samples, so that the last step of 2 x 8 has three."""
    found = make_toy(Configuration(samples=184))
    return DataSet(Samples(found.train, form), Samples(found.test, form), found.classes)


def load_arrays() -> DataSet:
    found = make_toy(Configuration(samples=184))

    def change(split: Any) -> Split:
        return Split({"left": split.features[:, :4], "right": split.features[:, 4:]}, split.labels)

    return DataSet(change(found.train), change(found.test), found.classes)


def train_each(session: Session, words: Sequence[str]) -> dict[str, str | None]:
    """Train with each structure; the digest of the weights by its name."""
    torch.set_num_threads(1)
    found = {}
    for form in FORMS:
        task = Task(
            Net, load_arrays if form == "a dict of inputs" else lambda form=form: load(form)
        )
        # Workers take long to start: one structure has them.
        workers = int("--accumulation-steps" in words and form == "a dict")
        options = replace(parse([*words, "--name", form]), model=AUTO, workers=workers)
        row = train(options, session, find_failure_handler(session), task=task)
        found[form] = row.parameters
    return found
