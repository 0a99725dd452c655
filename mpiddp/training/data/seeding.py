"""Seeds of the random generators of torch, NumPy and ``random``, of one process."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed all generators of this process; ``seed``: not negative."""
    torch.manual_seed(seed)
    _seed_others(seed)


def seed_cpu_generators(seed: int) -> None:
    """The same, but for torch's generators of GPUs.

    In a process that uses no GPU yet, ``torch.manual_seed`` keeps every call for later.
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


def fork_generators(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """What is drawn within it from torch's generators, a GPU's too, changes nothing drawn later."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


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
