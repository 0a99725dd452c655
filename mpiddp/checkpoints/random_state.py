"""The random generators of torch, NumPy and ``random``, of one process."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed all generators of this process; ``seed``: not negative."""
    torch.manual_seed(seed)
    _seed_others(seed)


def seed_cpu_generators(seed: int) -> None:
    """The same, but for torch's generators of GPUs.

    In a process that has not begun to use CUDA, ``torch.manual_seed`` keeps every call for later.
    """
    torch.default_generator.manual_seed(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)


def mix_seed(*numbers: int) -> int:
    """A seed that follows from these numbers, and from no others in practice."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:7], "little")


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """What is drawn within it from the CPU's generators changes nothing that is drawn later."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def read_generators(device: torch.device) -> dict[str, Any]:
    """The state of each, between two draws; ``device`` is this rank's."""
    numbers = np.random.get_state(legacy=False)
    assert isinstance(numbers, dict)
    key = torch.from_numpy(numbers["state"]["key"].astype(np.int64))
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": {**numbers, "state": {"key": key, "pos": int(numbers["state"]["pos"])}},
        "random": [version, torch.tensor(internal, dtype=torch.int64), gauss],
    }


def set_generators(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on as ``read_generators`` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    numbers = dict(state["numpy"])
    key = numbers["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numbers, "state": {"key": key, "pos": numbers["state"]["pos"]}})
    version, internal, gauss = state["random"]
    random.setstate((version, tuple(internal.tolist()), gauss))
