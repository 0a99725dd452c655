"""The models that come with mpiddp: small ones, quick to train on two cores.

Every builder takes the shape of one sample and the number of classes, and draws its initial
parameters from torch's default generator. There is no batch normalisation: its running averages
would differ between ranks.
"""

from __future__ import annotations

import math

from torch import nn

from mpiddp.errors import ConfigurationError
from mpiddp.training.registry import MODELS, resolve

HIDDEN = 50
"""Width of the mlp's hidden layer."""


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a new model, on the CPU.

    Raises ConfigurationError where the model cannot take samples of that shape.
    """
    model: nn.Module = resolve(MODELS[name])(shape, classes)
    return model


def build_convnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a convolutional network.

    Args:
        shape: (channels, height, width), height and width at least 4.
        classes: size of the output; the network maps (samples, *shape) to (samples, classes).
    """
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ConfigurationError(
            "model: convnet expects images (channels, height, width) of 4 x 4 or more, "
            f"found samples of shape {shape}: try mlp"
        )
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * (height // 4) * (width // 4), classes),
    )


def build_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a perceptron with one hidden layer of 50; for toy data it is 10 to 50 to 2.

    Args:
        shape: of one sample, any; flattened.
        classes: size of the output; the network maps (samples, *shape) to (samples, classes).
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )
