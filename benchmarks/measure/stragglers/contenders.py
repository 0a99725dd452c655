"""How long training takes while a worker is slow: the ways to train, their runs, the tables.

Whole trainings of ``python -m mpiddp.train``, in turns, for each kind of straggler: the framework's
all-reduce of gradients, and of weights every so many steps, and a parameter server with each bound
on staleness. What counts is the time that training itself took, up to the first epoch whose
evaluation reached the accuracy; evaluations, and the copy of the servers' weights to all ranks
before each of them, are left out.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.judge.ratios import compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.engine import CellGroup, Quantity, Sample
from benchmarks.measure.launching import launchers, processes
from benchmarks.measure.launching.processes import Program
from benchmarks.measure.trials import FAILED, Refusal, Rounds
from benchmarks.records.options import Count, RunOptions, Seconds
from benchmarks.records.schema import Cell, Coordinate, make_cell
from benchmarks.records.statistics import quantile, take_turns
from benchmarks.show.progress import show_progress
from benchmarks.show.tables import format_table
from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import at_least, positive
from mpiddp.options.fields import Argument
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.straggler import RANDOM, parse_straggler
from mpiddp.training.options.groups.synchronisation import FRAMEWORK, PARAMETER_SERVER, UNLIMITED
from mpiddp.wording import count_noun

TRAINING, TIME_TO = "training", "time to accuracy"
"""The quantities of a record."""
RANDOM_TARGET = 0.7
"""Most of the synchronous server's time that a bounded one may take with a random slow worker."""
OPTIONS = (
    "name", "data", "model", "epochs", "batch_size", "seed", "evaluate_every", "sync", "staleness",
    "straggler", "average_every",
)  # fmt: skip
"""Of the trainer, that a run is given."""
IN_STEP = "0"
"""The staleness that the others are compared with."""


@dataclass(frozen=True)
class TrainingWay:
    """A way to train, with a straggler."""

    straggler: str
    staleness: str | None
    """None for the framework's all-reduce."""
    average_every: int | None = None
    """Steps between two averages of weights, with the framework; None for those of gradients."""

    @property
    def way(self) -> str:
        if self.average_every is not None:
            return f"weights, {count_noun(self.average_every, 'step')}"
        usual = {None: "framework", IN_STEP: "server, in step", UNLIMITED: "server, no bound"}
        return usual.get(self.staleness, f"server, {self.staleness} steps")

    @property
    def name(self) -> str:
        return f"{self.way}, {self.straggler}"


@dataclass(frozen=True, kw_only=True)
class StragglersPlan(Rounds):
    """What is measured.

    ``seed`` is also that of the first round's training, the next round's is one higher.
    """

    ranks: Annotated[int, Argument("N", at_least(2))] = 2
    """Number of ranks, all of them workers."""
    model: str = "convnet"
    """Model of python -m mpiddp.train."""
    epochs: Count = 8
    """Of each training, at most."""
    batch_size: Count = 16
    """Samples per worker and step."""
    accuracy: Annotated[float, Argument("SHARE", positive("a share"))] = 0.97
    """Share of the test samples to reach."""
    stragglers: Annotated[tuple[str, ...], Argument("WHO=FACTOR")] = ("0=4", f"{RANDOM}=4")
    """A rank, or random, and how much longer its passes take."""
    staleness: Annotated[tuple[str, ...], Argument("STEPS")] = (IN_STEP, "4", UNLIMITED)
    """Bounds on staleness."""
    average_every: Annotated[tuple[int, ...], Argument("STEPS", at_least(0))] = (8,)
    """Steps between two averages of weights (local SGD), by the framework; 0 for no such runs."""
    repetitions: Count = 3
    deadline: Seconds = 600.0


@dataclass(frozen=True)
class TrainingRun:
    curve: Sequence[tuple[float, float]]
    """Of each evaluation the seconds of training until then, and the accuracy."""
    staleness: Mapping[str, int]
    """How often a worker was so many steps late."""

    @property
    def seconds(self) -> float:
        return self.curve[-1][0]

    def find_time(self, accuracy: float) -> float | None:
        """Seconds of training until an evaluation reached the accuracy; None if none did."""
        return next((seconds for seconds, reached in self.curve if reached >= accuracy), None)


def read_run(rows: Sequence[Mapping[str, Any]]) -> TrainingRun:
    times = itertools.accumulate(row["seconds"] for row in rows)
    curve = tuple(zip(times, (row["test_accuracy"] for row in rows), strict=True))
    return TrainingRun(curve, rows[-1]["staleness"] or {})


