"""Whole small programs over mpiddp's backend and over Gloo: which there are, visits, the table.

What every program finds is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from benchmarks.judge.ratios import Ratio
from benchmarks.judge.targets import Target
from benchmarks.measure import trials
from benchmarks.measure.engine import CellGroup, Quantity, find_speeds, list_wrong
from benchmarks.measure.launching import remote_job
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.launching.paired_jobs import make_mpi_program
from benchmarks.measure.launching.remote_job import Job
from benchmarks.measure.trials import (
    REFUSED,
    Length,
    StepsVisit,
    Visitor,
    check_answers,
    make_steps_cell,
)
from benchmarks.records.options import (
    Count,
    Seconds,
    SeveralRanks,
    describe_interval,
    describe_seconds,
)
from benchmarks.records.schema import Coordinate
from benchmarks.records.statistics import quantile
from benchmarks.show.tables import format_table
from mpiddp.options.fields import Argument
from mpiddp.wording import count_noun

PROGRAM = "program"
WORKER = "benchmarks.measure.programs.worker"
BACKENDS = ("gloo", "mpiddp")
"""As torch.distributed names them: the one to compare with, and ours."""


@dataclass(frozen=True)
class KnownProgram:
    title: str
    step: str
    """What one is called."""
    promise: float | None = None
    """Times as fast as over Gloo."""


PROGRAMS = {
    "tokens": KnownProgram("a transformer split by hand, dist.all_reduce", "token", 3.0),
    "tokens-compiled": KnownProgram("the same under torch.compile, functional", "token", 3.0),
    "tokens-dtensor": KnownProgram("the same by parallelize_module, DTensor", "token"),
    "ddp": KnownProgram("DDP of 128 small parameters", "step"),
    "fsdp2": KnownProgram("fully_shard (FSDP2) of six small layers", "step"),
    "broadcast_object_list": KnownProgram("broadcast_object_list", "call"),
    "all_gather_object": KnownProgram("all_gather_object", "call"),
    "barrier": KnownProgram("barrier", "call"),
}
LENGTH = Length(seconds=0.3, fewest=3, most=1000)
CHECKED_STEPS = 5
TOLERANCE = 0.01
"""How far off the result may be, relative to what one process found. Sums have other orders, and
AdamW's first steps are as long where gradients are next to nothing."""


@dataclass(frozen=True, kw_only=True)
class ProgramsPlan(trials.Plan):
    """What is measured."""

    ranks: SeveralRanks = (2, 4)
    """Numbers of ranks."""
    programs: Annotated[tuple[str, ...], Argument(choices=tuple(PROGRAMS))] = tuple(PROGRAMS)
    """See below (default: all)."""
    repetitions: Count = 8
    deadline: Seconds = 600.0


@dataclass(frozen=True)
class Backend:
    name: str


GLOO, OWN = map(Backend, BACKENDS)


def find_problem(
    answers: Sequence[Mapping[str, Any]], contender: Backend, expected: str | None
) -> str:
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


class ProgramVisitor(Visitor[Backend, StepsVisit]):
    """Visits both backends with one program."""

    def __init__(self, job: Job, plan: ProgramsPlan, ranks: int, program: str) -> None:
        super().__init__(f"{ranks} ranks, {program}", plan, LENGTH)
        self._job, self._seed, self._ranks, self._program = job, plan.seed, ranks, program
        self.digests: dict[Backend, str] = {}

    def _ask(self, contender: Backend, what: str, **more: Any) -> list[Any]:
        where = {"program": self._program, "backend": contender.name}
        what_for = f"{what} {self._program} over {contender.name}"
        return self._job.ask({"do": what, **where, **more}, what_for)

    def measure(self, key: Backend, iterations: int) -> StepsVisit:
        answers = self._ask(key, "measure", steps=iterations)
        seconds = tuple(each["seconds"] / iterations for each in answers)
        return StepsVisit(steps=iterations, by_rank=seconds, usual=max(seconds))

    def find_problem(self, key: Backend) -> str:
        answers = self._ask(key, "check", seed=self._seed)
        check_answers(answers)
        expected = self.digests.get(GLOO) if self._ranks == 2 else None
        problem = find_problem(answers, key, expected)
        if not problem:
            self.digests[key] = answers[0]["digest"]
        return problem


