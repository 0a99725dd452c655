"""What a run tells while it trains: the console, ``metrics.jsonl``, and a log of each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mpiddp.files import explain_unwritable
from mpiddp.launch.session import Session
from mpiddp.process.outcome import find_log
from mpiddp.process.streams.output import parse_ranks
from mpiddp.sync.parameter_server.serving import describe_roles
from mpiddp.training.data.reading import BatchReader
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.checkpoints import describe_interval
from mpiddp.training.options.groups.straggler import describe_straggler, parse_straggler
from mpiddp.training.options.groups.synchronisation import FRAMEWORK
from mpiddp.training.preparation import Training
from mpiddp.training.rank_costs import RankCosts, describe_slow_rank
from mpiddp.training.records.history import METRICS
from mpiddp.training.records.metrics import Row, StepsRow, Totals, describe_epoch, describe_start
from mpiddp.training.records.metrics_file import MetricsFile
from mpiddp.training.records.network import describe
from mpiddp.training.records.trackers import Run, Tracker
from mpiddp.training.resuming import name_values
from mpiddp.training.run_state import RunState
from mpiddp.training.step.learning_rate import describe_scaling
from mpiddp.training.wrapping import overlap
from mpiddp.training.wrapping.shared_model import find_bound
from mpiddp.wording import count_noun, print_message, print_text


class RankLog:
    """Appends lines. Reports of failures come into the same file (`mpiddp.process.outcome`)."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        """``warn``: called once if the file cannot be written; its lines are lost then."""
        self._path, self._warn = path, warn
        self._is_good = True

    def write(self, text: str) -> None:
        if not self._is_good:
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(timespec='milliseconds')} {text}\n")
        except OSError as error:
            self._is_good = False
            reason = explain_unwritable(error, self._path)
            self._warn(f"{self._path} could not be written: {reason}")


if TYPE_CHECKING:
    from mpiddp.training.records.profiling import StepProfiler


def say(session: Session, *lines: str) -> None:
    """Print on rank 0."""
    if session.world.rank == 0:
        for line in lines:
            print_text(line)


def warn(session: Session, text: str) -> None:
    """Print what this rank alone knows, with its rank and host."""
    world = session.world
    where = f"rank {world.rank} of {world.size} on {world.hostname}: " if world.size > 1 else ""
    print_message(f"{where}{text}")


def report_left_out(reader: BatchReader, session: Session, what: str) -> None:
    """Say which samples could not be read, and of what they were left out."""
    for error in reader.left_out:
        warn(session, f"{error}; left out of {what}")
    reader.left_out.clear()


def describe_training(training: Training) -> list[str]:
    """The console's first lines. Collective."""
    session, world = training.session, training.session.world
    configuration = training.configuration
    counts = torch.zeros(world.node_count, dtype=torch.int64, device=session.device)
    counts[world.node_rank] = 1
    dist.all_reduce(counts)
    lines = describe_start(
        session.device.type,
        counts.tolist(),
        world.master_hostname,
        configuration.batch_size,
        len(training.workers),
    )
    lines.append(describe_interval(configuration.save_every))
    lines += training.notes
    if training.engine.about:
        lines.append(training.engine.about)
    if configuration.base_batch is not None:
        batch = configuration.batch_size * len(training.workers)
        lines.append(describe_scaling(configuration, batch))
    if configuration.straggler is not None:
        lines.append(describe_straggler(parse_straggler(configuration.straggler)))
    if training.roles is not None:
        bound = find_bound(configuration)
        lines.append(f"Weights: {describe_roles(training.roles, bound)}")
    elif (every := configuration.average_every) is not None:
        how = f"averaged by {configuration.sync} every {count_noun(every, 'step')}"
        lines.append(f"Weights: each rank's own, {how}")
    elif configuration.sync != FRAMEWORK:
        lines.append(_describe_synchronization(configuration, training.pace))
    return lines


def _describe_synchronization(configuration: Configuration, pace: overlap.Pace | None) -> str:
    parts = [f"Gradients: {configuration.sync} over transport {configuration.transport}"]
    if configuration.wire_dtype != "auto":
        parts.append(f"in {configuration.wire_dtype}")
    how = "during" if configuration.overlap == "on" else "after"
    parts.append(f"{how} the backward pass of their bucket")
    if pace is not None:
        parts.append(f"({overlap.describe(pace)})")
    return " ".join(parts)