def list_contenders(plan: StragglersPlan) -> list[TrainingWay]:
    return [
        each
        for straggler in plan.stragglers
        for each in (
            TrainingWay(straggler, None),
            *(TrainingWay(straggler, None, steps) for steps in plan.average_every if steps),
            *(TrainingWay(straggler, staleness) for staleness in plan.staleness),
        )
    ]


def configure(plan: StragglersPlan, contender: TrainingWay, number: int = 0) -> Configuration:
    """For the round of this number. Raises ConfigurationError for what the trainer would refuse."""
    served = contender.staleness is not None
    return Configuration(
        name="run",
        data="digits",
        model=plan.model,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        seed=plan.seed + number,
        evaluate_every=1,
        sync=PARAMETER_SERVER if served else FRAMEWORK,
        staleness=contender.staleness or IN_STEP,
        straggler=contender.straggler,
        average_every=contender.average_every,
    ).resolve()


def make_program(
    plan: StragglersPlan,
    contender: TrainingWay,
    number: int,
    launcher: launchers.Mpirun,
    runs: Path,
) -> Program:
    configuration = configure(plan, contender, number)
    words = [sys.executable, "-m", "mpiddp.train", f"--runs-dir={runs}", "--save-every=never"]
    words += [f"--{each.replace('_', '-')}={getattr(configuration, each)}" for each in OPTIONS]
    return processes.make_program(launcher, plan.ranks, words)


