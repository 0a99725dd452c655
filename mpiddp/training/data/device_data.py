"""Data in memory that fits a GPU's is copied there once; batches are then taken by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpiddp.training.data.data_sets import MapStyle, Split
from mpiddp.training.data.structure import join_leaves, list_leaves, map_leaves

SHARE = 0.1
"""Part of a GPU's free memory that a split may take: a model and its activations need the rest."""
PART = 1024
"""Samples that are converted at once."""


@dataclass(frozen=True)
class DeviceSplit:
    """Converted samples and their labels, on one device. Workers in other processes cannot read
    them."""

    features: Any
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, positions: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """Features and labels of several samples, on the device, without waiting for it."""
        features, labels = self.features, self.labels
        index = torch.tensor(positions, pin_memory=not labels.is_cpu)
        if not labels.is_cpu:
            index = index.to(labels.device, non_blocking=True)
        # It takes half of the time that indexing does.
        if isinstance(features, torch.Tensor):
            return features.index_select(0, index), labels.index_select(0, index)
        taken = map_leaves(lambda each: each.index_select(0, index), features)
        return taken, labels.index_select(0, index)


def place(split: Split | MapStyle, device: torch.device) -> Split | MapStyle | DeviceSplit:
    """The split on the device, if that is a GPU with room for it; else as it is."""
    if device.type == "cpu" or not isinstance(split, Split):
        return split
    try:
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return move(split, device) if fits(split, free) else split
    except Exception:
        # What cannot be converted is reported when its batch is read.
        return split


def hold(split: Split | MapStyle | DeviceSplit) -> Split | MapStyle | DeviceSplit:
    """The split as tensors in its own memory, if it is fed to the model as it is."""
    if not isinstance(split, Split) or split.convert is not None or split.augment is not None:
        return split
    try:
        return DeviceSplit(
            map_leaves(torch.from_numpy, split.features), torch.from_numpy(split.labels)
        )
    except (TypeError, ValueError):
        # What no tensor can hold is reported when its batch is read.
        return split


def fits(split: Split, free: int) -> bool:
    """Whether the split, converted, takes at most `SHARE` of so many bytes.

    Samples that are varied differ in each epoch, so they stay where they are.
    """
    if split.augment is not None:
        return False
    size: int = sum(each.nbytes for each in list_leaves(split.read([0])))
    return len(split) * size <= SHARE * free


def move(split: Split, device: torch.device) -> DeviceSplit:
    """Convert all samples where they are, so that they have the same bits as single batches."""
    parts = []
    for begin in range(0, len(split), PART):
        features, labels = split.read(range(begin, min(begin + PART, len(split))))
        parts.append((map_leaves(lambda each: each.to(device), features), labels.to(device)))
    features, labels = join_leaves(parts)
    return DeviceSplit(features, labels)
