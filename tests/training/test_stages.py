"""Stages of a step are timed, and each moment belongs to one of them."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import trainings
from mpiddp.launch.session import Session
from mpiddp.sync import ddp_hook
from mpiddp.training.data.samples import Batch, Key, Samples
from mpiddp.training.options.groups.straggler import Slowdown
from mpiddp.training.step import stages
from mpiddp.training.step.stages import Costs, GpuStageClock, StageClock, StepStage
from mpiddp.training.trainer import Loop
from pool import Pools


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by 1 whenever it is read."""
    count = itertools.count()
    monkeypatch.setattr(stages.time, "perf_counter", lambda: float(next(count)))


def test_time_belongs_to_the_stage_that_ends(ticks: None) -> None:
    clock = StageClock()
    clock.end(StepStage.READ)
    clock.end(StepStage.FORWARD)
    clock.skip()
    clock.end(StepStage.FORWARD)
    assert clock.costs.seconds == [1, 0, 0, 2, 0, 0, 0]
    clock.move(0.5, StepStage.FORWARD, StepStage.COMMUNICATION)
    assert clock.costs.seconds == [1, 0, 0, 1.5, 0, 0.5, 0]
    # An epoch brings its own sums.
    epoch = Costs(seconds=[10.0] * len(StepStage))
    clock.count_in(epoch)
    clock.end(StepStage.READ)
    assert epoch.seconds == [11, 10, 10, 10, 10, 10, 10]


def test_waiting_for_a_batch_is_split_as_the_work_on_it_was(ticks: None) -> None:
    clock = StageClock()
    # A worker has done more than the rank has waited for.
    clock.end_reading((1.0, 3.0))
    clock.end_reading((0.0, 0.0))
    assert clock.costs.seconds == [1.25, 0.75, 0, 0, 0, 0, 0]
    # The rest was the start of a worker.
    clock.end_reading((0.0, 0.5))
    assert clock.costs.seconds == [1.75, 1.25, 0, 0, 0, 0, 0]
    assert clock.costs.data_seconds == [1, 3.5]


def test_computing_ends_before_what_autograd_does_last(ticks: None) -> None:
    clock = StageClock()
    weights = torch.ones(3, requires_grad=True)
    engine = torch.autograd.Variable._execution_engine

    def wait_as_ddp() -> None:
        assert clock.costs.seconds[StepStage.BACKWARD] == 1
        stages.time.perf_counter()

    # DDP queues its waiting when the last gradient is there.
    weights.register_hook(lambda _: engine.queue_callback(wait_as_ddp))
    loss = weights.sum()
    clock.watch(loss)
    loss.backward()
    clock.end(StepStage.COMMUNICATION)
    assert clock.costs.seconds[StepStage.BACKWARD] == 1
    assert clock.costs.seconds[StepStage.COMMUNICATION] == 2


