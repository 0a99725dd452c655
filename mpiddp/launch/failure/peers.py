"""What one process knows of the other ranks of its job, and how it may reach them."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.launch.launcher.launcher import Launcher

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.launch.mpi.world import Roster, World
    from mpiddp.lifeline.lifeline import Lifeline


@dataclass(frozen=True)
class Peers:
    """What start-up has found so far; each field is None before, and without MPI."""

    launcher: Launcher | None = None
    world: World | None = None
    roster: Roster | None = None
    """On rank 0 only."""
    communicator: MPI.Intracomm | None = None
    """For failures alone, so that their messages meet no others."""
    lifeline: Lifeline | None = None
    """From the end of start-up to the end of the session; in a script's own session that of the
    session around it."""

    @property
    def rank(self) -> int:
        """From the launcher if MPI has not told yet."""
        if self.world is not None:
            return self.world.rank
        return self.launcher.rank if self.launcher is not None else 0

    @property
    def hostname(self) -> str:
        return self.world.hostname if self.world is not None else socket.gethostname()

    @property
    def is_shared(self) -> bool:
        """Whether other processes belong to the job."""
        if self.world is not None:
            return self.world.size > 1
        return self.launcher is not None and (self.launcher.size or 2) > 1

    def describe_rank(self, rank: int) -> str:
        """``rank 3 on node002``, as far as this rank knows."""
        if self.roster is not None:
            return self.roster.describe(rank)
        if rank == 0 and self.world is not None:
            return f"rank 0 on {self.world.master_hostname}"
        return f"rank {rank}"

    def describe_place(self, step: int | None) -> str:
        """``rank 3 of 4 on node002 at step 7: ``; without the rank in a process that is alone."""
        if not self.is_shared:
            return f"step {step}: " if step is not None else ""
        size = self.world.size if self.world is not None else None
        if size is None and self.launcher is not None:
            size = self.launcher.size
        of = f" of {size}" if size is not None else ""
        at = f" at step {step}" if step is not None else ""
        return f"rank {self.rank}{of} on {self.hostname}{at}: "
