"""Joins a session to the collective calls, which know nothing of each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpiddp.collectives import bootstrap
from mpiddp.collectives.communicator import Communicator
from mpiddp.errors import ConfigurationError
from mpiddp.launch.rendezvous.store import find_group_timeout
from mpiddp.launch.session import Session, current_session

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


@dataclass(frozen=True)
class _Launch:
    """A session, as `collectives.setup` wants it."""

    session: Session
    rank: int
    node: int
    local_rank: int
    local_size: int
    hostname: str
    device: torch.device
    timeout: float
    communicators: list[MPI.Intracomm] = field(default_factory=list)

    def gather(self, value: T) -> list[T]:
        return self.session.gather(value)

    def agree(self, value: Any, what: str) -> Any:
        return self.session.agree(value, what)

    def make_mpi(self) -> MPI.Intracomm:
        communicator = self.session.duplicate()
        assert communicator is not None
        self.communicators.append(communicator)
        return communicator

    def make_group(self, on_gpu: bool) -> Any:
        backend = self.session.backend if on_gpu else "gloo"
        if on_gpu and backend != "nccl":
            raise ConfigurationError(
                f"tensors on GPUs travel over NCCL, but this session has {backend}: NCCL needs a "
                "GPU for each rank; or make the call on a CPU tensor"
            )
        if not torch.distributed.is_initialized():
            raise ConfigurationError(
                "transport torch needs torch.distributed's group: call init_process_group() first"
            )
        wait = find_group_timeout(backend, self.timeout)
        group = torch.distributed.new_group(backend=backend, timeout=wait)
        if on_gpu:
            # NCCL wants all ranks in a group's first call.
            torch.distributed.all_reduce(torch.zeros(1, device=self.session.device), group=group)
        return group

    def close(self) -> None:
        """Free the communicators, once nothing uses them any more."""
        while self.communicators:
            self.communicators.pop().Free()


def find_communicator() -> Communicator:
    """The current session's; made by the first call of all. Raises ConfigurationError."""
    session = current_session()
    if session.collectives is None:
        session.collectives = _make_communicator(session)
    found: Communicator = session.collectives
    return found


def _make_communicator(session: Session) -> Communicator:
    world = session.world
    if world.size == 1:
        return bootstrap.make_alone(session.device)
    launch = _Launch(
        session,
        world.rank,
        world.node_rank,
        world.local_rank,
        world.local_size,
        world.hostname,
        session.device,
        session.timeout,
    )
    communicator = bootstrap.make_communicator(launch)
    session.at_close(communicator.close)
    session.at_close(launch.close)
    return communicator
