"""Ask the ranks whether each program is right over both backends, then time it in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from benchmarks.measure import trials
from benchmarks.measure.launching import remote_job
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.launching.paired_jobs import make_mpi_program
from benchmarks.measure.launching.remote_job import Job
from benchmarks.measure.trials import Length, check_answers
from benchmarks.records.options import Count, Seconds, SeveralRanks
from benchmarks.records.statistics import Series
from mpiddp.options.fields import Argument

WORKER = "benchmarks.measure.programs.worker"
BACKENDS = ("gloo", "mpiddp")
"""As torch.distributed names them: the one to compare with, and ours."""


@dataclass(frozen=True)
class Program:
    title: str
    step: str
    """What one is called."""
    promise: float | None = None
    """Times as fast as over Gloo."""


PROGRAMS = {
    "tokens": Program("a transformer split by hand, dist.all_reduce", "token", 3.0),
    "tokens-compiled": Program("the same under torch.compile, functional", "token", 3.0),
    "tokens-dtensor": Program("the same by parallelize_module, DTensor", "token"),
    "ddp": Program("DDP of 128 small parameters", "step"),
    "fsdp2": Program("fully_shard (FSDP2) of six small layers", "step"),
    "broadcast_object_list": Program("broadcast_object_list", "call"),
    "all_gather_object": Program("all_gather_object", "call"),
    "barrier": Program("barrier", "call"),
}
LENGTH = Length(seconds=0.3, fewest=3, most=1000)
CHECKED_STEPS = 5
TOLERANCE = 0.01
"""How far off the result may be, relative to what one process found. Sums have other orders, and
AdamW's first steps are as long where gradients are next to nothing."""


@dataclass(frozen=True, kw_only=True)
class Plan(trials.Plan):
    """What is measured."""

    ranks: SeveralRanks = (2, 4)
    """Numbers of ranks."""
    programs: Annotated[tuple[str, ...], Argument(choices=tuple(PROGRAMS))] = tuple(PROGRAMS)
    """See below (default: all)."""
    repetitions: Count = 8
    deadline: Seconds = 600.0


@dataclass(frozen=True)
class Contender:
    name: str
    """Of a backend."""


GLOO, OWN = map(Contender, BACKENDS)


@dataclass(frozen=True)
class Visit:
    """Some steps of a program, one after the other."""

    steps: int
    by_rank: tuple[float, ...]
    """Seconds of a step, of each rank."""

    @property
    def usual(self) -> float:
        """Of the slowest rank."""
        return max(self.by_rank)


@dataclass(frozen=True, kw_only=True)
class Group(trials.Surroundings):
    """One program on one number of ranks."""

    program: str
    series: Mapping[Contender, Series[Visit]]
    refusals: Mapping[Contender, str] = field(default_factory=dict)
    wrong: Mapping[Contender, str] = field(default_factory=dict)
    has_equal_digits: bool = False
    """Whether every bit of the results is the same over both."""

    def find_times(self, contender: Contender) -> list[float]:
        """Seconds of a step, in order of rounds; empty if it was not timed."""
        series = self.series.get(contender)
        return [visit.usual for visit in series.samples] if series is not None else []


def judge(answers: Sequence[Mapping[str, Any]], contender: Contender, expected: str | None) -> str:
    """What is wrong with the ranks' answers to ``check``; empty if nothing is.

    ``expected``: the digest to have; None for any, within rounding.
    """
    if any((answer["own_calls"] > 0) != (contender == OWN) for answer in answers):
        return "calls were made over the other backend"
    digests = {answer["digest"] for answer in answers}
    if len(digests) > 1:
        return "the ranks' results differ"
    error = answers[0]["error"]
    if not error <= TOLERANCE:
        return (
            f"after {CHECKED_STEPS} steps the result is off by {error:.2g} of what one process "
            f"finds; up to {TOLERANCE:g} would be rounding"
        )
    if expected is not None and digests != {expected}:
        return f"on two ranks, where sums have one order, other digits than {GLOO.name}'s"
    return ""


class Visitor(trials.Visitor[Contender, Visit]):
    """Visits both backends with one program."""

    def __init__(self, job: Job, plan: Plan, ranks: int, program: str) -> None:
        super().__init__(f"{ranks} ranks, {program}", plan, LENGTH)
        self._job, self._seed, self._ranks, self._program = job, plan.seed, ranks, program
        self.digests: dict[Contender, str] = {}

    def _ask(self, contender: Contender, what: str, **more: Any) -> list[Any]:
        where = {"program": self._program, "backend": contender.name}
        what_for = f"{what} {self._program} over {contender.name}"
        return self._job.ask({"do": what, **where, **more}, what_for)

    def measure(self, key: Contender, iterations: int) -> Visit:
        answers = self._ask(key, "measure", steps=iterations)
        return Visit(iterations, tuple(each["seconds"] / iterations for each in answers))

    def check(self, key: Contender) -> bool:
        """See `trials.Visitor`; only right results are timed."""
        answers = self._ask(key, "check", seed=self._seed)
        check_answers(answers)
        expected = self.digests.get(GLOO) if self._ranks == 2 else None
        if problem := judge(answers, key, expected):
            self.wrong[key] = problem
            return False
        self.digests[key] = answers[0]["digest"]
        self.visit(key, LENGTH.fewest)
        return True


def measure(ranks: int, launcher: Mpirun, plan: Plan) -> Iterator[Group]:
    """Each program on so many ranks, as it is finished. Raises RunError, with the job's output."""
    changes = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with remote_job.start(make_mpi_program(WORKER, ranks, launcher, changes), plan.deadline) as job:
        rows = (GLOO, OWN)
        for program in plan.programs:
            visitor = Visitor(job, plan, ranks, program)
            total = len(rows) * (1 + plan.warm_up + plan.repetitions)
            with visitor.watch(total, {"": job}, local=True) as find_share:
                series = visitor.visit_in_turns(visitor.admit(rows))
                share = find_share()
            job.ask({"do": "let go"}, "letting a program go")
            yield Group(
                ranks=ranks, others_share=share, program=program, series=series,
                refusals=visitor.refusals, wrong=visitor.wrong,
                has_equal_digits=len(series) == 2 and len({*visitor.digests.values()}) == 1,
            )  # fmt: skip
        job.end()
