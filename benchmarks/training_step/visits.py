"""Ask the ranks: which contenders can do it and train rightly, and then time them in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tqdm import tqdm

from benchmarks.allreduce.contenders import LINK_BYTES
from benchmarks.common.statistics import Series, interleave, quantile
from benchmarks.launching import remote_job as live_jobs
from benchmarks.launching.launchers import Mpirun
from benchmarks.launching.paired_jobs import MPI_JOB, TORCH_JOB, start_jobs
from benchmarks.launching.remote_job import Job
from benchmarks.launching.srun import Srun
from benchmarks.training_step.contenders import BASE, BASES, DATA_PARALLEL, Contender
from benchmarks.training_step.orders import Order
from benchmarks.training_step.traffic import Reading
from benchmarks.training_step.verdicts import judge
from benchmarks.training_step.workloads import Workload
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.training.config import UNLIMITED

WORKER = "benchmarks.training_step.worker"
VISIT_SECONDS = 1.0
"""What the steps of one visit should take, where their number is not given."""
FEWEST, MOST = 3, 50
"""Steps of one visit."""
PROBES = 3
WORD_BYTES = 8


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    workloads: tuple[Workload, ...]
    contenders: tuple[Contender, ...]
    batch_size: int
    """Samples per worker and step."""
    repetitions: int
    """Rounds that count."""
    warm_up: int
    """Rounds before them."""
    iterations: int | None
    """Steps per visit; None for as many as VISIT_SECONDS hold."""
    seed: int
    """Of parameters, samples, and the order within each round."""
    deadline: float
    """Seconds for one answer of a job."""
    link: bool
    """Whether a link between two nodes is probed."""
    straggler: str | None
    device: str
    """``auto``, ``cpu`` or ``gpu``."""
    offers_data_parallel: bool
    """Whether ``nn.DataParallel`` is added where it is possible."""

    def order(self, workload: Workload, contender: Contender) -> Order:
        """What its ranks are told."""
        straggler = None if contender in BASES else self.straggler
        return Order(contender, workload, self.batch_size, self.seed, straggler)


@dataclass(frozen=True)
class Visit:
    """One contender on one workload, measured once. Seconds are those of a step."""

    steps: int
    seconds: float
    """Of the slowest rank."""
    compute: float
    """Forward and backward alone, of the slowest rank."""
    update: float
    """The optimizer, of the slowest rank; 0 where servers update."""
    samples_per_second: float
    """Of all workers together."""
    reading: Reading
    """What the interfaces counted meanwhile."""

    @property
    def exposed(self) -> float:
        """What is left: communication that nothing hides. Noise may make it negative."""
        return self.seconds - self.compute - self.update


class RefusedError(MpiddpError):
    """The contender cannot do this."""


@dataclass(frozen=True)
class Link:
    """Between two nodes, as probed."""

    latency: float
    """Seconds of an empty message, one way."""
    seconds_per_byte: float

    @property
    def megabits(self) -> float:
        """Per second."""
        return 8e-6 / self.seconds_per_byte


@dataclass(frozen=True)
class Group:
    """All that was measured with one number of ranks on one workload."""

    ranks: int
    nodes: int | None
    """Of a cluster; None where all ran on this machine."""
    workload: Workload
    plan: Plan
    series: Mapping[Contender, Series[Visit]]
    notes: Mapping[Contender, Mapping[str, Any]]
    """What its ranks said of each contender."""
    refusals: Mapping[Contender, str] = field(default_factory=dict)
    """Why contenders were left out."""
    wrong: Mapping[Contender, str] = field(default_factory=dict)
    """What is wrong with what they train."""
    greeting: Mapping[str, Any] = field(default_factory=dict)
    """What the framework's ranks said of themselves."""
    link: Link | None = None
    others_share: float | None = None
    """Of this machine's cores, taken by other programs meanwhile; None for a cluster's."""

    def visits(self, contender: Contender) -> tuple[Visit, ...]:
        """Those that count, round by round; none if it was not timed."""
        series = self.series.get(contender)
        return series.samples if series is not None else ()


def read_answers(
    answers: Sequence[Mapping[str, Any]], steps: int, *, has_bound: bool = True
) -> Visit:
    """What the ranks' answers come to. Raises RefusedError if any rank cannot do it.

    ``has_bound``: in the long run all workers go at the pace of the slowest.
    """
    refuse(answers)
    workers = [answer for answer in answers if "seconds" in answer]
    slowest = max(worker["seconds"] for worker in workers)
    counted = [answer["interfaces"] for answer in answers if "interfaces" in answer]
    return Visit(
        steps,
        slowest / steps,
        max(worker["compute"] for worker in workers) / steps,
        max(worker["update"] for worker in workers) / steps,
        sum(
            worker["samples"] / (slowest if has_bound else worker["seconds"]) for worker in workers
        ),
        Reading.make(counted, steps, len(answers)),
    )


