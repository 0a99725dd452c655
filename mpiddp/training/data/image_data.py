"""Data sets of images in files, which torchvision reads.

mnist        DIR/MNIST/raw, as Y. LeCun's files hold it
cifar10      DIR/cifar-10-batches-py, as A. Krizhevsky's archive holds it
imagefolder  DIR/train/CLASS/IMAGE and DIR/val/CLASS/IMAGE (or DIR/test)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data_sets import DataSet, Split
from mpiddp.training.data.vision import import_torchvision
from mpiddp.training.options.config import Configuration

LOOKS = 256
"""Files of a split whose size and first bytes are compared between ranks; all names are."""
FIRST_BYTES = 4096


@dataclass(frozen=True)
class ImageKind:
    """A data set whose files torchvision can fetch."""

    loader: str
    """Name of torchvision's class."""
    folder: Path
    """Where its files are, in the data directory."""


KINDS = {
    "mnist": ImageKind("MNIST", Path("MNIST/raw")),
    "cifar10": ImageKind("CIFAR10", Path("cifar-10-batches-py")),
}


class Transforms:
    """Transforms of torchvision, composed when they are first called in a process."""

    def __call__(self, images: Any) -> torch.Tensor:
        found: torch.Tensor = _compose(self)(images)
        return found

    def list_steps(self, v2: Any) -> list[Any]:
        """``v2``: ``torchvision.transforms.v2``."""
        raise NotImplementedError


@cache
def _compose(transforms: Transforms) -> Callable[[Any], Any]:
    import_torchvision()
    from torchvision.transforms import v2

    composed: Callable[[Any], Any] = v2.Compose(transforms.list_steps(v2))
    return composed


@dataclass(frozen=True)
class Normalisation(Transforms):
    """Makes floats of bytes, and of a channel's distribution one of mean 0 and deviation 1.

    Bytes (…, channels, height, width) become float32.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def list_steps(self, v2: Any) -> list[Any]:
        return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(self.mean, self.deviation)]


# Over the training images. The last is ImageNet's.
MNIST = Normalisation((0.1307,), (0.3081,))
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
PHOTOS = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Shift(Transforms):
    """Cuts images of the same size at a random place of a wider frame; may flip them.

    Bytes (channels, size, size) stay bytes.
    """

    size: int
    padding: int
    flips: bool

    def list_steps(self, v2: Any) -> list[Any]:
        flips = [v2.RandomHorizontalFlip()] if self.flips else []
        return [v2.RandomCrop(self.size, padding=self.padding), *flips]


@dataclass(frozen=True)
class Resizing(Transforms):
    """Makes images of ``size`` x ``size`` of photographs: their middle, or a random part.

    A PIL image becomes float32 (3, size, size).
    """

    size: int
    varies: bool

    def list_steps(self, v2: Any) -> list[Any]:
        steps = [v2.Resize(self.size, antialias=True), v2.CenterCrop(self.size)]
        if self.varies:
            steps = [v2.RandomResizedCrop(self.size, antialias=True), v2.RandomHorizontalFlip()]
        return [v2.ToImage(), *steps, v2.ToPureTensor(), PHOTOS]


def load_mnist(configuration: Configuration) -> DataSet:
    """Return 60,000 and 10,000 handwritten digits, 1 x 28 x 28."""
    return _load(configuration, MNIST, Shift(28, 2, flips=False))


def load_cifar10(configuration: Configuration) -> DataSet:
    """Return 50,000 and 10,000 photographs of 10 kinds of things, 3 x 32 x 32."""
    return _load(configuration, CIFAR10, Shift(32, 4, flips=True))


def _load(configuration: Configuration, normalisation: Normalisation, shift: Shift) -> DataSet:
    import_torchvision()
    from torchvision import datasets

    directory = configuration.data_dir
    kind = KINDS[configuration.data].loader
    augment = shift if configuration.augment else None
    try:
        parts = [getattr(datasets, kind)(directory, train=train) for train in (True, False)]
        train, test = (_make_split(part, normalisation) for part in parts)
    except Exception as error:  # torchvision checks some of the files, and only unpacks others.
        raise ConfigurationError(_describe_damage(configuration, error)) from error
    return DataSet(
        train=Split(train.features, train.labels, normalisation, augment), test=test, classes=10
    )


def _make_split(found: Any, normalisation: Normalisation) -> Split:
    images, labels = np.asarray(found.data), np.asarray(found.targets, np.int64)
    # MNIST has no channel, CIFAR-10 has it last.
    images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    if len(images) != len(labels) or not len(labels):
        raise ValueError(f"it has {len(images)} images and {len(labels)} labels")
    return Split(np.ascontiguousarray(images), labels, normalisation)


def _describe_damage(configuration: Configuration, error: Exception) -> str:
    name = configuration.data
    directory, kind = configuration.data_dir, KINDS[name]
    folder, loader = directory / kind.folder, kind.loader
    call = f"from torchvision.datasets import {loader}; {loader}('{directory}', download=True)"
    fetch = f'python -c "{call}"'
    if not folder.exists():
        return f"data_dir: expected {name} in {folder}, found nothing there: fetch it with {fetch}"
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"data_dir: {name} in {folder} is damaged or not complete ({reason}): remove that "
        f"directory, and fetch it with {fetch}"
    )


def load_images(configuration: Configuration) -> DataSet:
    """Return the photographs of a directory, by their classes' directories."""
    import_torchvision()
    from torchvision import datasets

    directory, size = configuration.data_dir, configuration.image_size
    tests = directory / ("val" if (directory / "val").is_dir() else "test")
    found = []
    for folder in (directory / "train", tests):
        try:
            found.append(datasets.ImageFolder(str(folder)))
        except OSError as error:
            raise ConfigurationError(
                f"data_dir: expected images as {directory}/train/CLASS/IMAGE and {directory}/val/"
                f"CLASS/IMAGE: {error}"
            ) from error
    train, test = found
    if train.classes != test.classes:
        only = sorted(set(train.classes) ^ set(test.classes))
        raise ConfigurationError(
            f"data_dir: expected the same classes in {directory}/train and {tests}, found only in "
            f"one of them: {', '.join(only[:8])}"
        )
    return DataSet(
        train=_list_files(directory / "train", train.samples, size, configuration.augment),
        test=_list_files(tests, test.samples, size, False),
        classes=len(train.classes),
        sample_shape=(3, size, size),
    )


