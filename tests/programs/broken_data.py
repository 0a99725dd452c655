"""Trainings on data with bad samples, on the ranks of a pool."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.training.data.batches import Cut, make_training_batches
from mpiddp.training.data.data_sets import DataSet, Split, load
from mpiddp.training.data.samples import Key, Samples
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.step.learning_rate import make_learning_rate
from mpiddp.training.step.optimizer_step import make_optimizer


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


def train_alone(
    options: Configuration, kind: str, bad: Sequence[int], ranks: int = 2
) -> tuple[nn.Module, list[torch.Tensor], list[tuple[int, int, list[int]]]]:
    """What ranks are to do, in one process: the model, and the moving average of its weights.

    And of each batch that has a bad sample its step, counted from 1, its rank and its samples.
    """
    data = load(options)
    features, labels = torch.from_numpy(data.train.features), torch.from_numpy(data.train.labels)
    if kind == "nan":
        features[list(bad)] = torch.nan
    cuts = [Cut(options.batch_size, rank, ranks) for rank in range(ranks)]
    shares = [make_training_batches(Samples(data.train), cut) for cut in cuts]
    models = []
    for _ in cuts:
        torch.manual_seed(options.seed)
        models.append(build(data.shape, data.classes))
    optimizers = [make_optimizer(options, list(each.parameters())) for each in models]
    steps = shares[0].count()
    rate = make_learning_rate(options, steps, ranks * options.batch_size)
    averages = [each.detach().clone() for each in models[0].parameters()]
    last, found, every = 0, [], options.average_every
    for step in range(options.epochs * steps):
        is_bad = [False] * ranks
        for rank, (model, share) in enumerate(zip(models, shares, strict=True)):
            batch = share.find_samples(1 + step // steps, step % steps * share.cut.step_samples)
            if set(batch) & set(bad):
                found.append((step + 1, rank, batch))
                is_bad[rank] = kind == "nan"
            if kind == "unreadable":
                batch = [each for each in batch if each not in bad]
            before = [each.clone() for each in model.buffers()]
            model.zero_grad()
            nn.functional.cross_entropy(model(features[batch]), labels[batch]).backward()
            for buffer, each in zip(model.buffers(), before, strict=True):
                if is_bad[rank]:
                    buffer.copy_(each)
        if every is None:
            is_bad = [any(is_bad)] * ranks
            for group in zip(*(each.parameters() for each in models), strict=True):
                mean = torch.stack([each.grad for each in group]).mean(dim=0)
                for each in group:
                    each.grad = mean
        for optimizer, is_left_out in zip(optimizers, is_bad, strict=True):
            optimizer.param_groups[0]["lr"] = rate(step)
            if not is_left_out:
                optimizer.step()
        if every is not None and ((step + 1) % every == 0 or (step + 1) % steps == 0):
            _average(models)
            kept = min(0.9, (1 + step) / (10 + step)) ** (step + 1 - last)
            for average, tensor in zip(averages, models[0].parameters(), strict=True):
                average.lerp_(tensor.detach(), 1 - kept)
            last = step + 1
    return models[0], averages, found


@torch.no_grad()
def _average(models: list[nn.Module]) -> None:
    tensors = [[*each.parameters(), *each.buffers()] for each in models]
    for group in zip(*tensors, strict=True):
        if group[0].is_floating_point():
            mean = torch.stack(group).mean(dim=0)
            for tensor in group:
                tensor.copy_(mean)
