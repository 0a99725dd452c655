"""Ask the ranks which contenders can run, then time those in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from benchmarks.collectives import contenders
from benchmarks.collectives.contenders import BUFFERS, PRIVATE, SHARED, TRANSPORTS, Cell, Contender
from benchmarks.common import trials
from benchmarks.common.options import Count, CountOrZero, Seconds, SeveralRanks, Sizes, size
from benchmarks.common.statistics import quantile
from benchmarks.common.trials import Length, check_answers
from benchmarks.launching.launchers import Mpirun
from benchmarks.launching.paired_jobs import MPI_JOB, TORCH_JOB, start_jobs
from benchmarks.launching.remote_job import Job
from benchmarks.launching.srun import Srun
from mpiddp.options.fields import Argument

SIZES = tuple(map(size, ("8", "512", "4K", "32K", "256K", "1M", "4M", "16M", "64M")))
ALGORITHMS = ("auto", "ring", "central", "direct")
LENGTH = Length(seconds=0.1, fewest=3, most=300)


@dataclass(frozen=True, kw_only=True)
class Plan(trials.Plan):
    """What is measured."""

    ranks: SeveralRanks = (2, 4)
    """Numbers of ranks (default: 2 4; with srun 4 8)."""
    sizes: Sizes = SIZES
    """Of the buffers, for example 4096, 64K or 16M (default: 8 to 64M, in nine steps)."""
    type: Literal["float32", "float64", "float16", "bfloat16", "int32", "int64"] = "float32"
    """Type of the elements."""
    algorithms: Annotated[tuple[str, ...], Argument("ALGORITHM")] = ALGORITHMS
    """mpiddp's algorithms, or all; central is a parameter server, direct one on every rank."""
    transports: Annotated[tuple[str, ...], Argument(choices=TRANSPORTS)] = ("auto",)
    """Of mpiddp's messages."""
    buffers: Annotated[tuple[str, ...], Argument(choices=BUFFERS)] = (PRIVATE, SHARED)
    """Of mpiddp's collectives."""
    repetitions: Count = 10
    warm_up: CountOrZero = 1
    deadline: Seconds = 120.0


@dataclass(frozen=True)
class Visit:
    """One contender on one size, measured once."""

    seconds: tuple[float, ...]
    """Of each iteration, of its slowest rank."""
    wrong: int
    """Elements of the checked sum, over all ranks."""

    @property
    def usual(self) -> float:
        return quantile(self.seconds, 0.5)


@dataclass(frozen=True, kw_only=True)
class Group(trials.Group[Cell, Visit]):
    """All that was measured on one number of ranks; the probes are among the series."""

    plan: Plan
    contenders: tuple[Contender, ...]
    collectives: Mapping[str, Any] = field(default_factory=dict)
    """How mpiddp's collectives wait."""

    def seconds(self, contender: Contender, size: int) -> list[float]:
        """All iterations, the slowest rank's; empty if it was not timed."""
        visits = self.samples(Cell(contender, size))
        return [value for visit in visits for value in visit.seconds]

    def find_median_speed(self, own: Contender, other: Contender, size: int) -> float | None:
        speed = self.find_speed(Cell(own, size), Cell(other, size))
        return speed.median if speed else None


def find_slowest(answers: Sequence[Mapping[str, Any]]) -> Visit:
    """The visit that the ranks' answers describe. Raises RefusedError."""
    check_answers(answers)
    slowest = map(max, *(answer["times"] for answer in answers), [0] * len(answers[0]["times"]))
    wrong = sum(answer["wrong"] for answer in answers)
    return Visit(tuple(nanoseconds * 1e-9 for nanoseconds in slowest), wrong)


def measure(ranks: int, launcher: Mpirun | Srun, plan: Plan) -> Group:
    """Check and time all contenders. Raises RunError, with a job's output, if one fails."""
    with start_jobs(contenders.WORKER, ranks, launcher, plan.deadline) as jobs:
        greeting = jobs[TORCH_JOB].greeting
        rows = contenders.list_contenders(
            plan.algorithms, plan.transports, plan.buffers, nccl=bool(greeting["nccl"])
        )
        cells = [Cell(row, size) for size in plan.sizes for row in rows]
        cells += contenders.list_probes(link=plan.link)
        nodes = launcher.nodes if isinstance(launcher, Srun) else None
        found = Visitor(jobs, plan, ranks).run(cells, jobs, local=nodes is None)
        collectives = jobs[MPI_JOB].ask({"do": "describe"}, "describing")[0]
    return Group(
        ranks=ranks, nodes=nodes, plan=plan, contenders=tuple(rows), collectives=collectives,
        greeting=greeting, **found,
    )  # fmt: skip


class Visitor(trials.Visitor[Cell, Visit]):
    """Visits cells; ``wrong`` has the number of wrong elements in any check, timed or not."""

    def __init__(self, jobs: Mapping[str, Job], plan: Plan, ranks: int) -> None:
        super().__init__(f"{ranks} ranks", plan, LENGTH)
        self._jobs, self._type = jobs, plan.type

    def check(self, key: Cell) -> bool:
        return not self.visit(key, LENGTH.fewest).wrong

    def measure(self, key: Cell, iterations: int) -> Visit:
        spec = key.contender.specify(key.bytes, self._type, iterations)
        command = {"do": "measure", "spec": spec}
        answers = self._jobs[key.contender.job].ask(command, f"measuring {key.name}")
        visit = find_slowest(answers)
        self.wrong[key] = self.wrong.get(key, 0) + visit.wrong
        return visit
