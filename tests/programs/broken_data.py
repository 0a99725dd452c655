"""Trainings on data with bad samples, on the ranks of a pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.training.data.data_sets import DataSet, Split, load
from mpiddp.training.data.samples import Key, Samples
from mpiddp.training.options.config import Configuration, parse


def build(shape: Sequence[int], classes: int) -> nn.Module:
    """A model with running averages of what it has seen in training."""
    return nn.Sequential(nn.Linear(shape[0], 20), nn.BatchNorm1d(20), nn.Linear(20, classes))


@contextlib.contextmanager
def broken(kind: str, numbers: Sequence[int]) -> Iterator[None]:
    """Within it some training samples are ``nan``, or ``unreadable``."""

    def spoil(configuration: Configuration) -> DataSet:
        data = load(configuration)
        if kind == "nan":
            assert isinstance(data.train, Split)
            data.train.features[list(numbers)] = np.nan
        return data

    read = Samples.read

    def refuse(self: Samples, key: Key) -> Any:
        if kind == "unreadable" and self.what == "training" and set(key.positions) & set(numbers):
            raise OSError(5, "Input/output error")
        return read(self, key)

    with (
        mock.patch("mpiddp.training.task.task.load", spoil),
        mock.patch.object(Samples, "read", refuse),
    ):
        yield


def run(
    session: Session, kind: str, numbers: Sequence[int], *words: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last row of the metrics, and the trained weights."""
    from mpiddp.training import trainer

    torch.set_num_threads(1)
    weights: dict[str, Any] = {}

    original = trainer.digest_parameters
    with broken(kind, numbers), mock.patch.object(trainer, "digest_parameters") as patched:

        def keep(model: torch.nn.Module) -> str:
            weights.update({k: v.numpy().copy() for k, v in model.state_dict().items()})
            return original(model)

        patched.side_effect = keep
        row = trainer.train(parse(list(words)), session, find_failure_handler(session))
    return {"left_out": row.left_out, "step": row.step}, weights