@dataclass(frozen=True)
class ImageFiles:
    """A split whose images are read when they are asked for.

    Its names are in one tensor, which worker processes share.
    """

    root: Path
    names: torch.Tensor
    """UTF-8 of all names within ``root``, one after the other."""
    ends: torch.Tensor
    """Where each name ends."""
    labels: torch.Tensor
    transform: Callable[[Any], torch.Tensor]

    def __len__(self) -> int:
        return len(self.labels)

    def find_path(self, position: int) -> Path:
        start = int(self.ends[position - 1]) if position else 0
        name = self.names[start : int(self.ends[position])].numpy().tobytes()
        return self.root / name.decode("utf-8", "surrogateescape")

    def __getitem__(self, position: int, /) -> tuple[torch.Tensor, int]:
        from PIL import Image

        path = self.find_path(position)
        try:
            with Image.open(path) as image:
                decoded = image.convert("RGB")
            return self.transform(decoded), int(self.labels[position])
        except Exception as error:  # Decoders raise anything.
            raise ValueError(f"{path}: {error}") from error

    def wrap_transforms(self, wrap: Callable[[Any], Any]) -> ImageFiles:
        return replace(self, transform=wrap(self.transform))

    def digest(self) -> bytes:
        """Of all names and labels, and of the sizes and first bytes of some files."""
        digest = hashlib.sha256(self.names.numpy().data)
        digest.update(self.labels.numpy().data)
        for position in np.linspace(0, len(self) - 1, min(LOOKS, len(self)), dtype=int):
            path = self.find_path(int(position))
            digest.update(str(path.stat().st_size).encode())
            with path.open("rb") as file:
                digest.update(file.read(FIRST_BYTES))
        return digest.digest()


def _list_files(
    root: Path, samples: Sequence[tuple[str, int]], size: int, varies: bool
) -> ImageFiles:
    names = [
        str(Path(path).relative_to(root)).encode("utf-8", "surrogateescape") for path, _ in samples
    ]
    return ImageFiles(
        root,
        torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8),
        torch.tensor([len(name) for name in names]).cumsum(0),
        torch.tensor([label for _, label in samples]),
        Resizing(size, varies),
    )
