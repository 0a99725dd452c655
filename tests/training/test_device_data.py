"""Data that fits a device is moved there once, and its batches are those of the memory's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import reading
from mpiddp.training.data import device_data
from mpiddp.training.data.batches import Cut, make_evaluation_batches, make_training_batches
from mpiddp.training.data.data_sets import Split
from mpiddp.training.data.device_data import DeviceSplit, fits, move, place
from mpiddp.training.data.image_data import CIFAR10, Shift
from mpiddp.training.data.reading import BatchReading
from mpiddp.training.data.samples import Batch, Samples

COUNT = 25
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NEEDED = COUNT * (3 * 32 * 32 * 4 + 8)
"""Bytes of the images as float32, and of their labels."""


@pytest.fixture
def images() -> Split:
    """As those of CIFAR-10: bytes, which are normalised when they are read."""
    generator = np.random.default_rng(3)
    pixels = generator.integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8)
    return Split(pixels, generator.integers(10, size=COUNT), CIFAR10)


def test_a_split_may_take_a_tenth_of_the_free_memory_as_it_is_fed_to_the_model(images):
    assert fits(images, 10 * NEEDED)
    assert not fits(images, 10 * NEEDED - 1)
    # Each epoch has other images.
    assert not fits(replace(images, augment=Shift(32, 4, flips=True)), 10 * NEEDED)


def test_batches_on_a_device_have_the_same_bits(images, monkeypatch):
    monkeypatch.setattr(device_data, "PART", 10)
    moved = move(images, CPU)
    assert len(moved) == COUNT and moved.features.dtype == torch.float32
    cut = Cut(batch_size=4, rank=0, ranks=2)
    for make in (make_training_batches, make_evaluation_batches):
        expected = make(Samples(images, seed=5), cut)
        # Workers cannot read what is on a device, so none is started.
        found = make(Samples(moved, seed=5), cut, BatchReading(workers=2))
        pairs = zip(_list(found), _list(expected), strict=True)
        for one, other in pairs:
            assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
            assert one.weight == other.weight
        assert found.reader._workers is None


def _list(batches: Any) -> list[Batch]:
    found = list(batches.start(2) if hasattr(batches, "start") else batches)
    assert len(found) == 4
    return found


def test_only_what_fits_a_gpu_is_moved(images: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(images, CPU) is images
    free = [10 * NEEDED]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 0))
    monkeypatch.setattr(device_data, "move", lambda split, device: move(split, CPU))
    assert isinstance(place(images, GPU), DeviceSplit)
    files: Any = reading.Slow()
    assert place(files, GPU) is files
    # The batch that cannot be converted tells why, as it would elsewhere.
    broken = replace(images, convert=lambda _: 1 / 0)
    assert place(broken, GPU) is broken
    free[0] -= 1
    assert place(images, GPU) is images
