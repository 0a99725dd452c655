"""What the commands that measure collectives compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpiddp.wording import describe_size

MPI_JOB, TORCH_JOB = "mpi", "torch"
"""The first word that a worker is given; the second one is the addresses to connect to."""

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
BROADCAST, REDUCE = "broadcast", "reduce"
POINT_TO_POINT, ALL_PAIRS, REDUCTION = "point-to-point", "all-pairs", "reduction"
"""The quantities; those of collectives are named as in `mpiddp.schedules`."""
PROBE = "probe"
"""What the machine itself can do."""
CONDITIONS = frozenset({"cold", "busy", "overlap"})
"""Coordinates of cells that say nothing of plain calls."""
REDUCING = (ALL_REDUCE, REDUCE_SCATTER, REDUCE)
EVEN = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
"""Collectives in which all ranks do alike and none is done before all have come."""
PARTS = {ALL_REDUCE: ((REDUCE, BROADCAST), (REDUCE_SCATTER, ALL_GATHER))}
"""What a collective can be made of."""
SUBSTITUTES = dict.fromkeys((REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE), ALL_REDUCE)
"""What does all that a collective does, and more."""

GLOO, NCCL, MPI, RING, PERSISTENT = "gloo", "nccl", "mpi", "ring", "persistent"
OWN, PREPARED, BACKEND = "mpiddp", "mpiddp prepared", "mpiddp backend"
"""The makers of calls, as ranks know them."""

PRIVATE, SHARED, GPU = "private", "shared", "gpu"
BUFFERS = (PRIVATE, SHARED, GPU)
TRANSPORTS = ("auto", "mpi", "torch", "shared-memory", "shared-memory+mpi")
OPERATORS = ("sum", "average", "product", "min", "max")

BOUND_BYTES = 64 << 20
PEER_BYTES = 256 << 10
LINK_BYTES = 16_000_000
COPY_NUMPY, COPY_TORCH, COPY_MEMMOVE = "copy by NumPy", "copy by torch", "copy by memmove"
COPIES = (COPY_NUMPY, COPY_TORCH, COPY_MEMMOVE)
PEER_READ, LINK, EMPTY = "peer read", "link", "nothing"
"""The probes, as ranks know them; EMPTY does nothing, so that what it takes is the harness's."""

_MPI_NAMES = {
    ALL_REDUCE: "MPI_Allreduce",
    REDUCE_SCATTER: "MPI_Reduce_scatter",
    ALL_GATHER: "MPI_Allgatherv",
    BROADCAST: "MPI_Bcast",
    REDUCE: "MPI_Reduce",
    POINT_TO_POINT: "MPI_Send",
    ALL_PAIRS: "MPI_Send",
    REDUCTION: "addition by NumPy",
}


@dataclass(frozen=True)
class Contender:
    """Who does something, and what it is."""

    maker: str
    job: str = MPI_JOB
    algorithm: str = "auto"
    transport: str = "auto"
    buffer: str = PRIVATE
    quantity: str = ALL_REDUCE

    @property
    def name(self) -> str:
        own = f"mpiddp {self.algorithm}" if self.quantity != POINT_TO_POINT else "mpiddp"
        names = {
            GLOO: "Gloo",
            NCCL: "NCCL",
            MPI: _MPI_NAMES.get(self.quantity, "MPI"),
            RING: "plain ring",
            PERSISTENT: "plain ring, persistent",
            OWN: own,
            PREPARED: f"{own}, prepared",
            BACKEND: "torch.distributed over mpiddp",
        }
        return names.get(self.maker, self.maker)

    @property
    def way(self) -> str:
        if self.quantity == REDUCTION:
            return "–"
        fixed = {
            GLOO: "Gloo",
            NCCL: "NCCL",
            OWN: self.transport,
            PREPARED: self.transport,
            BACKEND: "auto",
        }
        return fixed.get(self.maker, "MPI")

    @property
    def label(self) -> str:
        """All that tells it from the others."""
        if self.maker not in (OWN, PREPARED):
            return self.name
        if self.quantity == POINT_TO_POINT:
            return f"{self.name}, {self.transport}"
        return f"{self.name}, {self.transport}, {self.buffer}"


@dataclass(frozen=True)
class Task:
    """What is measured in one visit: a contender on buffers of one size and type."""

    contender: Contender
    bytes: int
    type: str = "float32"
    operator: str = ""
    """Empty if nothing is reduced."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Of all-pairs: the ranks that send, and the ranks that receive; all at once."""
    is_mutual: bool = False
    """Of point-to-point: both ranks send at once."""

    @property
    def name(self) -> str:
        """Unique among the tasks of a measurement."""
        words = [self.contender.label, "at", describe_size(self.bytes)]
        words += filter(None, [f"of {self.type}", self.operator, "both ways" * self.is_mutual])
        return " ".join(words) + self.route

    @property
    def route(self) -> str:
        """`` 0→1 2→3``, the pairs; empty if there are none."""
        return "".join(f" {source}→{target}" for source, target in self.pairs)

    def specify(self, iterations: int) -> dict[str, Any]:
        """What its ranks are told: the fields of a ``CallSpec``."""
        own = {name: value for name, value in vars(self).items() if name != "contender"}
        return {**vars(self.contender), **own, "iterations": iterations}


def shorten(names: Iterable[str]) -> dict[str, str]:
    """Names without what those with the same first word have in common behind their commas.

    Words in brackets at their ends, such as the name of a record, stay.
    """
    families: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name in names:
        body, mark = _cut(name)
        families[body.partition(" ")[0]].append((name, mark, *body.split(", ")))
    short = {}
    for family in families.values():
        common = set.intersection(*(set(each[3:]) for each in family)) if len(family) > 1 else ()
        for name, mark, head, *rest in family:
            short[name] = ", ".join([head, *(part for part in rest if part not in common)]) + mark
    return short if len(set(short.values())) == len(short) else {name: name for name in short}


def _cut(name: str) -> tuple[str, str]:
    at = name.rfind(" (") if name.endswith(")") else -1
    return (name[:at], name[at:]) if at > 0 else (name, "")
