"""What runs in the ranks of ``python -m benchmarks checkpoint``."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import distributed, nn

import mpiddp
from benchmarks.measure.baselines import ddp_step, raw_write
from benchmarks.measure.checkpoint.contenders import WARM_UP, CheckpointPlan
from benchmarks.records.workloads import build, draw_batch, parse_workload
from mpiddp.checkpoints.packing import pack
from mpiddp.checkpoints.storage.directory import CheckpointDirectory, CheckpointSource
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.process.background import finish_lasting_calls
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.process.step_agreement import AgreeingRanks, StepAgreement

LOOKS = 10_000
WATCH_SECONDS = 3.0
"""For which the thread that listens to signals is measured."""


class CheckpointedTraining:
    """A model that is trained on one batch, over and over."""

    def __init__(self, plan: CheckpointPlan, session: mpiddp.Session) -> None:
        """Collective."""
        workload = parse_workload(plan.model)
        self.device = session.device
        features, labels = draw_batch(workload, plan.batch_size, plan.seed, session.world.rank)
        self._features, self._labels = features.to(self.device), labels.to(self.device)
        self.model = ddp_step.wrap(build(workload, plan.seed), self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def take_step(self) -> None:
        self.optimizer.zero_grad()
        outputs = self.model(self._features)
        torch.autograd.backward(nn.functional.cross_entropy(outputs, self._labels))
        self.optimizer.step()

    def time_step(self) -> float:
        begin = time.perf_counter()
        self.take_step()
        ddp_step.finish(self.device)
        return time.perf_counter() - begin

    def name_state(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint."""
        parts = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {
            f"{part}.{name}": tensor
            for part, state in parts.items()
            for name, tensor in pack(state).items()
        }


