"""The models that come with mpiddp: small ones, quick to train on two cores, and a known one.

Every builder takes the shape of one sample, which is (channels, height, width) for images, and the
number of classes. The module maps (samples, *shape) to (samples, classes), or, if each place
of a sequence has a class, to (samples, classes, length). Its initial parameters
are drawn from torch's default generator. The small ones have no batch normalisation, whose running
averages every rank makes from its own samples.
"""

from __future__ import annotations

import math

from torch import nn

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.factories import call_factory, find_factory
from mpiddp.training.data.vision import import_torchvision
from mpiddp.training.options.groups.registry import MODELS
from mpiddp.training.task.transformer import Transformer

HIDDEN = 50
"""Width of the mlp's hidden layer."""
SMALL = 64
"""Pixels of a side; a resnet makes an image 32 times smaller on its way."""


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a new model, on the CPU, by its name or as ``package.module:factory``.

    Raises ConfigurationError if the model cannot take samples of that shape, and for a factory
    that is not found or returns something else.
    """
    factory = find_factory("model", MODELS.get(name, name))
    return call_factory("model", factory, nn.Module, shape=shape, classes=classes)


def convnet(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> nn.Module:
    """A small convolutional network for images; by default for ``--data digits``."""
    _check_images("convnet", shape)
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


def mlp(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> nn.Module:
    """A perceptron with one hidden layer, for any shape; by default for ``--data digits``."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)
    )


def resnet18(shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18, with 11 million parameters; by default for ``--data cifar10``."""
    return _build_resnet("resnet18", shape, classes)


def resnet50(shape: tuple[int, ...] = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """torchvision's ResNet-50, with 25 million parameters; by default for ImageNet's classes."""
    return _build_resnet("resnet50", shape, classes)


def transformer(shape: tuple[int, ...] = (128,), classes: int = 256) -> nn.Module:
    """A small transformer with 0.9 million parameters; by default for ``--data text``.

    It takes sequences of class numbers, and scores every place: (samples, length) becomes (samples,
    classes, length).
    """
    if len(shape) != 1:
        raise ConfigurationError(
            f"model: transformer expects sequences (length,), found samples of shape {shape}: try "
            "--data text"
        )
    return Transformer(classes, shape[0])


def _build_resnet(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a residual network with a stem that fits the images.

    Images of less than 64 x 64 enter it as those of CIFAR-10 do: through a convolution of 3 x 3
    without stride, and no pooling (He et al., Deep Residual Learning for Image Recognition, CVPR
    2016, section 4.2).
    """
    _check_images(name, shape)
    channels, height, width = shape
    import_torchvision()
    from torchvision import models

    model: nn.Module = getattr(models, name)(num_classes=classes)
    if min(height, width) < SMALL:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def _check_images(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ConfigurationError(
            f"model: {name} expects images (channels, height, width) of 4 x 4 or more, "
            f"found samples of shape {shape}: try mlp"
        )
