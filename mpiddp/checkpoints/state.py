"""A training's state, part by part, as tensors for a checkpoint, and back.

``PART.NAME``           what all ranks have alike, once; of a sharded tensor, each rank its part
``rank-<r>.PART.NAME``  what only rank r has, or has differently

Model and optimizer are alike by their meaning. All else is compared when it is written.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mpiddp.checkpoints.packing import is_structure, pack, unpack
from mpiddp.checkpoints.storage.finding import Found
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.checkpoints.storage.shards import Stored, list_stored, load_shards
from mpiddp.checkpoints.tensor_memory import narrow

VALUES = "values"


class Stateful(Protocol):
    """A part of the state: a learning-rate schedule, a loss scaler, a data loader.

    It may say more about itself, by attributes of these names:

    ``is_replicated``: True if its tensors are alike on all ranks, or parts of sharded ones. They
    are not compared then, which saves their digests.

    ``writer``: of a replicated part, the rank that writes what is no tensor, if not rank 0.

    ``is_of_rank``: True if its state is of no use to another number of ranks, which keep theirs.

    ``is_copied``: True if ``load_state_dict`` copies its tensors into others, which are there and
    keep their types, strides and memory, as modules do. All else comes back as it was saved.

    ``is_optional``: True if it is given an empty dict by a checkpoint that lacks it.

    ``load_state_dicts(states)``: called in place of ``load_state_dict`` if the number of ranks has
    changed, with the states of all ranks that wrote the checkpoint.

    ``find_targets(stored)``: the tensors to read into, which may be sharded, by their names.
    """

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""


class ModelState:
    """Parameters and persistent buffers, named as in the plain model; rank 0's buffers."""

    is_replicated = is_copied = True

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank

    def state_dict(self) -> dict[str, Any]:
        state = get_model_state_dict(self._model)
        if self._rank > 0:
            buffers = {clean_name(name) for name, _ in find_module(self._model).named_buffers()}
            state = {name: each for name, each in state.items() if name not in buffers}
        return state

    def find_targets(self, stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        """The model's own tensors. Raises ValueError if the checkpoint's differ."""
        targets = pack(get_model_state_dict(self._model), is_copied=True)
        for name, target in targets.items():
            if is_structure(name):
                continue
            if name not in stored:
                raise ValueError(f"{name} is not in it")
            if target.shape != stored[name].shape:
                raise ValueError(
                    f"{name}: expected {tuple(target.shape)}, found {tuple(stored[name].shape)}"
                )
        return targets

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state)


class Buffers:
    """Each rank's buffers; those of batch normalisation differ between ranks."""

    is_of_rank = is_copied = True

    def __init__(self, model: nn.Module) -> None:
        self._module = find_module(model)

    def state_dict(self) -> dict[str, Any]:
        return {name: narrow(each) for name, each in self._module.named_buffers()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, buffer in self._module.named_buffers():
            if name in state:
                own, stored = narrow(buffer), state[name]
                if stored.shape == buffer.shape:
                    # Older checkpoints have all elements of an expanded one.
                    stored = stored[tuple(map(slice, own.shape))]
                own.copy_(stored)


class RandomState:
    """The random generators of torch, NumPy and ``random`` of one rank, between two draws."""

    is_of_rank = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def state_dict(self) -> dict[str, Any]:
        gpu = {"cuda": None}
        if self._device.type != "cpu":
            gpu[self._device.type] = self._module.get_rng_state(self._device)
        numbers = np.random.get_state(legacy=False)
        assert isinstance(numbers, dict)
        key = torch.from_numpy(numbers["state"]["key"].astype(np.int64))
        version, internal, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            **gpu,
            "numpy": {**numbers, "state": {"key": key, "pos": int(numbers["state"]["pos"])}},
            "random": [version, torch.tensor(internal, dtype=torch.int64), gauss],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        # None if it was saved on CPUs, or on another maker's GPU.
        own = state.get(self._device.type)
        if own is not None:
            self._module.set_rng_state(own, self._device)
        numbers = dict(state["numpy"])
        key = numbers["state"]["key"].numpy().astype(np.uint32)
        np.random.set_state({**numbers, "state": {"key": key, "pos": numbers["state"]["pos"]}})
        version, internal, gauss = state["random"]
        random.setstate((version, tuple(internal.tolist()), gauss))


def find_module(model: nn.Module) -> nn.Module:
    """The module in the wrappers of DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """A parameter's name without the wrappers of torch.compile and activation checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def capture(
    parts: Mapping[str, Stateful], values: Mapping[str, Any], rank: int
) -> dict[str, torch.Tensor]:
    """The state of all parts, and rank 0's ``values``. The tensors are the training's own."""
    tensors: dict[str, torch.Tensor] = {}
    for part, each in parts.items():
        is_replicated = getattr(each, "is_replicated", False)
        is_copied = isinstance(each, nn.Module) or getattr(each, "is_copied", False)
        for name, tensor in pack(each.state_dict(), is_copied=is_copied).items():
            if is_replicated and is_structure(name) and rank != getattr(each, "writer", 0):
                continue
            is_shared = is_replicated or isinstance(tensor, DTensor)
            tensors[f"{part}.{name}" if is_shared else f"rank-{rank}.{part}.{name}"] = tensor
    if rank == 0:
        tensors |= {f"{VALUES}.{name}": each for name, each in pack(dict(values)).items()}
    return tensors


