"""Ask the ranks: which contenders can do it, how often each is repeated, and then in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tqdm import tqdm

from benchmarks.allreduce import contenders
from benchmarks.allreduce.contenders import Cell, Contender
from benchmarks.common.statistics import Series, interleave, quantile
from benchmarks.launching import remote_job as live_jobs
from benchmarks.launching.launchers import Mpirun
from benchmarks.launching.paired_jobs import MPI_JOB, TORCH_JOB, start_jobs
from benchmarks.launching.remote_job import Job
from benchmarks.launching.srun import Srun
from mpiddp.errors import MpiddpError

VISIT_SECONDS = 0.1
"""What the iterations of one visit should take, where their number is not given."""
FEWEST, MOST = 3, 300
"""Iterations of one visit."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    sizes: tuple[int, ...]
    type: str
    algorithms: tuple[str, ...]
    transports: tuple[str, ...]
    buffers: tuple[str, ...]
    repetitions: int
    """Rounds that count."""
    warm_up: int
    """Rounds before them."""
    iterations: int | None
    """Per visit; None for as many as VISIT_SECONDS hold."""
    seed: int
    """Of the order within each round."""
    deadline: float
    """Seconds for one answer of a job."""
    link: bool
    """Whether a link between two nodes is probed."""


@dataclass(frozen=True)
class Visit:
    """One contender on one size, measured once."""

    seconds: tuple[float, ...]
    """Of each iteration, of its slowest rank."""
    wrong: int
    """Elements of the checked sum, over all ranks."""


class RefusedError(MpiddpError):
    """The contender cannot do this."""


@dataclass(frozen=True)
class Group:
    """All that was measured with one number of ranks."""

    ranks: int
    nodes: int | None
    """Of a cluster; None where all ran on this machine."""
    plan: Plan
    contenders: tuple[Contender, ...]
    series: Mapping[str, Series[Visit]]
    """By the cells' names; the probes' as well."""
    refusals: Mapping[str, str]
    """Why cells were left out, by their names."""
    wrong: Mapping[str, int]
    """Elements that were wrong in any check, by the cells' names, timed or not."""
    others_share: float | None = None
    """Of this machine's cores, taken by other programs meanwhile; None for a cluster's."""
    collectives: Mapping[str, Any] = field(default_factory=dict)
    """What mpiddp says of how its collectives wait."""
    greeting: Mapping[str, Any] = field(default_factory=dict)
    """What the framework's ranks said of themselves."""

    def seconds(self, contender: Contender, size: int) -> list[float]:
        """All iterations, the slowest rank's; empty if it was not timed."""
        series = self.series.get(Cell(contender, size).name)
        return [value for visit in series.samples for value in visit.seconds] if series else []

    def rounds(self, contender: Contender, size: int) -> list[list[float]]:
        """The same, round by round."""
        series = self.series.get(Cell(contender, size).name)
        return [list(visit.seconds) for visit in series.samples] if series else []


def find_slowest(answers: Sequence[Mapping[str, Any]]) -> Visit:
    """What the ranks' answers come to. Raises RefusedError if any rank cannot do it."""
    reasons = [answer["refused"] for answer in answers if "refused" in answer]
    if reasons:
        raise RefusedError(reasons[0])
    slowest = map(max, *(answer["times"] for answer in answers), [0] * len(answers[0]["times"]))
    wrong = sum(answer["wrong"] for answer in answers)
    return Visit(tuple(nanoseconds * 1e-9 for nanoseconds in slowest), wrong)


def choose_iterations(seconds: float) -> int:
    """How many iterations, each taking so long, one visit has."""
    return max(FEWEST, min(MOST, int(VISIT_SECONDS / max(seconds, 1e-9))))


def measure(ranks: int, launcher: Mpirun | Srun, plan: Plan) -> Group:
    """Check and time all contenders. Raises RunError, with a job's output, if one fails."""
    with start_jobs(contenders.WORKER, ranks, launcher, plan.deadline) as jobs:
        greeting = jobs[TORCH_JOB].greeting
        rows = contenders.list_contenders(
            plan.algorithms, plan.transports, plan.buffers, nccl=bool(greeting["nccl"])
        )
        cells = [Cell(row, size) for size in plan.sizes for row in rows]
        cells += contenders.list_probes(link=plan.link)
        total = len(cells) * (1 + plan.warm_up + plan.repetitions)
        # disable=None: a bar only on a terminal.
        with tqdm(total=total, disable=None, unit="visit", leave=False) as bar:
            visitor = Visitor(jobs, plan, ranks, bar)
            begin, before = time.monotonic(), live_jobs.count_others_seconds(jobs.values())
            series = visitor.visit_in_turns(visitor.admit(cells))
            others = live_jobs.count_others_seconds(jobs.values()) - before
            share = others / (time.monotonic() - begin) / len(os.sched_getaffinity(0))
        collectives = jobs[MPI_JOB].ask({"do": "describe"}, "describing")[0]
    return Group(
        ranks,
        launcher.nodes if isinstance(launcher, Srun) else None,
        plan,
        tuple(rows),
        series,
        visitor.refusals,
        visitor.wrong,
        None if isinstance(launcher, Srun) else max(0.0, share),
        collectives,
        greeting,
    )


class Visitor:
    """Visits cells, and keeps what went wrong."""

    def __init__(
        self, jobs: Mapping[str, Job], plan: Plan, ranks: int, bar: tqdm[NoReturn]
    ) -> None:
        self._jobs, self._plan, self._ranks, self._bar = jobs, plan, ranks, bar
        self.refusals: dict[str, str] = {}
        self.wrong: dict[str, int] = {}
        self._usual: dict[str, float] = {}
        """Seconds of an iteration in the last visit, by the cells' names."""

    def visit(self, cell: Cell, iterations: int) -> Visit:
        """Check the cell and time it. Raises RefusedError."""
        self._bar.set_description(f"{self._ranks} ranks, {cell.name}")
        order = cell.contender.order(cell.bytes, self._plan.type, iterations)
        command = {"do": "measure", "order": order}
        answers = self._jobs[cell.contender.job].ask(command, f"measuring {cell.name}")
        visit = find_slowest(answers)
        self.wrong[cell.name] = self.wrong.get(cell.name, 0) + visit.wrong
        self._usual[cell.name] = quantile(visit.seconds, 0.5)
        self._bar.update()
        return visit

    def admit(self, cells: Sequence[Cell]) -> dict[str, Cell]:
        """Those that can, and sum rightly, by name."""
        admitted = {}
        for cell in cells:
            try:
                visit = self.visit(cell, FEWEST)
            except RefusedError as reason:
                self.refusals[cell.name] = str(reason)
                continue
            if not visit.wrong:
                admitted[cell.name] = cell
        return admitted

    def visit_in_turns(self, admitted: Mapping[str, Cell]) -> dict[str, Series[Visit]]:
        """Each of them once per round, in an order drawn anew."""

        def take(name: str) -> Visit:
            count = self._plan.iterations or choose_iterations(self._usual[name])
            try:
                return self.visit(admitted[name], count)
            except RefusedError as reason:
                raise RefusedError(f"{name}, which was possible before: {reason}") from None

        return interleave(
            list(admitted),
            take,
            rounds=self._plan.repetitions,
            warm_up=self._plan.warm_up,
            seed=self._plan.seed,
        )
