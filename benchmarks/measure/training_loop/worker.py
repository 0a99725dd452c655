"""What runs in the ranks: the trainer and a bare loop take turns in one process.

Each is an iterator of steps, and rests while the other one takes its turn. What is set for a whole
process (threads, memory allocator, cuDNN, the process group) is the same for both in this way, and
neither has any call in a step that it would not have alone. Clocks are read between turns only.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from torch import distributed

from benchmarks.measure.baselines.ddp_step import finish
from benchmarks.measure.baselines.training_loop import take_steps
from benchmarks.measure.training_loop.contenders import BARE, TRAINER, WORKLOADS, LoopRequest
from benchmarks.measure.trials import Length
from benchmarks.records.statistics import take_turns
from mpiddp.training import Task, Trainer
from mpiddp.training.data.data_sets import Split
from mpiddp.training.task.models import build

TURN = Length(seconds=0.5, fewest=1, most=12)
"""In steps. A machine's speed drifts within a second: on a virtual one the standard error of a
minute's ratio was 0.65 % with turns of 24 steps of 5 ms, and 0.48 % with 12. With fewer the first
step, which is a cold one, would count for more."""
ROUND = Length(seconds=3.0, fewest=1, most=12)
"""In turns of each loop: the convnet's epoch on one rank, with what its end takes."""
FEWEST_ROUNDS = 6
"""Of which a ratio has an interval."""
WARM_UP = 2
"""Steps of each loop after its first one, in which memory and buckets are made."""
EPOCHS = 1_000_000
"""Of the trainer, which is left before."""


class Loops:
    """Both loops on this rank, on the same samples. Methods are collective."""

    def __init__(self, request: LoopRequest) -> None:
        """They have taken one step each."""
        workload, settings = WORKLOADS[request.model], request.settings
        data = workload.make(request.seed)
        trainer = Trainer(
            Task(data=lambda: data), model=workload.model, batch_size=settings.batch_size,
            epochs=EPOCHS, warmup_epochs=0, learning_rate=settings.learning_rate,
            momentum=settings.momentum, weight_decay=settings.weight_decay,
            precision=settings.precision, channels_last=settings.channels_last,
            compile=settings.compile, evaluate_every=EPOCHS, save_every="never", seed=request.seed,
        )  # fmt: skip
        self._device = trainer.session.device
        self._trainer_steps = trainer.steps()
        # First, since it sets cuDNN and malloc for the whole process.
        self.take(TRAINER, 1)
        torch.manual_seed(request.seed)
        model = build(workload.model, data.shape, data.classes)
        assert isinstance(data.train, Split)
        features, labels = (
            torch.from_numpy(each).to(self._device)
            for each in (data.train.features, data.train.labels)
        )
        self._bare_steps = take_steps(model, features, labels, settings)
        self.take(BARE, 1)

    def take(self, name: str, steps: int) -> None:
        if name == BARE:
            for _ in islice(self._bare_steps, steps):
                pass
            return
        # As the trainer's own loop does: mpiddp.training.trainer.train.
        for step in islice(self._trainer_steps, steps):
            step.take()

    def time(self, name: str, steps: int) -> float:
        """Seconds of so many steps."""
        distributed.barrier()
        finish(self._device)
        begin = time.perf_counter()
        self.take(name, steps)
        finish(self._device)
        return time.perf_counter() - begin

    def time_round(self, steps: int, turns: int, seed: int) -> dict[str, float]:
        """Seconds of a step of each loop, over ``turns`` turns of ``steps`` steps."""
        seconds = dict.fromkeys((TRAINER, BARE), 0.0)
        for _, name in take_turns(list(seconds), rounds=turns, seed=seed):
            seconds[name] += self.time(name, steps)
        return {name: each / (turns * steps) for name, each in seconds.items()}

    def share(self, seconds: float) -> float:
        """Rank 0's."""
        held = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        distributed.broadcast(held, 0)
        return held.item()


def measure(loops: Loops, request: LoopRequest) -> dict[str, object]:
    """Seconds of a step, round by round, as JSON can hold it. Collective."""
    usual = loops.share(max(loops.time_round(WARM_UP, 1, request.seed).values()))
    steps = TURN.choose_iterations(usual)
    turns = ROUND.choose_iterations(steps * usual)
    usual = loops.share(sum(loops.time_round(steps, turns, request.seed).values()))
    rounds = max(FEWEST_ROUNDS, int(request.seconds / (steps * turns * usual)))
    found = [loops.time_round(steps, turns, request.seed + number) for number in range(rounds)]
    series = {name: [each[name] for each in found] for name in (TRAINER, BARE)}
    return {"steps": steps, "turns": turns, "series": series}


def main() -> None:
    given, target = sys.argv[1:]
    request = LoopRequest.read(given)
    found = measure(Loops(request), request)
    if distributed.get_rank() == 0:
        Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
