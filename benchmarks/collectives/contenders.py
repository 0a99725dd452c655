"""What ``python -m benchmarks allreduce`` compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.launching.paired_jobs import MPI_JOB, TORCH_JOB

WORKER = "benchmarks.collectives.ranks.worker"

GLOO, NCCL, MPI, RING, PERSISTENT = "gloo", "nccl", "mpi", "ring", "persistent"
OWN, PREPARED = "mpiddp", "mpiddp, prepared"
"""The makers of calls, as ranks know them."""

PRIVATE, SHARED, GPU = "private", "shared", "gpu"
BUFFERS = (PRIVATE, SHARED, GPU)
TRANSPORTS = ("auto", "mpi", "torch", "shared-memory", "shared-memory+mpi")

BOUND_BYTES = 64 << 20
PEER_BYTES = 256 << 10
LINK_BYTES = 16_000_000
COPY_NUMPY, COPY_TORCH, COPY_MEMMOVE = "copy by NumPy", "copy by torch", "copy by memmove"
COPIES = (COPY_NUMPY, COPY_TORCH, COPY_MEMMOVE)
PEER_READ, LINK = "peer read", "link"
"""The probes, as ranks know them."""


@dataclass(frozen=True)
class Contender:
    maker: str
    job: str = MPI_JOB
    algorithm: str = "auto"
    transport: str = "auto"
    buffer: str = PRIVATE

    @property
    def name(self) -> str:
        names = {
            GLOO: "Gloo",
            NCCL: "NCCL",
            MPI: "MPI_Allreduce",
            RING: "plain ring",
            PERSISTENT: "plain ring, persistent",
            OWN: f"mpiddp {self.algorithm}",
            PREPARED: f"mpiddp {self.algorithm}, prepared",
        }
        return names.get(self.maker, self.maker)

    @property
    def way(self) -> str:
        fixed = {GLOO: "Gloo", NCCL: "NCCL", OWN: self.transport, PREPARED: self.transport}
        return fixed.get(self.maker, "MPI")

    @property
    def label(self) -> str:
        """All that tells it from the others."""
        if self.maker not in (OWN, PREPARED):
            return self.name
        return f"{self.name}, {self.transport}, {self.buffer}"

    def specify(self, size: int, kind: str, iterations: int) -> dict[str, Any]:
        """What its ranks are told: the fields of a ``CallSpec``."""
        return {**vars(self), "bytes": size, "type": kind, "iterations": iterations}


@dataclass(frozen=True)
class Cell:
    """What is measured in one visit: a contender on one size."""

    contender: Contender
    bytes: int

    @property
    def name(self) -> str:
        """Unique among the cells of a group."""
        return f"{self.contender.label} at {self.bytes} B"


def list_contenders(
    algorithms: Sequence[str], transports: Sequence[str], buffers: Sequence[str], *, nccl: bool
) -> list[Contender]:
    """All rows, the framework's first."""
    others = [Contender(GLOO, TORCH_JOB), *([Contender(NCCL, TORCH_JOB, buffer=GPU)] * nccl)]
    others += [Contender(maker) for maker in (MPI, RING, PERSISTENT)]
    own = [
        Contender(OWN, MPI_JOB, algorithm, transport, buffer)
        for algorithm in algorithms
        for transport in transports
        for buffer in buffers
    ]
    # As MPI_Allreduce and the plain rings, whose arguments are put together beforehand as well.
    own += [
        Contender(PREPARED, MPI_JOB, algorithm, transport)
        for algorithm, transport in (("auto", "auto"), ("ring", "mpi"))
        if algorithm in algorithms and transport in transports and PRIVATE in buffers
    ]
    return others + own


def list_probes(*, link: bool) -> list[Cell]:
    """What is asked of the machine itself."""
    cells = [Cell(Contender(name), BOUND_BYTES) for name in COPIES]
    cells.append(Cell(Contender(PEER_READ), PEER_BYTES))
    return cells + ([Cell(Contender(LINK), LINK_BYTES)] if link else [])
