"""What ``benchmarks allreduce`` might have measured."""

from __future__ import annotations

from benchmarks.collectives import command
from benchmarks.collectives.contenders import (
    GLOO,
    MPI,
    OWN,
    PREPARED,
    Cell,
    Contender,
    list_contenders,
)
from benchmarks.collectives.measurement import Group, Plan, Visit
from benchmarks.common.statistics import Series
from benchmarks.launching.paired_jobs import TORCH_JOB

K, M = 1 << 10, 1 << 20
GLOO_ROW, MPI_ROW = Contender(GLOO, TORCH_JOB), Contender(MPI)
PRIVATE_OWN, SHARED_OWN = Contender(OWN, buffer="private"), Contender(OWN, buffer="shared")
OWN_RING = Contender(PREPARED, algorithm="ring", transport="mpi")


def make_plan(*sizes: int, **changes) -> Plan:
    arguments = ["--sizes", *map(str, sizes or (8,)), "--repetitions", "2", "--warm-up", "1"]
    plan = command.parse(arguments).plan
    return Plan(**{**vars(plan), **changes})


def make_group(times, ranks: int = 2, nodes: int | None = None, **more) -> Group:
    """A group with these seconds, by contender and size: a list of rounds, each of a visit."""
    rows = list_contenders(["auto", "ring"], ["auto", "mpi"], ["private", "shared"], nccl=False)
    series = {
        Cell(row, size): Series((), tuple(Visit(tuple(each), 0) for each in rounds), ())
        for (row, size), rounds in times.items()
    }
    sizes = tuple(sorted({size for row, size in times if row in rows})) or (8,)
    plan = make_plan(*sizes)
    return Group(ranks=ranks, nodes=nodes, plan=plan, contenders=tuple(rows), series=series, **more)
