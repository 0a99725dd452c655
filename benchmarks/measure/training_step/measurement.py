"""Ask the ranks which contenders can run and train rightly, then time those in turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.measure import trials
from benchmarks.measure.launching.paired_jobs import start_jobs
from benchmarks.measure.launching.remote_job import Job
from benchmarks.measure.launching.srun import Launcher
from benchmarks.measure.training_step.contenders import (
    BASE,
    BASES,
    CHECKED_STEPS,
    DATA_PARALLEL,
    USUAL,
    WIRE_DTYPES,
    Contender,
    LoopSpec,
    expand,
    parse_contender,
)
from benchmarks.measure.training_step.traffic import Bytes, read_bytes
from benchmarks.measure.trials import Length, check_answers
from benchmarks.records.contenders import LINK_BYTES, MPI_JOB, TORCH_JOB, TRANSPORTS
from benchmarks.records.options import Count, Seconds, SeveralRanks
from benchmarks.records.statistics import Series, quantile
from benchmarks.records.workloads import SHAPES, Workload, parse_workload
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument
from mpiddp.training.options.groups.synchronisation import UNLIMITED

WORKER = "benchmarks.measure.training_step.worker"
LENGTH = Length(seconds=1.0, fewest=3, most=50)
TOLERANCE, NARROW_TOLERANCE = 0.02, 0.1
"""How far off the way may be, relative to its length; where gradients travel in 16 bits, which
rounds them to 8 or 11 of them and loses the smallest."""
PROBES = 3
WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Plan(trials.Plan):
    """What is measured."""

    ranks: SeveralRanks = (2, 4)
    """Numbers of ranks (default: 2 4; with srun 4)."""
    models: Annotated[tuple[Workload, ...], Argument("MODEL", parse_workload)] = tuple(
        map(parse_workload, SHAPES)
    )
    """convnet, resnet18, mlp or mlp:megabytes=M (default: all, the mlp with 67)."""
    sync: Annotated[tuple[Contender, ...], Argument("SYNC", parse_contender)] = ()
    """See below (default: those below, and data-parallel if one process has as many GPUs as there
    are ranks)."""
    transports: Annotated[tuple[str, ...], Argument(choices=TRANSPORTS)] = ("auto",)
    """Of mpiddp's gradients."""
    wire_dtype: Annotated[tuple[str, ...], Argument(choices=WIRE_DTYPES)] = ("auto",)
    """Types in which mpiddp sends gradients."""
    batch_size: Count = 8
    """Samples per worker."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto takes GPUs if every rank has one."""
    straggler: Annotated[str | None, Argument("WHO=FACTOR")] = None
    """Slow one worker's passes: RANK=FACTOR, or random=FACTOR for a worker drawn in each step."""
    repetitions: Count = 6
    deadline: Seconds = 300.0

    @property
    def contenders(self) -> tuple[Contender, ...]:
        named = self.sync or map(parse_contender, USUAL)
        rows = (row for each in named for row in expand(each, self.transports, self.wire_dtype))
        return tuple(dict.fromkeys(rows))

    def specify(self, workload: Workload, contender: Contender) -> LoopSpec:
        """What its ranks are told."""
        straggler = None if contender in BASES else self.straggler
        return LoopSpec(contender, workload, self.batch_size, self.seed, straggler)


@dataclass(frozen=True)
class Visit:
    """One contender on one workload, measured once. Seconds are those of a step."""

    steps: int
    seconds: float
    """Of the slowest rank."""
    compute: float
    """Forward and backward alone, of the slowest rank."""
    update: float
    """The optimizer, of the slowest rank; 0 if servers update."""
    samples_per_second: float
    """Of all workers together."""
    reading: Bytes
    by_rank: tuple[float, ...] = ()
    """Of each worker; empty if some ranks only serve."""

    @property
    def exposed(self) -> float:
        """The rest: communication that nothing hides. Noise may make it negative."""
        return self.seconds - self.compute - self.update

    @property
    def usual(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class TimedLink:
    """Between two nodes, as timed."""

    latency: float
    """Seconds of an empty message, one way."""
    seconds_per_byte: float

    @property
    def megabits(self) -> float:
        return 8e-6 / self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class Group(trials.Surroundings):
    """All that was measured with one workload on one number of ranks."""

    workload: Workload
    plan: Plan
    series: Mapping[Contender, Series[Visit]]
    refusals: Mapping[Contender, str] = field(default_factory=dict)
    """Why contenders were left out."""
    wrong: Mapping[Contender, str] = field(default_factory=dict)
    """What was wrong with what they trained."""
    notes: Mapping[Contender, Mapping[str, Any]] = field(default_factory=dict)
    link: TimedLink | None = None

    def samples(self, contender: Contender) -> tuple[Visit, ...]:
        """The visits that count, in order of rounds; empty if it was not timed."""
        series = self.series.get(contender)
        return series.samples if series is not None else ()

    @cached_property
    def coefficient(self) -> float:
        """How alike neighbouring rounds are, in the ratios of contenders."""
        return find_common([[self.find_times(each) for each in self.series]])

    def find_times(self, contender: Contender) -> list[float]:
        """The usual times of each round."""
        return [visit.usual for visit in self.samples(contender)]

    def find_speed(self, own: Contender, other: Contender) -> Ratio | None:
        """How many times faster it is than another contender, by the usual times of each round.

        None if either was not timed.
        """
        mine, others = map(self.find_times, (own, other))
        return compare_rounds(mine, others, self.coefficient) if mine and others else None


def read_answers(
    answers: Sequence[Mapping[str, Any]], steps: int, *, has_bound: bool = True
) -> Visit:
    """The visit that the ranks' answers describe. Raises RefusedError.

    ``has_bound``: in the long run all workers go at the pace of the slowest.
    """
    check_answers(answers)
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
        read_bytes(counted, steps, len(answers)),
        tuple(worker["seconds"] / steps for worker in workers) if workers == answers else (),
    )