def train(
    plan: StragglersPlan, contender: TrainingWay, number: int, launcher: launchers.Mpirun
) -> TrainingRun:
    """One run of the round of this number. Raises RunError with its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as name:
        runs = Path(name)
        processes.run(make_program(plan, contender, number, launcher, runs), plan.deadline)
        lines = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    return read_run([json.loads(line) for line in lines])


def complete(options: RunOptions[StragglersPlan]) -> StragglersPlan:
    plan = options.plan
    if plan.accuracy > 1:
        raise ConfigurationError(f"--accuracy: expected at most 1, found {plan.accuracy:g}")
    for straggler in plan.stragglers:
        rank = parse_straggler(straggler).rank
        if rank is not None and rank >= plan.ranks:
            raise ConfigurationError(
                f"--stragglers: expected ranks 0 to {plan.ranks - 1}, found {straggler!r}"
            )
    for contender in list_contenders(plan):
        configure(plan, contender)
    return plan


def measure(plan: StragglersPlan, launcher: launchers.Mpirun) -> Iterator[CellGroup | Sample]:
    """All runs in turns, each told as it ends: the group comes hours later."""
    runs: dict[TrainingWay, list[TrainingRun]] = {each: [] for each in list_contenders(plan)}
    with show_progress(plan.repetitions * len(runs), "run") as bar:
        for _, way in take_turns(list(runs), rounds=plan.repetitions, seed=plan.seed):
            bar.set_description(way.name)
            runs[way].append(train(plan, way, len(runs[way]), launcher))
            bar.update()
            yield Sample(TRAINING, way.way, runs[way][-1].seconds, {"straggler": way.straggler})
    yield make_group(plan, runs)


def make_group(
    plan: StragglersPlan, runs: Mapping[TrainingWay, Sequence[TrainingRun]]
) -> CellGroup:
    """Seconds of all epochs with the curves of accuracy, and seconds to the accuracy."""
    cells, refusals = list[Cell](), list[Refusal]()
    for way, each in runs.items():
        at: dict[str, Coordinate] = {
            "straggler": way.straggler, "model": plan.model, "batch": plan.batch_size,
            "epochs": plan.epochs,
        }  # fmt: skip
        place: dict[str, Any] = {"contender": way.way, "ranks": plan.ranks}
        details = {"curves": [run.curve for run in each], "staleness": [r.staleness for r in each]}
        whole = [run.seconds for run in each]
        cells.append(make_cell(whole, quantity=TRAINING, at=at, details=details, **place))
        at = {**at, "accuracy": plan.accuracy}
        times = [run.find_time(plan.accuracy) for run in each]
        reached = [time for time in times if time is not None]
        if len(reached) == len(times):
            cells.append(make_cell(reached, quantity=TIME_TO, at=at, **place))
        else:
            missed = f"{len(times) - len(reached)} of {count_noun(len(times), 'run')}"
            reason = f"{missed} did not reach {100 * plan.accuracy:g}%"
            where = {"ranks": plan.ranks, **at}
            refusals.append(Refusal(TIME_TO, way.way, reason, FAILED, where))
    return CellGroup(ranks=plan.ranks, cells=cells, refusals=refusals)


# ---- what the cells say --------------------------------------------------------------------------


def find_times(group: CellGroup, way: TrainingWay, accuracy: float) -> tuple[float, ...]:
    """To the accuracy, round by round; empty if a run did not come there, or there are none."""
    return group.find_samples(way.way, straggler=way.straggler, accuracy=accuracy)


def tabulate(groups: Sequence[CellGroup], plan: StragglersPlan) -> str:
    parts = [f"{plan.ranks} ranks, {plan.model} on digits"]
    for group in groups:
        for straggler in plan.stragglers:
            parts.append(_tabulate(group, straggler, plan))
    return "\n\n".join(parts)


def _tabulate(group: CellGroup, straggler: str, plan: StragglersPlan) -> str:
    def find_median(way: TrainingWay) -> float | None:
        times = find_times(group, way, plan.accuracy)
        return quantile(times, 0.5) if times else None

    def find_whole(way: TrainingWay) -> Cell:
        cell = group.find(way.way, straggler=straggler, accuracy=None)
        assert cell is not None
        return cell

    def describe_time(way: TrainingWay) -> str:
        median = find_median(way)
        return "never" if median is None else f"{median:.2f}"

    def describe_ratio(way: TrainingWay) -> str:
        ours, theirs = map(find_median, (way, TrainingWay(straggler, IN_STEP)))
        return f"{ours / theirs:.2f}" if ours is not None and theirs is not None else ""

    def describe_accuracy(way: TrainingWay) -> str:
        ends = [curve[-1][1] for curve in find_whole(way).details["curves"]]
        return f"{quantile(ends, 0.5):.2%}"

    def describe_staleness(way: TrainingWay) -> str:
        counts: Counter[int] = Counter()
        for run in find_whole(way).details["staleness"]:
            counts.update({int(late): times for late, times in run.items()})
        mean = sum(late * times for late, times in counts.items()) / max(1, counts.total())
        return f"mean {mean:.2f}, max {max(counts)}" if counts else ""

    rows = [each for each in list_contenders(plan) if each.straggler == straggler]
    table = format_table(rows, {
        f"straggler {straggler}, to {100 * plan.accuracy:g}%": lambda way: f"  {way.way}",
        "seconds to it": describe_time,
        "by in step": describe_ratio,
        "seconds, all epochs": lambda way: f"{find_whole(way).summary.median:.2f}",
        "last accuracy": describe_accuracy,
        "staleness": describe_staleness,
    })  # fmt: skip
    return "\n".join(line.rstrip() for line in table.splitlines())


def judge(groups: Sequence[CellGroup], plan: StragglersPlan) -> list[Target]:
    """The targets that these runs say something about; ratios are those of rounds; that of
    the medians stands beside them."""
    targets = []
    for group in groups:
        ways = list_contenders(plan)
        reached = [find_times(group, way, plan.accuracy) for way in ways]
        coefficient = find_common([list(filter(None, reached))])
        for way in ways:
            base = TrainingWay(way.straggler, IN_STEP)
            is_random = parse_straggler(way.straggler).rank is None
            bounded = way.staleness not in (None, IN_STEP, UNLIMITED)
            if base not in ways or not (is_random and bounded):
                continue
            ours, theirs = (find_times(group, each, plan.accuracy) for each in (way, base))
            ratio, note = None, ""
            if ours and theirs:
                ratio = compare_rounds(theirs, ours, coefficient)
                note = f"of medians {quantile(ours, 0.5) / quantile(theirs, 0.5):.3f}"
            text = f"straggler {way.straggler}: time of {way.way} to {100 * plan.accuracy:g}%"
            text += f", by in step, at most {RANDOM_TARGET:g}"
            targets.append(Target(text, {"": ratio}, at_most=RANDOM_TARGET, note=note))
    return targets


QUANTITY = Quantity(
    command="stragglers",
    description="Train until an accuracy is reached while a worker is slow, in turns: the "
    "framework's all-reduce, of gradients and of weights every so many steps, and a parameter "
    "server with each bound on staleness.",
    without=("warm_up",),
    plan=StragglersPlan,
    complete=complete,
    measure=measure,
    tabulate=tabulate,
    judge=judge,
)
