"""One job that takes steps and makes checkpoints in turns, and what its ranks report."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.measure.launching import launchers, processes
from benchmarks.measure.trials import Rounds
from benchmarks.records.options import Count, Ranks, Seconds
from benchmarks.records.statistics import Summary, summarize
from mpiddp.errors import MpiddpError
from mpiddp.options.fields import Argument

WORKER = "benchmarks.measure.checkpoint.worker"
WARM_UP = 1
"""Rounds that do not count: the first save makes the copies' memory."""


@dataclass(frozen=True, kw_only=True)
class Plan(Rounds):
    """What is measured."""

    ranks: Ranks = (2,)
    """Numbers of ranks."""
    model: Annotated[str, Argument("MODEL")] = "resnet18"
    """convnet, resnet18, mlp or mlp:megabytes=M."""
    batch_size: Count = 64
    """Samples per rank and step."""
    save_every: Count = 50
    """Steps between two checkpoints."""
    steps: Count = 2
    """Steps without a checkpoint in a round."""
    directory: Annotated[Path | None, Argument("DIR")] = None
    """On the disk to be measured (default: the directory for temporary files)."""
    repetitions: Count = 5
    deadline: Seconds = 1800.0


@dataclass(frozen=True)
class Round:
    """Seconds, each of the slowest rank."""

    step: float
    """The median of the round's steps without a checkpoint."""
    synchronous: float
    """From the call to the disk; training stands still."""
    stall: float
    """Of a checkpoint beside training: until the call returns."""
    beside: float
    """Of the steps that were taken while it was written."""
    beside_steps: int
    raw: float
    """Writing the checkpoint's bytes, one file per rank, and flushing them."""
    digest: float
    """Of the same bytes, in memory."""

    @property
    def slowdown(self) -> float:
        """Seconds that the steps beside the write took longer; noise may make it negative."""
        return self.beside - self.beside_steps * self.step

    @property
    def asynchronous(self) -> float:
        return self.stall + self.slowdown


@dataclass(frozen=True)
class Agreement:
    """What it costs that a signal may come."""

    look: float
    """Seconds of a rank's look after a step."""
    thread: float
    """Processor seconds of its thread, in a second."""


@dataclass(frozen=True)
class Measurement:
    """What the job reported."""

    ranks: int
    device: str
    state_bytes: int
    """Of model and optimizer."""
    copies_bytes: int
    """Of the copies from which checkpoints are written, on all ranks."""
    grown_bytes: int
    """By which the ranks' memory grew with the first checkpoint beside training."""
    file_bytes: int
    """Of a checkpoint's files."""
    agreement: Agreement
    rounds: tuple[Round, ...]

    def summarize(self, name: str) -> Summary:
        """Of a field or property of the rounds."""
        return summarize([getattr(each, name) for each in self.rounds])

    def find_share(self, name: str, save_every: int) -> float:
        """Such a cost by the time of the steps between two checkpoints; medians of rounds.

        The cost's median, not each round's quotient: the noise of a step is not its checkpoint's.
        """
        return self.summarize(name).median / (save_every * self.summarize("step").median)

    @property
    def over_raw(self) -> Ratio:
        """A synchronous save by the raw write, round by round."""
        raw, saves, digests = (
            [getattr(each, name) for each in self.rounds]
            for name in ("raw", "synchronous", "digest")
        )
        return compare_rounds(raw, saves, find_common([[raw, saves, digests]]))

    @property
    def agreement_share(self) -> float:
        """Of a step."""
        return self.agreement.look / self.summarize("step").median + self.agreement.thread


def read_measurement(text: str) -> Measurement:
    found = json.loads(text)
    rounds = tuple(Round(**each) for each in found.pop("rounds"))
    return Measurement(**{**found, "agreement": Agreement(**found["agreement"])}, rounds=rounds)


def measure(plan: Plan, ranks: int, launcher: launchers.Mpirun) -> Measurement:
    """Run the job. Raises RunError with its output if it fails."""
    try:
        with tempfile.TemporaryDirectory(prefix="mpiddp-bench-", dir=plan.directory) as name:
            # Ranks run in another directory.
            folder = Path(name).resolve()
            told = json.dumps({**asdict(plan), "directory": str(folder)})
            words = [sys.executable, "-m", WORKER, told]
            processes.run(processes.make_program(launcher, ranks, words), plan.deadline)
            return read_measurement((folder / "report.json").read_text())
    except OSError as error:
        raise MpiddpError(f"--directory {plan.directory}: {error.strerror}") from None