def refuse(answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise RefusedError if any rank cannot do it."""
    reasons = [answer["refused"] for answer in answers if "refused" in answer]
    if reasons:
        raise RefusedError(reasons[0])


def choose_steps(seconds: float) -> int:
    """How many steps, each taking so long, one visit has."""
    return max(FEWEST, min(MOST, int(VISIT_SECONDS / max(seconds, 1e-9))))


def measure(ranks: int, launcher: Mpirun | Srun, plan: Plan) -> list[Group]:
    """Check and time all contenders, one group per workload.

    Raises RunError, with a job's output, if one fails; ConfigurationError if there are no GPUs but
    some were asked for.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if plan.device == "cpu" else {}
    with start_jobs(WORKER, ranks, launcher, plan.deadline, hidden) as jobs:
        check_device(plan.device, [jobs[name].greeting for name in (MPI_JOB, TORCH_JOB)])
        link = probe_link(jobs[MPI_JOB]) if plan.link else None
        nodes = launcher.nodes if isinstance(launcher, Srun) else None
        return [_measure_workload(ranks, nodes, jobs, plan, each, link) for each in plan.workloads]


def check_device(wanted: str, greetings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigurationError if GPUs were asked for and ranks compute elsewhere."""
    if wanted == "gpu" and any(greeting["device"] != "cuda" for greeting in greetings):
        raise ConfigurationError(
            "--device gpu: expected a GPU for every rank, found fewer: give fewer --ranks, or "
            "--device cpu"
        )


def probe_link(job: Job) -> Link:
    """Time a short and a long message from one node to the next."""

    def ask(size: int) -> float:
        command = {"do": "probe", "bytes": size, "iterations": PROBES}
        return quantile(job.ask(command, "timing a link")[0], 0.5)

    # Each ends with a word back.
    word, whole = ask(WORD_BYTES), ask(LINK_BYTES)
    return Link(word / 2, max(1e-6, whole - word) / LINK_BYTES)


def _measure_workload(
    ranks: int,
    nodes: int | None,
    jobs: Mapping[str, Job],
    plan: Plan,
    workload: Workload,
    link: Link | None,
) -> Group:
    rows = [*BASES, *plan.contenders]
    if plan.offers_data_parallel and jobs[TORCH_JOB].greeting["gpus"] >= ranks:
        rows.append(Contender(DATA_PARALLEL))
    # disable=None: a bar only on a terminal.
    total = len(rows) * (1 + plan.warm_up + plan.repetitions)
    with tqdm(total=total, disable=None, unit="visit", leave=False) as bar:
        visitor = Visitor(jobs, plan, ranks, workload, bar)
        begin, before = time.monotonic(), live_jobs.count_others_seconds(jobs.values())
        series = visitor.visit_in_turns(visitor.admit(rows))
        others = live_jobs.count_others_seconds(jobs.values()) - before
        share = others / (time.monotonic() - begin) / len(os.sched_getaffinity(0))
    for job in jobs.values():
        job.ask({"do": "let go"}, "letting models go")
    return Group(
        ranks,
        nodes,
        workload,
        plan,
        series,
        visitor.notes,
        visitor.refusals,
        visitor.wrong,
        jobs[TORCH_JOB].greeting,
        link,
        None if nodes is not None else max(0.0, share),
    )


class Visitor:
    """Visits contenders on one workload, and keeps what went wrong."""

    def __init__(
        self,
        jobs: Mapping[str, Job],
        plan: Plan,
        ranks: int,
        workload: Workload,
        bar: tqdm[NoReturn],
    ) -> None:
        self._jobs, self._plan, self._ranks = jobs, plan, ranks
        self._workload, self._bar = workload, bar
        self.refusals: dict[Contender, str] = {}
        self.wrong: dict[Contender, str] = {}
        self.notes: dict[Contender, Mapping[str, Any]] = {}
        self._usual: dict[Contender, float] = {}
        """Seconds of a step in the last visit."""
        self._expected: dict[int, Sequence[float]] = {}
        """The way of one process, by the number of workers."""

    def _ask(self, contender: Contender, what: str, **more: Any) -> list[Any]:
        order = self._plan.order(self._workload, contender)
        self._bar.set_description(f"{self._ranks} ranks, {self._workload}, {contender.name}")
        command = {"do": what, "order": order.describe(), **more}
        name = f"{contender.name} on {self._workload}"
        return self._jobs[contender.job].ask(command, f"{what} {name}")

    def visit(self, contender: Contender, steps: int) -> Visit:
        """Time it. Raises RefusedError."""
        answers = self._ask(contender, "measure", steps=steps)
        visit = read_answers(answers, steps, has_bound=contender.staleness != UNLIMITED)
        self._usual[contender] = visit.seconds
        self._bar.update()
        return visit

    def check(self, contender: Contender) -> str:
        """What is wrong with what it trains; empty if nothing is. Raises RefusedError."""
        answers = self._ask(contender, "check")
        refuse(answers)
        self.notes[contender] = answers[0]["notes"]
        expected = None
        if contender.is_in_step:
            expected = self._compute_alone(contender.count_workers(self._ranks))
        is_narrow = contender.wire_dtype in ("bfloat16", "float16")
        return judge(answers, expected, is_narrow=is_narrow)

    def _compute_alone(self, workers: int) -> Sequence[float]:
        if workers not in self._expected:
            found = self._ask(BASE, "compute alone", workers=workers)[0]
            self._expected[workers] = found["sample"]
        return self._expected[workers]

    def admit(self, contenders: Sequence[Contender]) -> list[Contender]:
        """Those that can, and train rightly."""
        admitted = []
        for contender in contenders:
            try:
                problem = self.check(contender)
            except RefusedError as reason:
                self.refusals[contender] = str(reason)
                continue
            if problem:
                self.wrong[contender] = problem
                continue
            self.visit(contender, FEWEST)
            admitted.append(contender)
        return admitted

    def visit_in_turns(self, admitted: Sequence[Contender]) -> dict[Contender, Series[Visit]]:
        """Each of them once per round, in an order drawn anew."""
        named = {contender.name: contender for contender in admitted}

        def take(name: str) -> Visit:
            contender = named[name]
            return self.visit(
                contender, self._plan.iterations or choose_steps(self._usual[contender])
            )

        series = interleave(
            list(named),
            take,
            rounds=self._plan.repetitions,
            warm_up=self._plan.warm_up,
            seed=self._plan.seed,
        )
        return {named[name]: each for name, each in series.items()}
