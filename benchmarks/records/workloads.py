"""What is trained: a model and the shape of its samples."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

CLASSES = 10
SHAPES = {"convnet": (1, 28, 28), "resnet18": (3, 32, 32), "mlp": (1024,)}
"""Of one sample, by the model's name."""
MLP = "mlp"
WIDTHS = (1024, 2048, 4096, 1500)
"""Of the MLP's layers, before the last one: 16.65 million parameters, 67 MB of float32."""
MEGABYTES = 4e-6 * (
    sum((before + 1) * after for before, after in zip(WIDTHS, (*WIDTHS[1:], CLASSES), strict=True))
)
LEAST, MOST = 0.1, 4000.0
"""Megabytes that an MLP may have."""


@dataclass(frozen=True)
class Workload:
    """A model by name; an MLP may have another size."""

    name: str
    megabytes: float | None = None
    """Of the MLP's gradients, about; None for the usual ones."""

    def __str__(self) -> str:
        return self.name if self.megabytes is None else f"{self.name}:megabytes={self.megabytes:g}"

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the MLP's layers, before the last one."""
        if self.megabytes is None:
            return WIDTHS
        scale = math.sqrt(self.megabytes / MEGABYTES)
        return tuple(max(1, round(width * scale)) for width in WIDTHS)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.widths[:1] if self.name == MLP else SHAPES[self.name]


def parse_workload(text: str) -> Workload:
    """Read ``NAME``, or ``mlp:megabytes=4``. Raises ConfigurationError."""
    name, colon, rest = text.partition(":")
    if name not in SHAPES:
        raise ConfigurationError(
            f"--models: no model is called {name!r}{did_you_mean(name, SHAPES)}; there are "
            f"{', '.join(SHAPES)}"
        )
    if not colon:
        return Workload(name)
    key, _, value = rest.partition("=")
    try:
        megabytes = float(value)
    except ValueError:
        megabytes = math.nan
    if name != MLP or key != "megabytes" or not LEAST <= megabytes <= MOST:
        raise ConfigurationError(
            f"--models: expected NAME, or mlp:megabytes=… with {LEAST:g} to {MOST:g}, "
            f"found {text!r}"
        )
    return Workload(name, megabytes)


def build(workload: Workload, seed: int) -> nn.Module:
    """A new model on the CPU, whose parameters the seed decides."""
    import torch

    from mpiddp.training.task import models

    torch.manual_seed(seed)
    if workload.name != MLP:
        return models.build(workload.name, workload.shape, CLASSES)
    widths = workload.widths
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], CLASSES))


def draw_batch(
    workload: Workload, samples: int, seed: int, place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One worker's samples and their labels, on the CPU: normal values, the same in every step.

    ``place``: of the worker, among the workers.
    """
    import torch

    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + place)
    features = torch.randn((samples, *workload.shape), generator=generator)
    return features, torch.randint(0, CLASSES, (samples,), generator=generator)
