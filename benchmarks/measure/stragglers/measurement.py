"""Whole trainings: how each is started, and its accuracy by time."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.measure.launching import launchers, processes
from benchmarks.measure.launching.processes import Program
from benchmarks.measure.trials import Rounds
from benchmarks.records.options import Count, Seconds
from benchmarks.records.statistics import Series, interleave, quantile
from benchmarks.show.progress import show_progress
from mpiddp.options.checks import at_least, positive
from mpiddp.options.fields import Argument
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.straggler import RANDOM
from mpiddp.training.options.groups.synchronisation import FRAMEWORK, PARAMETER_SERVER, UNLIMITED
from mpiddp.wording import count_noun

OPTIONS = (
    "name", "data", "model", "epochs", "batch_size", "seed", "evaluate_every", "sync", "staleness",
    "straggler", "average_every",
)  # fmt: skip
"""Of the trainer, that a run is given."""
IN_STEP = "0"
"""The staleness that the others are compared with."""


@dataclass(frozen=True)
class Contender:
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
class Plan(Rounds):
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
class Point:
    seconds: float
    """Of training, up to here."""
    accuracy: float


@dataclass(frozen=True)
class TrainingRun:
    points: tuple[Point, ...]
    staleness: Mapping[int, int]

    def find_time(self, accuracy: float) -> float | None:
        """Seconds of training until an evaluation reached the accuracy; None if none did."""
        return next((each.seconds for each in self.points if each.accuracy >= accuracy), None)


def read_run(rows: Sequence[Mapping[str, Any]]) -> TrainingRun:
    points, seconds = [], 0.0
    for row in rows:
        seconds += row["seconds"]
        points.append(Point(seconds, row["test_accuracy"]))
    counts = rows[-1]["staleness"] or {}
    return TrainingRun(tuple(points), {int(late): count for late, count in counts.items()})


def list_contenders(plan: Plan) -> list[Contender]:
    return [
        each
        for straggler in plan.stragglers
        for each in (
            Contender(straggler, None),
            *(Contender(straggler, None, steps) for steps in plan.average_every if steps),
            *(Contender(straggler, staleness) for staleness in plan.staleness),
        )
    ]


def configure(plan: Plan, contender: Contender, number: int = 0) -> Configuration:
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
    plan: Plan, contender: Contender, number: int, launcher: launchers.Mpirun, runs: Path
) -> Program:
    configuration = configure(plan, contender, number)
    words = [sys.executable, "-m", "mpiddp.train", f"--runs-dir={runs}", "--save-every=never"]
    words += [f"--{each.replace('_', '-')}={getattr(configuration, each)}" for each in OPTIONS]
    return processes.make_program(launcher, plan.ranks, words)


def train(plan: Plan, contender: Contender, number: int, launcher: launchers.Mpirun) -> TrainingRun:
    """One run of the round of this number. Raises RunError with its output if it fails."""
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as name:
        runs = Path(name)
        processes.run(make_program(plan, contender, number, launcher, runs), plan.deadline)
        lines = (runs / "run" / "metrics.jsonl").read_text().splitlines()
    return read_run([json.loads(line) for line in lines])


def measure(
    plan: Plan, launcher: launchers.Mpirun, keep: Callable[[Contender, TrainingRun], None]
) -> dict[Contender, Series[TrainingRun]]:
    """All runs in turns; each is told to ``keep`` as it ends."""
    contenders = list_contenders(plan)
    numbers = dict.fromkeys(contenders, 0)
    with show_progress(plan.repetitions * len(contenders), "run") as bar:

        def visit(contender: Contender) -> TrainingRun:
            bar.set_description(contender.name)
            run = train(plan, contender, numbers[contender], launcher)
            numbers[contender] += 1
            keep(contender, run)
            bar.update()
            return run

        return interleave(
            contenders, visit, rounds=plan.repetitions, warm_up=plan.warm_up, seed=plan.seed
        )


def find_times(series: Series[TrainingRun] | None, accuracy: float) -> list[float] | None:
    """Of each round, to the accuracy; None if a run did not come there, or there are none."""
    times = [run.find_time(accuracy) for run in series.samples] if series is not None else []
    known = [time for time in times if time is not None]
    return known if known and len(known) == len(times) else None


def find_median(series: Series[TrainingRun] | None, accuracy: float) -> float | None:
    """Of those times."""
    times = find_times(series, accuracy)
    return None if times is None else quantile(times, 0.5)