def test_on_a_gpu_the_time_of_calls_is_that_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host queues all of it at once."""
    stream = SimpleNamespace(queued=0.0, done=0.0)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, _: object) -> None:
            self.at = stream.queued

        def query(self) -> bool:
            return bool(self.at <= stream.done)

        def synchronize(self) -> None:
            stream.done = self.at

        def elapsed_time(self, end: Event) -> float:
            assert end.query()
            return 1000 * float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    clock = GpuStageClock(torch.device("cuda", 0))
    clock.skip()
    stream.queued += 1
    clock.end(StepStage.FORWARD)
    stream.queued += 2
    begin = clock.read()
    stream.queued += 3
    end = clock.read()
    clock.end(StepStage.BACKWARD)
    clock.count_exchange(begin, end, is_waited_for=True)
    assert clock.costs == Costs()
    clock.settle()
    assert clock.costs.seconds == [0, 0, 0, 1, 2, 3, 0]
    assert clock.costs.exchange_seconds == 3
    # Beside the backward pass.
    begin = clock.read()
    stream.queued += 4
    clock.end(StepStage.BACKWARD)
    clock.count_exchange(begin, clock.read())
    stream.queued += 1
    clock.end(StepStage.UPDATE)
    clock.settle()
    assert clock.costs.seconds == [0, 0, 0, 1, 6, 3, 1]
    assert clock.costs.exchange_seconds == 7


@contextlib.contextmanager
def made_up_time(session: Session) -> Iterator[Callable[[float], None]]:
    """A made-up clock: a stage takes 1 ms, communication lasts until all ranks are there. The
    function makes its rank late; by a real clock, any rank could be.
    """
    now, end = 0.0, StageClock.end

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    def end_together(clock: StageClock, stage: StepStage) -> None:
        nonlocal now
        if stage is StepStage.COMMUNICATION:
            now = max(session.gather(now))
        now += 0.001
        end(clock, stage)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(StageClock, "end", end_together))
        # A schedule holds up the backward pass for 1 ms.
        for module, look in ((stages, lambda: now), (ddp_hook, itertools.count(0, 1e-3).__next__)):
            made_up = SimpleNamespace(perf_counter=look)
            stack.enter_context(mock.patch.object(module, "time", made_up))
        yield spend


def train_with_slow_steps(session: Session, *command_lines: list[str]) -> None:
    """The straggler takes 0.1 s, and not a multiple of what a pass took by chance."""
    with made_up_time(session) as spend:

        def wait(slowdown: Slowdown, step: int) -> None:
            spend(0.1 * slowdown.is_slow(step))

        with mock.patch.object(Slowdown, "wait", wait):
            trainings.run(session, *command_lines)


def train_with_slow_reader(session: Session, words: list[str]) -> None:
    """Rank 1 takes long to read each batch."""
    read = Samples.read
    with made_up_time(session) as spend:

        def read_slowly(samples: Samples, key: Key) -> Batch:
            spend(0.1 * session.world.rank)
            return read(samples, key)

        with mock.patch.object(Samples, "read", read_slowly):
            trainings.run(session, words)


def train_with_late_server(session: Session, words: list[str]) -> None:
    """Rank 1, which only serves, comes late to the epoch: the worker has had weights by then."""
    begin = Loop.begin_epoch

    def begin_late(loop: Loop) -> None:
        time.sleep(0.5 * session.world.rank)
        begin(loop)

    with mock.patch.object(Loop, "begin_epoch", begin_late):
        trainings.run(session, words)


# 320 samples for training: 10 steps of two ranks, 20 of one.
TOY = ["--data", "toy", "--samples", "400", "--epochs", "1"]
SYNC = {
    "framework": ["--sync", "framework", "--track-network"],
    "ring": ["--sync", "ring", "--overlap", "off"],
    "overlapped": ["--sync", "ring", "--overlap", "on"], "served": ["--sync", "parameter-server"],
    "apart": ["--sync", "parameter-server", "--server-placement", "dedicated"],
}  # fmt: skip
GRADIENTS = 4 * (10 * 50 + 50 + 50 * 2 + 2)
"""Bytes of the mlp's gradients, for 10 features and 2 classes."""


def read_row(folder: Path, name: str) -> dict[str, Any]:
    return trainings.read_rows(folder / "runs" / name)[-1]


