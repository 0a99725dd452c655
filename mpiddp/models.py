"""The models of ``python -m mpiddp.train --model NAME``, for example to load exported weights into.

    model = mpiddp.models.convnet()
    model.load_state_dict(weights)  # torch.load("weights.pt", weights_only=True)
    scores = model.eval()(torch.rand(5, 1, 8, 8))

``shape`` is that of one sample: (channels, height, width) for images. Raises ConfigurationError for
one that the model cannot take.
"""

from __future__ import annotations

from torch import nn

from mpiddp.training.task.models import (
    build_convnet,
    build_mlp,
    build_resnet18,
    build_resnet50,
    build_transformer,
)

__all__ = ["convnet", "mlp", "resnet18", "resnet50", "transformer"]


def convnet(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> nn.Module:
    """A small convolutional network; by default for ``--data digits``."""
    return build_convnet(shape, classes)


def mlp(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> nn.Module:
    """A perceptron with one hidden layer; by default for ``--data digits``."""
    return build_mlp(shape, classes)


def resnet18(shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18; by default for ``--data cifar10``."""
    return build_resnet18(shape, classes)


def resnet50(shape: tuple[int, ...] = (3, 224, 224), classes: int = 1000) -> nn.Module:
    """torchvision's ResNet-50; by default for ``--data imagefolder`` with ImageNet's classes."""
    return build_resnet50(shape, classes)


def transformer(shape: tuple[int, ...] = (128,), classes: int = 256) -> nn.Module:
    """A small transformer; by default for ``--data text``."""
    return build_transformer(shape, classes)
