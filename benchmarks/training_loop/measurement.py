"""Whole trainings in turns, and the samples per second of their epochs."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.baselines.training_loop import Settings
from benchmarks.common.options import Count, Ranks, Seconds
from benchmarks.common.statistics import Series, interleave, quantile
from benchmarks.common.trials import Rounds, show_progress
from benchmarks.launching.launchers import Mpirun
from benchmarks.launching.processes import make_program, run
from benchmarks.training_loop.workloads import WORKLOADS, Workload, find_workload
from mpiddp.options.fields import Argument
from mpiddp.training.records.history import METRICS

TRAINER, BARE = "mpiddp.train", "a bare loop"
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 0.0005
UNTIMED = 1
"""Epochs at the beginning that do not count: memory and buckets are made, models compiled."""


@dataclass(frozen=True, kw_only=True)
class Plan(Rounds):
    """What is measured."""

    ranks: Ranks = (1, 2)
    """Numbers of ranks."""
    models: Annotated[tuple[str, ...], Argument("MODEL")] = tuple(WORKLOADS)
    """With the data and batch that belong to each."""
    epochs: Count = 5
    """Of each training that count, after one that does not."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of both loops."""
    channels_last: bool = False
    """Images lie in memory by pixels."""
    compile: bool = False
    """Use torch.compile in both loops."""
    repetitions: Count = 6
    deadline: Seconds = 600.0

    def make_settings(self, workload: Workload) -> Settings:
        return Settings(
            workload.batch_size, UNTIMED + self.epochs, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY,
            self.precision, self.channels_last, self.compile,
        )  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Both loops, on one model and number of ranks."""

    model: str
    ranks: int
    batch_size: int
    series: Mapping[str, Series[float]]
    """Samples per second of all ranks, a round's median epoch each."""

    @property
    def rates(self) -> tuple[Sequence[float], Sequence[float]]:
        """The bare loop's samples per second, and the trainer's, in order of rounds."""
        return self.series[BARE].samples, self.series[TRAINER].samples


def measure(plan: Plan, ranks: int, launcher: Mpirun) -> Iterator[Group]:
    """All models on one number of ranks, as each is finished.

    Raises RunError with its output if a training fails."""
    rounds = plan.warm_up + plan.repetitions
    with (
        show_progress(2 * rounds * len(plan.models), "training") as bar,
        tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as name,
    ):
        folder, numbers = Path(name), count()
        for model in plan.models:
            workload = find_workload(model)

            def take(contender: str, workload: Workload = workload) -> float:
                bar.set_description(f"{workload.model}, {ranks} ranks, {contender}")
                target = folder / str(next(numbers))
                make = make_trainer if contender == TRAINER else make_bare
                words = make(plan, workload, target)
                run(make_program(launcher, ranks, [sys.executable, *words]), plan.deadline)
                rates = read_trainer(target) if contender == TRAINER else read_bare(target)
                bar.update()
                return quantile(rates[UNTIMED:], 0.5)

            series = interleave(
                [TRAINER, BARE], take, rounds=plan.repetitions, warm_up=plan.warm_up, seed=plan.seed
            )
            yield Group(model, ranks, workload.batch_size, series)


def make_trainer(plan: Plan, workload: Workload, target: Path) -> list[str]:
    """Words after ``python`` for the trainer; it makes its run directory at ``target``."""
    options = {
        "data": workload.data,
        "model": workload.model,
        "batch-size": workload.batch_size,
        "epochs": UNTIMED + plan.epochs,
        "learning-rate": LEARNING_RATE,
        "momentum": MOMENTUM,
        "weight-decay": WEIGHT_DECAY,
        "precision": plan.precision,
        "evaluate-every": UNTIMED + plan.epochs,
        "save-every": "never",
        "seed": plan.seed,
        "runs-dir": target.parent,
        "name": target.name,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    flags = {"--channels-last": plan.channels_last, "--compile": plan.compile}
    return ["-m", "mpiddp.train", *words, *(name for name, given in flags.items() if given)]


def make_bare(plan: Plan, workload: Workload, target: Path) -> list[str]:
    """The same for the bare loop; it writes the file ``target``."""
    settings = json.dumps(asdict(plan.make_settings(workload)))
    worker = ["-m", "mpiddp", "-m", "benchmarks.training_loop.worker"]
    return [*worker, workload.model, str(plan.seed), settings, str(target)]


def read_trainer(target: Path) -> list[float]:
    rows = (target / METRICS).read_text().splitlines()
    return [float(json.loads(row)["samples_per_second"]) for row in rows]


def read_bare(target: Path) -> list[float]:
    rates: list[float] = json.loads(target.read_text())
    return rates
