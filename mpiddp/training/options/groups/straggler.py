"""Makes a worker slow on purpose, to compare how synchronisations cope with it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

RANDOM = "random"


@dataclass(frozen=True)
class Straggler:
    rank: int | None
    """None for another worker in each step, drawn from the seed."""
    factor: float
    """How much longer its forward and backward pass takes; 1 or more."""


def parse_straggler(text: str) -> Straggler:
    """Read ``RANK=FACTOR`` or ``random=FACTOR``. Raises ConfigurationError."""
    who, _, factor = text.partition("=")
    try:
        found = Straggler(None if who == RANDOM else int(who), float(factor))
    except ValueError:
        found = None
    if found is None or (found.rank or 0) < 0 or not 1 <= found.factor < float("inf"):
        raise ConfigurationError(
            f"straggler: expected RANK=FACTOR or random=FACTOR, with a factor of 1 or more, for "
            f"example 0=4 or random=4, found {text!r}"
        )
    return found


def describe_straggler(straggler: Straggler) -> str:
    who = "a worker drawn for each step" if straggler.rank is None else f"rank {straggler.rank}"
    return f"Straggler: {who}, whose passes take {straggler.factor:g} times as long"


def check_straggler(straggler: Straggler, workers: tuple[int, ...]) -> None:
    """Raise ConfigurationError if no such rank computes."""
    if straggler.rank is not None and straggler.rank not in workers:
        found = ", ".join(map(str, workers))
        raise ConfigurationError(
            f"straggler: rank {straggler.rank} computes nothing; the workers are ranks {found}"
        )


@dataclass(frozen=True)
class Slowdown:
    """Makes one worker's steps longer."""

    straggler: Straggler
    place: int
    """This rank's, among the workers."""
    workers: tuple[int, ...]
    seed: int
    seconds: float
    """How long this rank's pass takes."""
    device: torch.device

    def is_slow(self, step: int) -> bool:
        """Whether it is this worker's turn; the same one's on all ranks."""
        if self.straggler.rank is not None:
            return self.straggler.rank == self.workers[self.place]
        # A text seeds the same numbers in every process and version of Python.
        dice = random.Random(f"straggler {self.seed} {step}")
        return dice.randrange(len(self.workers)) == self.place

    def wait(self, step: int) -> None:
        """Sleep as much longer as this worker's step, counted from 0, is to take.

        A slow machine would keep its core busy; the sleep leaves it to ranks that share it. A GPU's
        queued work is waited for first: it would go on during the sleep.
        """
        if not self.is_slow(step):
            return
        if self.device.type != "cpu":
            import torch

            torch.get_device_module(self.device).synchronize(self.device)
        time.sleep((self.straggler.factor - 1) * self.seconds)
