"""Objects that all ranks get, and the barrier. Nothing in it knows of mpiddp."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

LATE_SECONDS = 0.02


class Objects(ABC):
    """Dictionaries that travel in each step; see `worker.SteppedProgram`."""

    def __init__(self, group: distributed.ProcessGroup | None, ranks: int, seed: int) -> None:
        self._group, self._ranks, self._number = group, ranks, seed
        self._found: Sequence[Any] = ()

    def step(self) -> None:
        self._number += 1
        self._found = self.exchange(self._group) if self._group else self.list_all()

    @abstractmethod
    def list_all(self) -> list[dict[str, Any]]:
        """What each rank must have then."""

    @abstractmethod
    def exchange(self, group: distributed.ProcessGroup) -> list[Any]:
        """The same, from the other ranks."""

    def look(self) -> torch.Tensor:
        values = [(each["rank"], each["loss"], sum(each["sizes"])) for each in self._found]
        return torch.tensor(values, dtype=torch.float64).flatten()

    def _describe(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "loss": self._number / 3, "sizes": [rank, self._number]}


class Broadcast(Objects):
    """``broadcast_object_list`` of one object."""

    def list_all(self) -> list[dict[str, Any]]:
        return [self._describe(0)]

    def exchange(self, group: distributed.ProcessGroup) -> list[Any]:
        found = self.list_all() if group.rank() == 0 else [None]
        distributed.broadcast_object_list(found, group=group, group_src=0)
        return found


class Gathering(Objects):
    """``all_gather_object`` of an object of each rank."""

    def list_all(self) -> list[dict[str, Any]]:
        return list(map(self._describe, range(self._ranks)))

    def exchange(self, group: distributed.ProcessGroup) -> list[Any]:
        found: list[Any] = [None] * group.size()
        distributed.all_gather_object(found, self._describe(group.rank()), group)
        return found


class Barrier:
    """``barrier``; see `worker.SteppedProgram`."""

    def __init__(self, group: distributed.ProcessGroup | None, ranks: int, seed: int) -> None:
        self._group = group

    def step(self) -> None:
        if self._group is not None:
            distributed.barrier(self._group)

    def look(self) -> torch.Tensor:
        """1 if nobody leaves before all have come, of whom the first rank is late. Collective."""
        if self._group is None:
            return torch.ones(1)
        time.sleep(0 if self._group.rank() else LATE_SECONDS)
        # All are on one machine, whose clock this is.
        came = time.monotonic()
        self.step()
        times = torch.tensor([came, -time.monotonic()], dtype=torch.float64)
        distributed.all_reduce(times, distributed.ReduceOp.MAX)
        return (times.sum() <= 0).float().reshape(1)
