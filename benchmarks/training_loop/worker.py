"""What runs in the ranks: the trainer and the bare loop take turns in one process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import distributed

import mpiddp
from benchmarks.baselines.ddp_step import finish
from benchmarks.baselines.training_loop import Settings, take_steps
from benchmarks.common.statistics import interleave
from benchmarks.common.trials import Length
from benchmarks.training_loop.workloads import BARE, TRAINER, Workload, find_workload
from mpiddp.training.task.models import build

TURN = Length(seconds=1.0, fewest=1, most=24)
"""As many steps as are not disturbed by what the other loop has left in caches."""
FEWEST_ROUNDS = 6
UNTIMED = 24
"""Steps of each loop in which memory and buckets are made, and models compiled."""
EPOCHS = 1_000_000
"""More than any measurement has."""


@dataclass(frozen=True)
class Request:
    """What one job measures."""

    model: str
    settings: Settings
    seconds: float
    seed: int


class Loops:
    """Both loops, on this rank. Collective."""

    def __init__(self, workload: Workload, request: Request) -> None:
        settings = request.settings
        data = workload.make(request.seed)
        trainer = mpiddp.Trainer(
            mpiddp.Task(data=lambda: data), model=workload.model, batch_size=settings.batch_size,
            epochs=EPOCHS, warmup_epochs=0, learning_rate=settings.learning_rate,
            momentum=settings.momentum, weight_decay=settings.weight_decay,
            precision=settings.precision, channels_last=settings.channels_last,
            compile=settings.compile, evaluate_every=EPOCHS, save_every="never",
            seed=request.seed,
        )  # fmt: skip
        self.device = trainer.session.device
        self._trainer_steps = trainer.steps()
        # Now, so that what it sets for the whole process is set for the bare loop as well.
        self.take_trainer(1)
        torch.manual_seed(request.seed)
        model = build(workload.model, data.shape, data.classes)
        features, labels = (
            torch.from_numpy(each).to(self.device)
            for each in (data.train.features, data.train.labels)
        )
        self._bare_steps = take_steps(model, features, labels, settings)

    def take_trainer(self, steps: int) -> None:
        for step in islice(self._trainer_steps, steps):
            step.take()

    def take_bare(self, steps: int) -> None:
        for _ in islice(self._bare_steps, steps):
            pass

    def time(self, name: str, steps: int) -> float:
        """Seconds of a step."""
        take = self.take_trainer if name == TRAINER else self.take_bare
        distributed.barrier()
        finish(self.device)
        begin = time.perf_counter()
        take(steps)
        finish(self.device)
        return (time.perf_counter() - begin) / steps


def main() -> None:
    given, target = sys.argv[1:]
    values = json.loads(given)
    request = Request(**{**values, "settings": Settings(**values["settings"])})
    loops = Loops(find_workload(request.model), request)
    names = [TRAINER, BARE]
    for name in names:
        loops.time(name, UNTIMED)
    seconds = max(loops.time(name, TURN.fewest) for name in names)
    share = mpiddp.init
    held = torch.tensor([seconds], dtype=torch.float64)
    distributed.broadcast(held, 0)
    seconds = held.item()
    steps = TURN.choose_iterations(seconds)
    rounds = max(FEWEST_ROUNDS, int(request.seconds / (2 * steps * seconds)))
    series = interleave(names, lambda name: loops.time(name, steps), rounds=rounds, warm_up=1, seed=request.seed)
    if distributed.get_rank() == 0:
        found = {"steps": steps, "series": {name: asdict(each) for name, each in series.items()}}
        Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