def restore(parts: Mapping[str, Stateful], found: Found, ranks: RankGroup) -> None:
    """Load all parts from a checkpoint, in their order.

    Not collective. Raises whatever torch raises for names, shapes and contents that do not fit.
    """
    reader = _Reader(found.path)
    world, is_same = found.manifest.world, found.manifest.world == ranks.size
    for part, each in parts.items():
        if not is_same and getattr(each, "is_of_rank", False):
            continue
        if not is_same and hasattr(each, "load_state_dicts"):
            each.load_state_dicts([reader.read(part, rank, {}) for rank in range(world)])
            continue
        # What is alike on all ranks may have been stored by ranks that each had their own.
        is_own = is_same and not getattr(each, "is_replicated", False)
        rank = ranks.rank if is_own else 0
        stored = reader.list(part, rank)
        if not any(is_structure(name) for name in stored):
            if not getattr(each, "is_optional", False):
                raise ValueError(f"it has no state of {part!r}")
            each.load_state_dict({})
            continue
        if hasattr(each, "find_targets"):
            targets = each.find_targets(stored)
        else:
            targets = _find_sharded(each, stored)
        each.load_state_dict(reader.read(part, rank, targets))


def read_values(found: Found) -> dict[str, Any]:
    """Rank 0's values in a checkpoint. Not collective."""
    values: dict[str, Any] = _Reader(found.path).read(VALUES, 0, {})
    return values


def _find_sharded(part: Stateful, stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """What takes the sharded tensors of a part, sharded as they are now."""
    return {
        name: torch.empty_like(each, dtype=stored[name].dtype)
        for name, each in pack(part.state_dict(), is_copied=True).items()
        if isinstance(each, DTensor) and name in stored and stored[name].shape == each.shape
    }


class _Reader:
    """Reads parts of one checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored = list_stored(path)

    def list(self, part: str, rank: int) -> dict[str, Stored]:
        """A rank's tensors of a part, by their names in it."""
        return {name: self._stored[each] for name, each in self._find(part, rank).items()}

    def _find(self, part: str, rank: int) -> dict[str, str]:
        """Their names in the checkpoint. What only this rank has comes before what all have."""
        return {
            name.removeprefix(prefix): name
            for prefix in (f"{part}.", f"rank-{rank}.{part}.")
            for name in self._stored
            if name.startswith(prefix)
        }

    def read(self, part: str, rank: int, targets: Mapping[str, torch.Tensor]) -> Any:
        """A rank's state of a part, read into ``targets`` as far as they name it."""
        names = self._find(part, rank)
        found = {}
        for name, each in names.items():
            stored = self._stored[each]
            target = None if is_structure(name) else targets.get(name)
            found[name] = (
                torch.empty(stored.shape, dtype=stored.dtype) if target is None else target
            )
        load_shards(self._path, {names[name]: tensor for name, tensor in found.items()})
        return unpack(found)