class CheckpointBench:
    """Measures one rank's part of the rounds."""

    def __init__(
        self, plan: CheckpointPlan, training: CheckpointedTraining, ranks: RankGroup
    ) -> None:
        """Collective."""
        assert plan.directory is not None
        self._plan, self._training, self._ranks = plan, training, ranks
        self._folder = plan.directory
        self._saves = CheckpointDirectory(
            plan.directory / "checkpoints", ranks, CheckpointSource(), keep=1
        )
        self._saves.open()
        self._number = 0
        self._content = memoryview(b"")
        """This rank's part of the bytes of a checkpoint's files."""

    def _begin_save(self, *, is_copied: bool) -> None:
        self._number += 1
        state = self._training.name_state()
        self._saves.start(self._number, state, is_copied=is_copied)

    def _meet(self) -> None:
        finish_lasting_calls("the next part begins")  # An older checkpoint is removed.
        self._ranks.gather(None)

    def time_steps(self) -> float:
        self._meet()
        return statistics.median(self._training.time_step() for _ in range(self._plan.steps))

    def time_synchronous(self) -> float:
        self._meet()
        begin = time.perf_counter()
        self._begin_save(is_copied=False)
        self._saves.wait()
        return time.perf_counter() - begin

    def time_asynchronous(self) -> tuple[float, float, int]:
        """Seconds of the call and of the steps until the checkpoint is written; these steps."""
        self._meet()
        begin = time.perf_counter()
        self._begin_save(is_copied=True)
        stall, seconds, steps = time.perf_counter() - begin, 0.0, 0
        while self._is_any_busy():
            seconds += self._training.time_step()
            steps += 1
        self._saves.wait()
        return stall, seconds, steps

    def _is_any_busy(self) -> bool:
        """Over the default group: the thread that writes uses the other one meanwhile."""
        flag = torch.tensor(float(self._saves.is_busy), device=self._training.device)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        return bool(flag)

    def time_raw(self) -> tuple[float, float]:
        """Of this rank's part of the bytes: written to the disk, and digested."""
        path = self._folder / f"raw-{self._ranks.rank}"
        self._meet()
        write = raw_write.time_write(path, self._content)
        self._meet()
        return write, raw_write.time_digest(self._content)

    def run(self) -> dict[str, list[float]]:
        """Each cost, round by round; a round has the parts in random order.

        Every rank gets all values.
        """
        self.time_synchronous()
        size = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        share = np.random.default_rng(self._plan.seed).bytes(-(-size // self._ranks.size))
        self._content = memoryview(share)
        generator = random.Random(self._plan.seed)
        parts: dict[str, Callable[[], Any]] = {
            "step": self.time_steps,
            "synchronous": self.time_synchronous,
            "asynchronous": self.time_asynchronous,
            "raw": self.time_raw,
        }
        rounds = []
        for _ in range(WARM_UP + self._plan.repetitions):
            found = {name: parts[name]() for name in generator.sample(list(parts), len(parts))}
            rounds.append(self._merge(found))
        return {name: [each[name] for each in rounds[WARM_UP:]] for name in rounds[0]}

    def _merge(self, found: dict[str, Any]) -> dict[str, float]:
        """Of the slowest rank each."""
        stall, beside, steps = found["asynchronous"]
        raw, digest = found["raw"]
        mine = [found["step"], found["synchronous"], stall, beside, raw, digest]
        most = [max(values) for values in zip(*self._ranks.gather(mine), strict=True)]
        return name_costs(*most, beside_steps=steps)


def name_costs(
    step: float,
    synchronous: float,
    stall: float,
    beside: float,
    raw: float,
    digest: float,
    *,
    beside_steps: int,
) -> dict[str, float]:
    """Of a round, in seconds.

    Args:
        step: the median of the steps without a checkpoint.
        synchronous: from the call to the disk; training stands still.
        stall: of a checkpoint beside training, until the call returns.
        beside: of the ``beside_steps`` that were taken while it was written. What they took longer
            is its slowdown; noise may make it negative.
        raw: writing the checkpoint's bytes, one file per rank, and flushing them.
        digest: of the same bytes, in memory.
    """  # fmt: skip
    slowdown = beside - beside_steps * step
    return {
        "step": step, "synchronous": synchronous, "asynchronous": stall + slowdown,
        "stall": stall, "slowdown": slowdown, "raw": raw, "digest": digest,
    }  # fmt: skip


def measure_agreement(session: mpiddp.Session) -> tuple[float, float]:
    """What it costs a rank that a signal may come.

    Seconds of a look after a step, and processor seconds of the thread behind it, in a second.
    """
    world = session.world
    members = AgreeingRanks(world.rank, world.size, session.store, session.timeout)
    agreement = StepAgreement(members, signals=PreemptionSignals())
    begin = time.perf_counter()
    for _ in range(LOOKS):
        agreement.is_preempted()
    look = (time.perf_counter() - begin) / LOOKS
    before = time.process_time()
    time.sleep(WATCH_SECONDS)
    watched = time.process_time() - before
    agreement.close()
    before = time.process_time()
    time.sleep(WATCH_SECONDS)
    idle = time.process_time() - before
    return look, max(0.0, watched - idle) / WATCH_SECONDS


def find_memory() -> int:
    return int(psutil.Process().memory_info().rss)


def run(plan: CheckpointPlan, session: mpiddp.Session) -> dict[str, Any]:
    """The arguments of ``contenders.make_section``, as JSON can hold them. Collective."""
    training = CheckpointedTraining(plan, session)
    ranks = RankGroup()
    training.take_step()
    training.take_step()
    before = find_memory()
    bench = CheckpointBench(plan, training, ranks)
    bench.time_asynchronous()
    grown = find_memory() - before
    series = bench.run()
    answers = ranks.gather((grown, *measure_agreement(session)))
    state = sum(each.nbytes for each in training.name_state().values())
    files = (plan.directory or Path()) / "checkpoints"
    file_bytes = sum(each.stat().st_size for each in files.rglob("*") if each.is_file())
    ranks.close()
    grown_bytes, looks, threads = zip(*answers, strict=True)
    facts = {
        "device": session.device.type,
        # Of model and optimizer; of the copies that checkpoints are written from, on all ranks; by
        # which all ranks' memory grew with the first checkpoint beside training; of a checkpoint.
        "state_bytes": state,
        "copies_bytes": state * session.world.size,
        "grown_bytes": sum(grown_bytes),
        "file_bytes": file_bytes,
        "agreement": {"look": max(looks), "thread": max(threads)},
    }
    return {"series": series, "facts": facts}


def main() -> None:
    told, target = sys.argv[1:]
    given = json.loads(told)
    plan = CheckpointPlan(**{**given, "directory": Path(given["directory"])})
    with mpiddp.init() as session:
        found = run(plan, session)
        if session.world.rank == 0:
            Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