def measure(plan: ProgramsPlan, launcher: Mpirun) -> Iterator[CellGroup]:
    """Each program on each number of ranks. Raises RunError, with the job's output."""
    changes = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for ranks in plan.ranks:
        program = make_mpi_program(WORKER, ranks, launcher, changes)
        with remote_job.start(program, plan.deadline) as job:
            for name in plan.programs:
                visitor = ProgramVisitor(job, plan, ranks, name)
                try:
                    share = visitor.visit_all((GLOO, OWN), {"": job}, local=True)
                except KeyboardInterrupt:
                    if visitor.keep_whole_rounds():
                        yield make_group(visitor, name, ranks, None)
                    raise
                job.ask({"do": "let go"}, "letting a program go")
                yield make_group(visitor, name, ranks, share)
            job.end()


def make_group(visitor: ProgramVisitor, name: str, ranks: int, share: float | None) -> CellGroup:
    is_same = len(visitor.visits) == 2 and len({*visitor.digests.values()}) == 1
    at: dict[str, Coordinate] = {"program": name}
    cells = [
        make_steps_cell(
            visitor.list_series(key), {"digits": "the same" if is_same else "rounded"},
            quantity=PROGRAM, contender=key.name, ranks=ranks, at=at,
        )
        for key in visitor.visits
    ]  # fmt: skip
    return CellGroup(
        ranks=ranks,
        others_share=share,
        cells=cells,
        refusals=visitor.list_refusals(PROGRAM, {**at, "ranks": ranks}),
        facts={**at, "ranks": ranks, "others_share": share},
    )


# ---- what the cells say --------------------------------------------------------------------------


def compare(groups: Sequence[CellGroup]) -> list[tuple[CellGroup, Ratio | None]]:
    """Each, with how many times faster its program is over mpiddp than over Gloo."""
    speeds = find_speeds(groups, OWN.name, GLOO.name)
    return list(zip(groups, speeds, strict=True))


def tabulate(groups: Sequence[CellGroup], plan: ProgramsPlan) -> str:
    def describe_time(group: CellGroup, backend: Backend) -> str:
        times = group.find_samples(backend.name)
        return describe_seconds(quantile(times, 0.5)) if times else "–"

    rows = [row for row in compare(groups) if row[0].cells]
    lines = [format_table(rows, {
        "": lambda row: row[0].facts["program"],
        "ranks": lambda row: str(row[0].ranks),
        "of a": lambda row: PROGRAMS[row[0].facts["program"]].step,
        "Gloo": lambda row: describe_time(row[0], GLOO),
        "mpiddp": lambda row: describe_time(row[0], OWN),
        "× Gloo": lambda row: f"{row[1].estimate:.2f}" if row[1] else "–",
        "95 %": lambda row: describe_interval(row[1].interval if row[1] else None, "{:.2f}".format),
        "digits": lambda row: row[0].cells[0].details["digits"] if row[1] else "–",
    })]  # fmt: skip
    for each in groups:
        where = f"{each.facts['program']} on {count_noun(each.ranks, 'rank')}"
        reasons = [refusal.reason for refusal in each.refusals if refusal.kind == REFUSED]
        # Mostly one reason for both.
        lines += [f"left out: {where}: {why}" for why in dict.fromkeys(reasons)]
    lines += [f"wrong: {each}" for each in list_wrong(groups)]
    shares = [each.others_share for each in groups if each.others_share is not None]
    if shares:
        lines.append(f"other programs took up to {max(shares):.0%} of the cores meanwhile")
    return "\n".join(lines)


def judge(groups: Sequence[CellGroup], plan: ProgramsPlan) -> list[Target]:
    """The promises that these groups say something about."""
    found: dict[str, dict[str, Ratio]] = {}
    for group, speed in compare(groups):
        if speed is not None:
            place = count_noun(group.ranks, "rank")
            found.setdefault(group.facts["program"], {})[place] = speed
    return [
        Target(f"{name}: at least {least:g} × Gloo's {kind.step}s", found[name], least)
        for name, kind in PROGRAMS.items()
        if (least := kind.promise) is not None and name in found
    ]


def describe_programs() -> str:
    return "; ".join(
        f"{name}: {each.title}" if each.title != name else name for name, each in PROGRAMS.items()
    )


QUANTITY = Quantity(
    command="programs",
    description="Time whole small programs of torch.distributed over mpiddp's backend and over "
    "Gloo, in turns in the same processes: tokens of a split transformer, training steps, object "
    "collectives.",
    explanation="""\
Times of a token, a step or a call of the slowest rank: medians over rounds. × Gloo: how many times
faster it is over mpiddp, round by round, and the 95 % interval of that (–: too few
rounds). Digits: whether every bit of the results is the same over both; else they differ by
rounding.""",
    epilog=f"PROGRAM is {describe_programs()}",
    without=("link",),
    plan=ProgramsPlan,
    measure=measure,
    tabulate=tabulate,
    judge=judge,
)
