"""The trainer beside a bare hand-written loop: what both train, their jobs, and the table.

Both train the same model on the same samples, with the same batch, precision and optimizer, in one
process (on each rank), in turns.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import numpy as np

from benchmarks.judge.targets import Target
from benchmarks.measure.baselines.training_loop import Settings
from benchmarks.measure.engine import CellGroup, Quantity, find_speeds
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.launching.processes import make_program, run_worker
from benchmarks.records.options import (
    SECONDS,
    CountOrZero,
    Ranks,
    RunOptions,
    Seconds,
    describe_interval,
    describe_value,
)
from benchmarks.records.schema import Cell, Coordinate, make_cell
from benchmarks.records.statistics import quantile
from benchmarks.show.progress import show_progress
from benchmarks.show.tables import format_table
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument
from mpiddp.training.data.data_sets import DataSet, Split
from mpiddp.wording import count_noun

TRAINER, BARE = "mpiddp.train", "a bare loop"
WORKER = "benchmarks.measure.training_loop.worker"
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 0.0005
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Of what torch.compile has made, Triton's programs included."""
SPEED = 0.98
CLASSES = 10
TEST_SAMPLES = 10


@dataclass(frozen=True)
class LoopWorkload:
    """What both loops train: a model, and samples that need no download."""

    model: str
    batch_size: int
    """Samples per rank and step."""
    shape: tuple[int, ...]
    """Of one sample."""
    samples: int
    """Of an epoch: full batches, on one rank and on two."""

    def make(self, seed: int) -> DataSet:
        """Noise."""
        generator = np.random.default_rng(seed)

        def draw(count: int) -> Split:
            features = generator.random((count, *self.shape), dtype=np.float32)
            return Split(features, generator.integers(CLASSES, size=count))

        return DataSet(draw(self.samples), draw(TEST_SAMPLES), CLASSES)


WORKLOADS = {
    # The trainer's own work shows where a step's arithmetic is little. Small digits, and epochs
    # that end in each round.
    "convnet": LoopWorkload("convnet", 16, (1, 8, 8), 2304),
    # CIFAR-10's images, and nearly as many: an epoch takes seconds on any GPU.
    "resnet18": LoopWorkload("resnet18", 64, (3, 32, 32), 49_920),
}


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """What is measured."""

    ranks: Ranks = (1, 2)
    """Numbers of ranks."""
    models: Annotated[tuple[str, ...], Argument("MODEL")] = tuple(WORKLOADS)
    """With the data and batch that belong to each."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of both loops."""
    channels_last: bool = False
    """Images lie in memory by pixels."""
    compile: bool = False
    """Use torch.compile in both loops."""
    seconds: Seconds = 60.0
    """Of rounds, of each model on each number of ranks; there are six rounds in any case."""
    seed: CountOrZero = 0
    """Of the order of turns, of parameters and of samples."""
    deadline: Seconds = 600.0
    """For a job beside its rounds: its start, and compiling."""

    def make_request(self, model: str) -> LoopRequest:
        settings = Settings(
            WORKLOADS[model].batch_size, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY,
            self.precision, self.channels_last, self.compile,
        )  # fmt: skip
        return LoopRequest(model, settings, self.seconds, self.seed)


@dataclass(frozen=True)
class LoopRequest:
    """What the ranks of a job are told."""

    model: str
    settings: Settings
    seconds: float
    """Of all rounds."""
    seed: int

    @classmethod
    def read(cls, text: str) -> LoopRequest:
        """From JSON."""
        values = json.loads(text)
        return cls(**{**values, "settings": Settings(**values["settings"])})


def complete(options: RunOptions[LoopPlan]) -> LoopPlan:
    plan = options.plan
    for name in plan.models:
        if name not in WORKLOADS:
            raise ConfigurationError(f"--models: expected {' or '.join(WORKLOADS)}, found {name!r}")
    return plan


def measure(plan: LoopPlan, launcher: Mpirun) -> Iterator[CellGroup]:
    """A job for each model and number of ranks. Raises RunError with its output if one fails."""
    # What one has compiled is there for the next.
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as compiled:
        changes = {} if CACHE in os.environ else {CACHE: compiled}
        for ranks in plan.ranks:
            words = [sys.executable, "-m", "mpiddp", "-m", WORKER]
            program = make_program(launcher, ranks, words, changes)
            with show_progress(len(plan.models), "job") as bar:
                for model in plan.models:
                    bar.set_description(f"{model}, {count_noun(ranks, 'rank')}")
                    told = asdict(plan.make_request(model))
                    found = run_worker(program, told, plan.deadline + 2 * plan.seconds)
                    bar.update()
                    cells = list(make_cells(plan, model, ranks, **found))
                    yield CellGroup(ranks=ranks, cells=cells)


def make_cells(
    plan: LoopPlan, model: str, ranks: int, *, series: dict[str, list[float]], **details: int
) -> Iterator[Cell]:
    """``series``: seconds of a step of each loop on rank 0, round by round."""
    at: dict[str, Coordinate] = {"model": model, "batch": WORKLOADS[model].batch_size}
    at["precision"] = plan.precision
    at |= {name: "on" for name in ("channels_last", "compile") if getattr(plan, name)}
    for name, seconds in series.items():
        yield make_cell(
            seconds, quantity="training loop", contender=name, ranks=ranks, at=at, details=details
        )


def tabulate(groups: Sequence[CellGroup], plan: LoopPlan) -> str:
    def describe_median(values: Iterable[float]) -> str:
        return describe_value(quantile(list(values), 0.5), SECONDS)

    def subtract(group: CellGroup) -> Iterator[float]:
        pairs = zip(*map(group.find_samples, (TRAINER, BARE)), strict=True)
        return (mine - bare for mine, bare in pairs)

    return format_table(zip(groups, find_speeds(groups, TRAINER, BARE), strict=True), {
        "model": lambda row: str(row[0].cells[0].at["model"]),
        "ranks": lambda row: str(row[0].ranks),
        "batch": lambda row: str(row[0].cells[0].at["batch"]),
        "turn": lambda row: count_noun(row[0].cells[0].details["steps"], "step"),
        TRAINER: lambda row: describe_median(row[0].find_samples(TRAINER)),
        BARE: lambda row: describe_median(row[0].find_samples(BARE)),
        "more": lambda row: describe_median(subtract(row[0])),
        "speed": lambda row: f"{row[1].estimate:.3f}" if row[1] else "–",
        "95 %": lambda row: describe_interval(row[1].interval if row[1] else None),
    })  # fmt: skip


def judge(groups: Sequence[CellGroup], plan: LoopPlan) -> list[Target]:
    found = {
        f"{each.cells[0].at['model']}, {count_noun(each.ranks, 'rank')}": speed
        for each, speed in zip(groups, find_speeds(groups, TRAINER, BARE), strict=True)
        if speed is not None
    }
    text = f"the trainer's samples per second: at least {SPEED:g} × a bare loop's"
    return [Target(text, found, at_least=SPEED)] if found else []


QUANTITY = Quantity(
    command="training-loop",
    description="Time the steps of python -m mpiddp.train and of a bare loop, which take turns in "
    "one process.",
    explanation="""\
Time of a step: medians over rounds, in each of which both loops take turns in one process.
More: the trainer's less the bare loop's, round by round. Speed: the bare loop's time by the
trainer's, round by round, with its 95 % interval. Batches are samples per rank.""",
    plan=LoopPlan,
    complete=complete,
    measure=measure,
    tabulate=tabulate,
    judge=judge,
)