def judge(
    answers: Sequence[Mapping[str, Any]], expected: Sequence[float] | None, *, is_narrow: bool
) -> str:
    """Why ranks' answers to ``checks.take_checked_steps`` are wrong; empty if they are not.

    Ranks without an answer took no part. ``expected`` is the way of one process, None where
    workers go at their own pace.
    """
    known = [answer for answer in answers if answer]
    if len({answer["digest"] for answer in known}) > 1:
        return "the ranks' parameters differ"
    way = known[0]["sample"]
    if not all(map(math.isfinite, way)):
        return "parameters are not finite"
    if expected is None:
        return "" if any(way) else "the parameters have not moved"
    error = math.dist(way, expected) / max(math.hypot(*expected), 1e-30)
    tolerance = NARROW_TOLERANCE if is_narrow else TOLERANCE
    if error <= tolerance:
        return ""
    return (
        f"after {CHECKED_STEPS} steps the parameters are off by {error:.2g} of the way that one "
        f"process with all samples takes them; up to {tolerance:g} would be rounding"
    )


def measure(ranks: int, launcher: Launcher, plan: Plan) -> Iterator[Group]:
    """Check and time all contenders, one group per workload, as each is finished.

    Raises RunError, with a job's output, if one fails; ConfigurationError if there are no GPUs but
    some were asked for.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if plan.device == "cpu" else {}
    with start_jobs(WORKER, ranks, launcher, plan.deadline, hidden) as jobs:
        greeting = jobs[TORCH_JOB].greeting
        check_device(plan.device, [jobs[MPI_JOB].greeting, greeting])
        link = probe_link(jobs[MPI_JOB]) if plan.link else None
        nodes = launcher.nodes
        rows = [*BASES, *plan.contenders]
        if not plan.sync and greeting["gpus"] >= ranks:
            rows.append(Contender(DATA_PARALLEL))
        for workload in plan.models:
            visitor = Visitor(jobs, plan, ranks, workload)
            total = len(rows) * (1 + plan.warm_up + plan.repetitions)
            with visitor.watch(total, jobs, local=nodes is None) as find_share:
                series = visitor.visit_in_turns(visitor.admit(rows))
                share = find_share()
            for job in jobs.values():
                job.ask({"do": "let go"}, "letting models go")
            yield Group(
                ranks=ranks, nodes=nodes, framework=greeting, others_share=share,
                workload=workload, plan=plan, series=series, refusals=visitor.refusals,
                wrong=visitor.wrong, notes=visitor.notes, link=link,
            )  # fmt: skip


def check_device(wanted: str, greetings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigurationError if GPUs were asked for and ranks compute elsewhere."""
    if wanted == "gpu" and any(greeting["device"] != "cuda" for greeting in greetings):
        raise ConfigurationError(
            "--device gpu: expected a GPU for every rank, found fewer: give fewer --ranks, or "
            "--device cpu"
        )


def probe_link(job: Job) -> TimedLink:
    """Time a short and a long message from one node to the next."""

    def ask(size: int) -> float:
        command = {"do": "probe", "bytes": size, "iterations": PROBES}
        return quantile(job.ask(command, "timing a link")[0], 0.5)

    # Each ends with a word back.
    word, whole = ask(WORD_BYTES), ask(LINK_BYTES)
    return TimedLink(word / 2, max(1e-6, whole - word) / LINK_BYTES)


class Visitor(trials.Visitor[Contender, Visit]):
    """Visits contenders on one workload; ``wrong`` says what is wrong with what they train."""

    def __init__(self, jobs: Mapping[str, Job], plan: Plan, ranks: int, workload: Workload) -> None:
        super().__init__(f"{ranks} ranks, {workload}", plan, LENGTH)
        self._jobs, self._specs, self._ranks, self._workload = jobs, plan, ranks, workload
        self.notes: dict[Contender, Mapping[str, Any]] = {}
        self._expected: dict[int, Sequence[float]] = {}
        """How far one process moves the parameters, by the number of workers."""

    def _ask(self, contender: Contender, what: str, **more: Any) -> list[Any]:
        spec = self._specs.specify(self._workload, contender)
        command = {"do": what, "spec": asdict(spec), **more}
        name = f"{contender.name} on {self._workload}"
        return self._jobs[contender.job].ask(command, f"{what} {name}")

    def measure(self, key: Contender, iterations: int) -> Visit:
        answers = self._ask(key, "measure", steps=iterations)
        return read_answers(answers, iterations, has_bound=key.staleness != UNLIMITED)

    def check(self, key: Contender) -> bool:
        """See `trials.Visitor`; only contenders that train rightly are timed."""
        answers = self._ask(key, "check")
        check_answers(answers)
        self.notes[key] = answers[0]["notes"]
        expected = None
        if key.is_in_step:
            expected = self._compute_alone(key.count_workers(self._ranks))
        is_narrow = key.wire_dtype in ("bfloat16", "float16")
        if problem := judge(answers, expected, is_narrow=is_narrow):
            self.wrong[key] = problem
            return False
        self.visit(key, LENGTH.fewest)
        return True

    def _compute_alone(self, workers: int) -> Sequence[float]:
        if workers not in self._expected:
            found = self._ask(BASE, "compute alone", workers=workers)[0]
            self._expected[workers] = found["sample"]
        return self._expected[workers]
