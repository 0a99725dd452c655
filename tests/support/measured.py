"""What the commands that measure collectives might have measured, and jobs that answer so."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure.collectives import measurement
from benchmarks.measure.collectives.cells import CallGroup
from benchmarks.measure.collectives.options import CollectivesPlan
from benchmarks.measure.launching import launchers
from benchmarks.measure.trials import Refusal
from benchmarks.records.contenders import (
    GLOO,
    MPI,
    MPI_JOB,
    OWN,
    PREPARED,
    REDUCING,
    TORCH_JOB,
    Contender,
)
from benchmarks.records.schema import Cell
from benchmarks.records.statistics import quantile, summarize

MPIRUN = launchers.Mpirun(Path("mpirun"), launchers.programs.OPEN_MPI, "5.0.11", None)
K, M = 1 << 10, 1 << 20
GLOO_ROW, MPI_ROW = Contender(GLOO, TORCH_JOB), Contender(MPI)
PRIVATE_OWN, SHARED_OWN = Contender(OWN, buffer="private"), Contender(OWN, buffer="shared")
OWN_RING = Contender(PREPARED, algorithm="ring", transport="mpi")


def make_plan(*words: str, command: str = "allreduce") -> CollectivesPlan:
    return measurement.QUANTITIES[command].parse(["--sizes", "8", *words]).plan


def make_cell(row: Contender, size: int, rounds: Sequence[Sequence[float]], **details) -> Cell:
    """A cell of these seconds: a list of rounds, each of iterations."""
    times = summarize([value for each in rounds for value in each])
    operator = {"operator": "sum"} if row.quantity in REDUCING else {}
    return Cell(
        quantity=row.quantity,
        contender=row.label,
        ranks=2,
        at={"bytes": size, "type": "float32", **operator},
        samples=tuple(quantile(each, 0.5) for each in rounds),
        summary=times,
        details={
            "maker": row.maker, "algorithm": row.algorithm, "transport": row.transport,
            "buffer": row.buffer, "ran": "", "algbw": size / times.median * 1e-9, "busbw": 0.0,
            "wrong": 0, "stopped": "interval", "iterations": times.count, **details,
        },
    )  # fmt: skip


def make_cells(times, ranks: int = 2, nodes: int | None = None) -> list[Cell]:
    """Cells of these seconds, by contender and size: a list of rounds, each of a visit."""
    return [
        replace(make_cell(row, size, rounds), ranks=ranks, nodes=nodes or 1)
        for (row, size), rounds in times.items()
    ]


def make_group(times, *refusals: Refusal) -> CallGroup:
    """Such cells of two ranks, and what was left out."""
    return CallGroup(ranks=2, cells=make_cells(times), refusals=refusals)


class FakeJob:
    """Answers by what is asked for, and keeps that."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], list[Any]], ranks: int = 2) -> None:
        self.answer, self.ranks, self.asked = answer, ranks, []
        self.greeting = {"nccl": None, "gpu": None, "slurm_nodes": "node[1-2]"}

    def ask(self, command, what):
        if command["do"] == "describe":
            return [{"free_bytes": 1 << 34, "node": 0, "wait": "spin"}] * self.ranks
        if command["do"] != "measure":
            self.asked.append(command)
            return [0] * self.ranks
        self.asked.append(command["spec"])
        return self.answer(command["spec"])


def answer_with(*times: int, wrong: int = 0) -> list[dict[str, Any]]:
    """What ranks answer whose iterations take so many nanoseconds, one figure a rank."""
    return [
        {"times": [each] * 3, "wrong": wrong, "speed": 1.0, "checked": 5, "ran": ""}
        for each in times
    ]


@contextlib.contextmanager
def fake_jobs(monkeypatch, answer, ranks: int = 2) -> Iterator[dict[str, FakeJob]]:
    """Jobs without processes in the place of those that ``measure`` starts."""
    jobs = {name: FakeJob(answer, ranks) for name in (MPI_JOB, TORCH_JOB)}

    @contextlib.contextmanager
    def start(*_):
        yield jobs

    monkeypatch.setattr(measurement, "start_jobs", start)
    monkeypatch.setattr("benchmarks.measure.trials.count_others_seconds", lambda jobs: 0.0)
    yield jobs
