"""``--evaluate-only``: predictions of saved weights, by all ranks, in one file."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mpiddp.launch.failure.outcome import write_whole
from mpiddp.launch.session import Session
from mpiddp.training import metrics, models
from mpiddp.training.batches import make_evaluation_batches
from mpiddp.training.config import Configuration
from mpiddp.training.data import load
from mpiddp.training.preparation import EVALUATION_BATCH
from mpiddp.training.weights import load_weights

PREDICTIONS = "predictions.csv"
COLUMNS = ("sample", "class", "predicted", "loss")


@dataclass(frozen=True)
class Predictions:
    """Of one rank, which has every ``ranks``-th sample from its own number on."""

    labels: list[int]
    classes: list[int]
    losses: list[float]


def predict_all(
    configuration: Configuration, session: Session
) -> tuple[metrics.Average, list[Predictions]]:
    """Predict the test samples with the weights of ``configuration``; collective.

    Ranks do not wait for each other before all have finished. Returns the averages over all
    samples, and each rank's predictions.

    Raises ConfigurationError, CheckpointError.
    """
    assert configuration.weights is not None
    data = load(configuration)
    session.agree(data.digest(), f"data set {configuration.data}")
    torch.manual_seed(configuration.seed)
    module = models.build(configuration.model, data.shape, data.classes).to(session.device)
    load_weights(module, configuration.weights)
    world = session.world
    found, totals = Predictions([], [], []), metrics.Totals(session.device)
    module.eval()
    with torch.no_grad():
        for features, labels, _ in make_evaluation_batches(
            data.test, EVALUATION_BATCH, world.rank, world.size
        ):
            targets = labels.to(session.device)
            outputs = module(features.to(session.device))
            losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
            totals.add(losses.mean(), outputs, targets)
            found.labels.extend(labels.tolist())
            found.classes.extend(outputs.argmax(dim=1).tolist())
            found.losses.extend(losses.tolist())
    return totals.reduce(), session.gather(found)


def write_predictions(path: Path, parts: list[Predictions]) -> None:
    """Write a row for each sample, in the order of the data set. Raises OSError."""
    rows = sorted(
        (rank + len(parts) * place, *row)
        for rank, part in enumerate(parts)
        for place, row in enumerate(zip(part.labels, part.classes, part.losses, strict=True))
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def describe(average: metrics.Average, path: Path) -> str:
    """The console's line."""
    return (
        f"Evaluation done: test accuracy {average.accuracy:.2%}, loss {average.loss:.6f} over "
        f"{average.samples} samples (predictions in {path})"
    )
