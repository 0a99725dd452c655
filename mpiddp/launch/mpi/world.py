"""Rank, size, node and position on the node, found over MPI and cross-checked."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mpiddp import environment
from mpiddp.errors import AloneError, LaunchError
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.launch.launcher.launcher import Launcher, tasks_of_allocation
from mpiddp.launch.mpi.compatibility import alone_message, library_name

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class World:
    """One rank's place among all.

        if session.world.rank == 0:
            print(session.world.node_count, "nodes")

    Ranks, local ranks and nodes count from 0.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    node_count: int
    hostname: str
    master_hostname: str
    """Host of rank 0."""


@dataclass(frozen=True)
class Neighbourhood:
    """The communicators that a World was read from; freed by ``close``."""

    node: MPI.Intracomm
    """The ranks that share this rank's memory; its rank is the local rank."""
    leaders: MPI.Intracomm | None
    """Local rank 0 of each node, in the order of their ranks; None on the other ranks."""

    def close(self) -> None:
        """Free both communicators. Collective."""
        if self.leaders is not None:
            self.leaders.Free()
        self.node.Free()


@dataclass(frozen=True)
class Roster:
    """Where every rank is; known to rank 0 alone, for its messages."""

    hostnames: tuple[str, ...]
    """By node rank."""
    local_sizes: tuple[int, ...]
    """By node rank."""
    nodes: tuple[int, ...]
    """Node rank of each rank."""

    def describe(self, rank: int) -> str:
        """``rank 3 on node002``."""
        return f"rank {rank} on {self.hostnames[self.nodes[rank]]}"


def check_size(size: int, version: str, launcher: Launcher | None) -> None:
    """Compare MPI's size with the launcher's.

    Raises LaunchError if they differ; the usual case is the silent one, every rank alone.
    """
    if launcher is None or not launcher.sizes or size in launcher.sizes:
        return
    if size == 1:
        raise AloneError(alone_message(version, launcher))
    raise LaunchError(
        f"{launcher.name} started {launcher.size} processes, but {library_name(version)} "
        f"sees {size}: the environment mixes two launches; start the job again from a shell "
        "without variables of an earlier launch"
    )


def solitary_world() -> World:
    """The World of a process that is alone."""
    hostname = socket.gethostname()
    return World(0, 1, 0, 1, 0, 1, hostname, hostname)


def find_world(communicator: MPI.Intracomm) -> tuple[World, Neighbourhood]:
    """Split the ranks by shared memory. Collective over ``communicator``.

    Node ranks follow the lowest rank on each node, so rank 0 is on node 0.
    """
    from mpi4py import MPI

    rank = communicator.Get_rank()
    node = cast("MPI.Intracomm", communicator.Split_type(MPI.COMM_TYPE_SHARED, rank))
    leads = node.Get_rank() == 0
    split = cast("MPI.Intracomm", communicator.Split(0 if leads else MPI.UNDEFINED, rank))
    leaders = split if leads else None
    hostname = socket.gethostname()
    place = (leaders.Get_rank(), leaders.Get_size()) if leaders is not None else None
    place = node.bcast(place)
    world = World(
        rank=rank,
        size=communicator.Get_size(),
        local_rank=node.Get_rank(),
        local_size=node.Get_size(),
        node_rank=place[0],
        node_count=place[1],
        hostname=hostname,
        master_hostname=communicator.bcast(hostname),
    )
    return world, Neighbourhood(node, leaders)


def gather_roster(
    world: World, neighbourhood: Neighbourhood, communicator: MPI.Intracomm
) -> Roster | None:
    """Collect on rank 0 where each rank is: one name per node, one number per rank. Collective."""
    nodes = communicator.gather(world.node_rank)
    if neighbourhood.leaders is None:
        return None
    rows = neighbourhood.leaders.gather((world.hostname, world.local_size))
    if rows is None or nodes is None:
        return None
    return Roster(tuple(name for name, _ in rows), tuple(count for _, count in rows), tuple(nodes))


def find_oddities(world: World, launcher: Launcher | None, roster: Roster | None) -> list[str]:
    """What looks wrong but may be meant; said by rank 0 in its start-up block."""
    oddities = []
    tasks = tasks_of_allocation()
    if world.size == 1 and launcher is None and tasks > 1:
        oddities.append(
            f"this is one process alone in an allocation of {tasks} tasks; to use them all: "
            "srun --mpi=pmix python -m …"
        )
    if world.size == 1 and environment.is_set((environment.SLURM_TERMINAL,)):
        oddities.append(
            "this terminal is one task of a Slurm step, and so one rank; to start more in it: "
            "python -m mpiddp -n RANKS …"
        )
    if roster is not None:
        repeated = sorted({name for name in roster.hostnames if roster.hostnames.count(name) > 1})
        if repeated:
            oddities.append(
                f"MPI splits the ranks into {len(roster.hostnames)} nodes by shared memory, but "
                f"{fold_hostnames(repeated)} stands for several of them (containers without a "
                "common /dev/shm, or a setting such as MPIR_CVAR_NOLOCAL)"
            )
    return oddities
