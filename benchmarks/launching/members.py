"""One rank of each of the two paired jobs: of mpiddp's session, and of torchrun's group."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

import mpiddp
from benchmarks.launching.worker_loop import describe_place
from mpiddp.errors import ConfigurationError


class SessionMember:
    """A rank that MPI started."""

    def __init__(self, session: mpiddp.Session) -> None:
        if session.comm is None:
            raise ConfigurationError("this benchmark's ranks need MPI: start them with mpirun")
        self._session, self._comm = session, session.comm
        self.rank, self.size = session.world.rank, session.world.size

    def broadcast(self, value: int) -> int:
        return self._session.broadcast(value)

    def greet(self) -> dict[str, Any]:
        return {**describe_place()}


class TorchMember:
    """A rank that torchrun started, which knows no MPI."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def broadcast(self, value: int) -> int:
        held = torch.tensor([value], device=self.device)
        distributed.broadcast(held, 0)
        return int(held.item())

    def close(self) -> None:
        distributed.destroy_process_group()