class Reports:
    """Of one rank."""

    def __init__(self, training: Training, state: RunState) -> None:
        """``state``: after the steps that an earlier attempt took."""
        self._training, self._session, self._state = training, training.session, state
        session, configuration = training.session, training.configuration
        directory, step = state.directory, state.position.step
        self._log_every = configuration.log_every
        self.follows_steps = bool(self._log_every)
        """Whether anything may be due after a step."""
        world = session.world
        path = find_log(directory, world.rank)
        assert path is not None
        self._log = RankLog(path, lambda text: warn(session, text))
        self._file = MetricsFile(directory / METRICS, step) if world.rank == 0 else None
        self._tracker: Tracker | None = None
        if world.rank == 0 and configuration.track is not None:
            run = Run(directory, name_values(configuration), step)
            self._tracker = Tracker(configuration.track, run, lambda text: warn(session, text))
        self._profiler: StepProfiler | None = None
        if any(world.rank in ranks for ranks in parse_ranks(configuration.profile)):
            from mpiddp.training.records.profiling import FOLDER, StepProfiler

            self.follows_steps = True
            path = directory / FOLDER / f"rank-{world.rank}.json"
            self._profiler = StepProfiler(path, session.device, lambda text: warn(session, text))
        self._before = torch.empty(0)
        """The sums when the last line was written."""

    def begin_epoch(self, totals: Totals) -> None:
        local_rank, epoch = self._session.world.local_rank, self._state.position.epoch
        self._log.write(f"Local Rank: {local_rank}, Epoch: {epoch}, Training ...")
        if self._log_every:
            self._before = totals.sums

    def after_step(self, batch: int, totals: Totals) -> None:
        """``batch``: of the epoch, counted from 1. Every so many, waits for a GPU."""
        if self._profiler is not None:
            self._profiler.step()
        if not self._log_every or batch % self._log_every:
            return
        sums = totals.sums
        loss, samples, _, *values = (sums - self._before).tolist()
        self._before = sums
        epoch = self._state.position.epoch
        line = f"Epoch: {epoch}, batch {batch}, loss {loss / max(samples, 1):.6f}"
        self._log.write(line)
        if self._session.world.rank > 0:
            return
        if samples:
            self._record(loss / samples, [each / samples for each in values])
        if sys.stderr.isatty():
            from tqdm import tqdm

            with tqdm.external_write_mode():  # Above the bar.
                print_text(line)
        else:
            print_text(line)

    def _record(self, loss: float, means: Sequence[float]) -> None:
        """Write a row of steps; ``means``: of the task's metrics."""
        training, batches = self._training, self._training.batches
        position = self._state.position
        taken = training.find_rate_step(position.epoch, position.samples)
        row = StepsRow(
            attempt=self._state.attempt,
            epoch=position.epoch,
            step=position.step,
            epochs=taken / batches.count(),
            loss=loss,
            metrics=dict(zip(training.task.metrics, means, strict=True)),
            learning_rate=training.rate(taken - 1),
        )
        if self._file is not None:
            self._file.append(row)  # An error is reported at the end of the epoch.
        if self._tracker is not None:
            self._tracker.log(row)

    def flush(self) -> None:
        """Write the rows of steps so far: a run that is resumed here does not write them again."""
        if self._file is not None:
            self._file.write()

    def end_epoch(self, row: Row, found: Sequence[RankCosts]) -> None:
        """``found``: what the epoch took on each rank."""
        world = self._session.world
        lines = [describe_epoch(row)]
        if slow := describe_slow_rank(found):
            lines.append(slow)
        lines += [describe(node) for node in row.network or () if node["host"] == world.hostname]
        for line in (*lines, found[world.rank].describe()):
            self._log.write(line)
        if self._file is not None and (problem := self._file.append(row)):
            warn(self._session, problem)
        if self._tracker is not None:
            self._tracker.log(row)
        say(self._session, *lines)

    def close(self, *, is_done: bool) -> None:
        """``is_done``: whether the training was finished."""
        if self._profiler is not None:
            self._profiler.close()
        if self._file is not None and (problem := self._file.write()):
            warn(self._session, problem)
        if self._tracker is not None:
            self._tracker.close(is_done=is_done)
