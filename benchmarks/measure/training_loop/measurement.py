"""Jobs whose ranks time both loops in turns, and what they found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.measure.baselines.training_loop import Settings
from benchmarks.measure.launching.launchers import Mpirun
from benchmarks.measure.launching.processes import make_program, run
from benchmarks.measure.training_loop.workloads import (
    BARE,
    TRAINER,
    WORKLOADS,
    Workload,
    find_workload,
)
from benchmarks.records.options import CountOrZero, Ranks, Seconds
from benchmarks.show.progress import show_progress
from mpiddp.options.fields import Argument
from mpiddp.wording import count_noun

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 0.0005
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Of what torch.compile has made, Triton's programs included."""


@dataclass(frozen=True, kw_only=True)
class Plan:
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

    def make_request(self, workload: Workload) -> dict[str, object]:
        """The fields of `benchmarks.measure.training_loop.worker.Request`."""
        settings = Settings(
            workload.batch_size, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY,
            self.precision, self.channels_last, self.compile,
        )  # fmt: skip
        found = {"settings": asdict(settings), "seconds": self.seconds, "seed": self.seed}
        return {"model": workload.model, **found}


@dataclass(frozen=True)
class Group:
    """Both loops, on one model and number of ranks."""

    model: str
    ranks: int
    batch_size: int
    steps: int
    """Of a turn."""
    turns: int
    """Of each loop in a round."""
    series: Mapping[str, Sequence[float]]
    """Seconds of a step on rank 0, round by round."""

    @property
    def seconds(self) -> tuple[Sequence[float], Sequence[float]]:
        """The trainer's, and the bare loop's: their ratio is the trainer's speed."""
        return self.series[TRAINER], self.series[BARE]


def measure(plan: Plan, ranks: int, launcher: Mpirun, scratch: Path) -> Iterator[Group]:
    """All models on one number of ranks, as each is finished.

    ``scratch``: a directory of all jobs. Raises RunError with its output if a job fails.
    """
    # What one has compiled is there for the next.
    changes = {} if CACHE in os.environ else {CACHE: str(scratch / "compiled")}
    target = scratch / "found.json"
    with show_progress(len(plan.models), "job") as bar:
        for model in plan.models:
            bar.set_description(f"{model}, {count_noun(ranks, 'rank')}")
            workload = find_workload(model)
            words = ["-m", "mpiddp", "-m", "benchmarks.measure.training_loop.worker"]
            words += [json.dumps(plan.make_request(workload)), str(target)]
            program = make_program(launcher, ranks, [sys.executable, *words], changes)
            run(program, plan.deadline + 2 * plan.seconds)
            bar.update()
            found = json.loads(target.read_text())
            yield Group(model, ranks, workload.batch_size, **found)
