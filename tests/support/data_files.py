"""Small data sets in the file formats of the real ones."""

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mpiddp.training.data.vision import import_torchvision
from mpiddp.training.options.config import Configuration

COLOURS = {"blue": (40, 60, 200), "green": (50, 190, 60), "red": (210, 40, 50)}


def draw(count: int, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Images of ten patterns under a little noise, and which pattern each has."""
    generator = np.random.default_rng(count)
    patterns = np.random.default_rng(7).integers(0, 200, (10, *shape))
    labels = [each % 10 for each in range(count)]
    return (patterns[labels] + generator.integers(0, 50, (count, *shape))).astype(np.uint8), labels


def write_mnist(folder: Path, train: int = 60, test: int = 20) -> None:
    """The four files, as http://yann.lecun.com/exdb/mnist described them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        images, labels = draw(count, (28, 28))
        header = struct.pack(">4i", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">2i", 0x801, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + bytes(labels))


def write_cifar10(folder: Path, patch: pytest.MonkeyPatch, train: int = 50, test: int = 20) -> None:
    """The files for Python, and their digests in the place of the original's."""
    import_torchvision()
    from torchvision.datasets import CIFAR10

    base = folder / CIFAR10.base_folder
    base.mkdir(parents=True)

    def write(name: str, content: dict[str, Any]) -> str:
        data = pickle.dumps(content, protocol=2)
        (base / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    lists = []
    for names, count in ((CIFAR10.train_list, train), (CIFAR10.test_list, test)):
        images, labels = draw(count, (3, 32, 32))
        parts = np.array_split(np.arange(count), len(names))
        lists.append(
            [
                [name, write(name, {"data": images[part].reshape(len(part), -1),
                                    "labels": [labels[each] for each in part]})]
                for (name, _), part in zip(names, parts, strict=True)
            ]
        )  # fmt: skip
    patch.setattr(CIFAR10, "train_list", lists[0])
    patch.setattr(CIFAR10, "test_list", lists[1])
    meta = {"label_names": [f"class {each}" for each in range(10)]}
    patch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": write("batches.meta", meta)})


def write_images(folder: Path, train: int = 8, test: int = 2, size: int = 12) -> None:
    """JPEG files of one colour each, in the directories of three classes."""
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("val", test)):
        for name, colour in COLOURS.items():
            target = folder / split / name
            target.mkdir(parents=True)
            for number in range(count):
                noise = generator.integers(-30, 30, (size, size + 4, 3))
                pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(target / f"{number}.jpg")


def provide(name: str, folder: Path, patch: pytest.MonkeyPatch) -> Configuration:
    """A configuration for a data set of that name, whose files are written where it has some."""
    match name:
        case "mnist":
            write_mnist(folder)
        case "cifar10":
            write_cifar10(folder, patch)
        case "imagefolder":
            write_images(folder)
            return Configuration(data=name, data_dir=folder, image_size=8)
    return Configuration(data=name, data_dir=folder)