def test_bytes_are_those_of_each_synchronisation(pool: Pools, tmp_path: Path) -> None:
    words = [["--name", name, *TOY, *options] for name, options in SYNC.items()]
    begin = time.perf_counter()
    called = pool("openmpi", 2).call(trainings.run, *words, cwd=tmp_path)
    elapsed = time.perf_counter() - begin
    for name in SYNC:
        row = read_row(tmp_path, name)
        # With two ranks, a ring sends what a server and its worker do: each number once.
        steps = 20 if name == "apart" else 10
        for sent in row["sent_bytes"]:
            # Servers also send signs of life.
            assert steps * GRADIENTS <= sent <= 1.01 * steps * GRADIENTS
            assert sent == steps * GRADIENTS or name in ("served", "apart")
        workers = 1 if name == "apart" else 2
        assert all(each > 0 for each in row["bandwidth"][:workers])
        # Not the row's seconds: they are rank 0's, whose epoch may begin later than rank 1's.
        assert sum(row["stages"].values()) <= elapsed
        assert row["data_seconds"].keys() == {"read", "transform"}
        assert 0 < row["data_seconds"]["read"] < elapsed
        assert row["stages"]["communication"] > 0
        assert (row["stages"]["update"] == 0) == (name in ("served", "apart"))
        assert 2e7 < row["host_memory"] < 1e11
    (node,) = read_row(tmp_path, "framework")["network"]
    # Two ranks on one node: all goes over loopback, in frames with headers.
    assert node["host"] == socket.gethostname()
    assert 20 * GRADIENTS == node["counted_bytes"] <= node["interfaces"]["lo"]["sent_bytes"]
    assert re.search(rf"Network of {node['host']}: 0\.\d MB counted; .*lo sent", called.printed)
    assert called.printed.count("Network of") == 1


def test_weights_that_leave_before_the_servers_rank_comes_are_counted(pool, tmp_path):
    words = ["--name", "late", *TOY, *SYNC["apart"]]
    pool("openmpi", 2).call(train_with_late_server, words, cwd=tmp_path)
    assert min(read_row(tmp_path, "late")["sent_bytes"]) >= 20 * GRADIENTS


def test_the_rank_that_the_others_wait_for_is_named(pool: Pools, tmp_path: Path) -> None:
    ranks = pool("openmpi", 2)
    slow = ["--straggler", "1=2", "--log-every", "5"]
    words = [["--name", name, *TOY, *slow, *SYNC[name]] for name in ("framework", "ring")]
    called = ranks.call(train_with_slow_steps, *words, cwd=tmp_path)
    found = re.findall(
        r"Straggler: rank (\d+) on (\S+) takes \S+ times .* others, (\w+) ", called.printed
    )
    assert found == [("1", socket.gethostname(), "computing")] * 2, called.printed
    for name in ("framework", "ring"):
        stages_ = read_row(tmp_path, name)["stages"]
        # The mean of one rank that is slow, and one that waits meanwhile.
        assert stages_["communication"] == pytest.approx(stages_["forward"], rel=0.1)
    losses = check_logs(tmp_path / "runs" / "ring" / "logs", called.printed)
    *steps, epoch = trainings.read_rows(tmp_path / "runs" / "ring")
    assert [(row["kind"], row["step"], row["epochs"]) for row in steps] == [
        ("steps", 5, 0.5),
        ("steps", 10, 1.0),
    ]
    assert [f"{row['loss']:.6f}" for row in steps] == losses
    assert steps[1]["learning_rate"] == epoch["learning_rate"] < steps[0]["learning_rate"]
    assert 0 <= steps[0]["accuracy"] <= 1
    called = ranks.call(train_with_slow_reader, ["--name", "reader", *TOY], cwd=tmp_path)
    (found,) = re.findall(r"Straggler: rank (\d+) .* others, (\w+) (\S+) ms", called.printed)
    assert found[:2] == ("1", "reading")
    assert float(found[2]) >= 100


def check_logs(folder: Path, printed: str) -> list[str]:
    """Each rank's log has a line for every fifth step, which rank 0 also prints.

    Returns rank 0's losses.
    """
    losses = {}
    for rank in (0, 1):
        text = (folder / f"rank-{rank}.log").read_text()
        assert f" Local Rank: {rank}, Epoch: 1, Training ...\n" in text
        assert re.search(r" 10 steps: read \S+ s, .* MB sent at \S+ MB/s; \d+ MB of memory\n", text)
        losses[rank] = re.findall(r" (Epoch: 1, batch (\d+), loss \d+\.\d{6})\n", text)
        assert [batch for _, batch in losses[rank]] == ["5", "10"]
    assert losses[0] != losses[1]
    assert all(line in printed for line, _ in losses[0])
    return [line.split()[-1] for line, _ in losses[0]]
