"""Signals that preempt a job: all ranks stop after the same step, and lose nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from test_resuming import SMALL, WAYS, read_rows

import interrupted
import launchers
import preempted
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.failure.outcome import read_outcome
from mpiddp.launch.preemption_signals import parse_signals
from mpiddp.training import preemption
from mpiddp.training.config import Configuration
from mpiddp.training.data import load
from mpiddp.training.preemption import Peers, Preemption
from pool import Pools

OPENMPI = launchers.table()["openmpi"]


# The agreement, with ranks as threads


def pass_places(
    place: Preemption, barrier: threading.Barrier | None, places: int, dice: random.Random
) -> int | None:
    """Pass places, in step with the others if there is a barrier; the place in which to stop."""
    for number in range(1, places + 1):
        if barrier is not None:
            barrier.wait()
        time.sleep(dice.choice([0, 0, 0, 0.0005]))
        if place.is_due():
            return number
    return None


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_stop_in_the_same_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(preemption, "PERIOD", 0.002)
    size, places = dice.randint(2, 5), 400
    # Ranks that wait for each other, as in a training; and ranks that do not.
    barrier = threading.Barrier(size) if seed % 2 else None
    store = dist.HashStore()
    signals = [SimpleNamespace(received=None, is_heeded=False) for _ in range(size)]
    ranks = [Preemption(each, Peers(rank, size, store)) for rank, each in enumerate(signals)]
    found: list[int | None] = [None] * size

    def run(rank: int) -> None:
        found[rank] = pass_places(ranks[rank], barrier, places, random.Random(f"{seed} {rank}"))
        ranks[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for rank in dice.sample(range(size), dice.randint(1, size)):
        time.sleep(dice.choice([0, 0.01]))
        signals[rank].received = signal.SIGUSR2
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    # All in the same place; or nobody, where some had passed their last one.
    assert len(set(found)) == 1
    if barrier is not None:
        assert found[0] is not None


def test_nobody_stops_without_a_signal_and_nobody_waits_for_one_that_has_left() -> None:
    store = dist.HashStore()
    signals = [SimpleNamespace(received=None, is_heeded=False) for _ in range(2)]
    ranks = [Preemption(each, Peers(rank, 2, store)) for rank, each in enumerate(signals)]
    assert [rank.is_due() for rank in ranks] == [False, False]
    ranks[0].close()
    signals[1].received = signal.SIGUSR2
    time.sleep(2 * preemption.PERIOD)
    assert not ranks[1].is_due()
    ranks[1].close()


def test_a_rank_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "PERIOD", 0.01)
    signals = SimpleNamespace(received=signal.SIGTERM, is_heeded=False)
    rank = Preemption(signals, Peers(0, 2, dist.HashStore(), timeout=0.2))
    time.sleep(0.3)
    with pytest.raises(PeerLostError, match=r"SIGTERM reached rank 0, and within 0.2 s not all"):
        rank.is_due()
    rank.close()


@pytest.mark.parametrize("is_called", [True, False])
def test_a_rank_that_stops_heeds_signals_to_its_end(is_called: bool) -> None:
    signals = SimpleNamespace(received=signal.SIGUSR1 if is_called else None, is_heeded=False)
    rank = Preemption(signals, Peers())
    assert rank.is_due() is is_called
    assert signals.is_heeded
    # Its checkpoint is written now, and TERM must not end it.
    rank.close()
    assert signals.is_heeded is is_called


def test_signals_that_come_at_the_very_end_have_no_effect() -> None:
    text = (
        "import os, signal, sys\n"
        "from mpiddp.launch.preemption_signals import PreemptionSignals, parse_signals\n"
        "signals = PreemptionSignals()\n"
        "signals.listen(parse_signals('USR2,TERM'))\n"
        "if sys.argv[1] == 'ignored':\n"
        "    signals.ignore()\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, process=os.getpid()):\n"
        "        kill(process, 15)\n"
        # The interpreter clears modules after it has given its handlers back.
        "sys.late = Late()\n"
        "sys.exit(75)\n"
    )
    for word, code in (("ignored", 75), ("not ignored", -signal.SIGTERM)):
        done = subprocess.run([sys.executable, "-c", text, word], timeout=60)
        assert done.returncode == code


def test_one_rank_stops_in_its_next_place() -> None:
    signals = SimpleNamespace(received=None, is_heeded=False)
    rank = Preemption(signals, Peers())
    assert not rank.is_due()
    signals.received = signal.SIGUSR1
    assert rank.is_due()
    assert rank.reason == "SIGUSR1 reached it"


# Signals of one process

PROGRAM = """
import os, signal, subprocess, sys, threading, time
from mpiddp.launch.preemption_signals import PreemptionSignals, parse_signals
numbers, when = sys.argv[1:]
if when == "late":
    # A thread that was there before does not block them.
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
signals = PreemptionSignals()
if when == "early":
    os.kill(os.getpid(), signal.SIGUSR2)
signals.listen(parse_signals(numbers))
os.kill(os.getpid(), signal.SIGUSR2)
def wait():
    for _ in range(500):
        if signals.received is not None:
            return signals.received.name
        time.sleep(0.01)
print(wait(), flush=True)
os.kill(os.getpid(), signal.SIGUSR2)
child = os.fork()
if child == 0:
    time.sleep(100)
program = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
time.sleep(0.3)
for process in (child, program.pid):
    os.kill(process, signal.SIGUSR2)
    time.sleep(0.3)
    os.kill(process, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.3)
print(signals.received.name, flush=True)
"""


def run_program(numbers: str, when: str = "early") -> tuple[list[str], int]:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, numbers, when],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return answer.stdout.splitlines(), answer.returncode


@pytest.mark.parametrize("when", ["early", "late"])
def test_signals_are_noted_and_children_are_spared(when: str) -> None:
    # Signals that come early, twice, and to children.
    assert run_program("USR2,USR1", when) == (["SIGUSR2", "-15", "-15", "SIGUSR2"], 0)


def test_other_signals_have_their_usual_effect() -> None:
    assert run_program("USR2") == (["SIGUSR2", "-15", "-15"], -signal.SIGUSR1)
    assert run_program("TERM") == ([], -signal.SIGUSR2)


@pytest.mark.parametrize("text", ["", "HUP", "USR2,", "SIGUSR2", "USR2, TERM"])
def test_only_these_signals_can_be_chosen(text: str) -> None:
    with pytest.raises(ConfigurationError, match="preempt_signal: expected names out of USR2,"):
        parse_signals(text)


# Trainings


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "way",
    ["framework", *(pytest.param(way, marks=pytest.mark.long) for way in ("ring", "served"))],
)
def test_a_preempted_run_ends_as_the_uninterrupted_one(
    way: str, pool: Pools, tmp_path: Path
) -> None:
    words, ranks = [*SMALL, *WAYS[way], "--save-every", "never"], pool("openmpi", 3)
    ranks.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    # The rank and its step. Others may be a step ahead, so all stop one or two steps later.
    steps = [(0, 1), (2, 4), (1, 8)]
    called = ranks.call(preempted.run, [*words, "--name", "cut"], steps, cwd=tmp_path)
    assert len({tuple(left) for left in called.values}) == 1
    for left, (_, step) in zip(called.values[0], steps, strict=True):
        assert step < left <= step + 2
    assert called.printed.count("Checkpoint written") == len(steps)
    names = sorted(path.name for path in (tmp_path / "runs/cut/checkpoints").iterdir())
    assert names == sorted(f"step-{left}" for left in called.values[0][-2:])
    assert read_rows(tmp_path / "runs/cut") == read_rows(tmp_path / "runs/whole")


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize("bound", [2, pytest.param(0, marks=pytest.mark.long)])
def test_workers_and_a_dedicated_server_stop_within_an_epoch(
    bound: int, pool: Pools, tmp_path: Path
) -> None:
    # Eight steps in each of two epochs.
    words = [*SMALL, "--sync", "parameter-server", "--server-placement", "dedicated"]
    words += ["--staleness", str(bound), "--save-every", "never", "--name", "run"]
    steps = [(0, 1), (1, 9)]
    called = pool("openmpi", 3).call(preempted.run, words, steps, cwd=tmp_path)
    assert len({tuple(left) for left in called.values}) == 1
    for left, (_, step) in zip(called.values[0], steps, strict=True):
        # A worker that is not waited for may be ahead.
        assert step < left <= step + 2 + bound + (bound > 0)
    rows = read_rows(tmp_path / "runs/run")
    assert [row["step"] for row in rows] == [8, 16]
    # One gradient of each worker in each step, over all attempts.
    assert sum(rows[-1]["staleness"].values()) == 2 * 16


# 128 samples for training: 32 batches in each of two epochs.
SHARED = (
    "--data", "synthetic", "--samples", "160", "--epochs", "2", "--batch-size", "4",
    "--sync", "parameter-server", "--staleness", "unlimited", "--keep", "50",
)  # fmt: skip
PLACEMENTS = {
    "colocated": ("--servers", "2"),
    "dedicated": ("--server-placement", "dedicated"),
}


@dataclass
class SharedTraining:
    """Attempts of one training, one after the other; `preempted.run_shared` is one of a rank."""

    pool: Pools
    folder: Path
    words: list[str]
    attempts: list[list[preempted.SharedRun]] = field(default_factory=list)

    def run(self, ranks: int, call: tuple[list[int], int] | None, *more: Any) -> str:
        """Where the attempt before has left, this one begins. Returns what was printed."""
        called = self.pool("openmpi", ranks).call(
            preempted.run_shared, self.words, call, *more, cwd=self.folder
        )
        assert len({(each.left, *each.weights) for each in called.values}) == 1
        if self.attempts:
            assert self.attempts[-1][0].weights[-1] == called.values[0].weights[0]
        self.attempts.append(called.values)
        return called.printed

    def count_samples(self) -> Counter[bytes]:
        return Counter(
            each for attempt in self.attempts for rank in attempt for each in rank.samples
        )

    def check_end(self, name: str, servers: int) -> None:
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        # Of samples, losses are counted as often as servers have counted gradients.
        for row in rows:
            assert round(row["samples_per_second"] * row["seconds"]) == 128
        assert sum(rows[-1]["staleness"].values()) == servers * 2 * 32


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_workers_that_share_out_batches_stop_within_an_epoch(
    placement: str, pool: Pools, tmp_path: Path
) -> None:
    words = [*SHARED, *PLACEMENTS[placement]]
    training = SharedTraining(pool, tmp_path, [*words, "--save-every", "never", "--name", "run"])
    # The signal reaches all ranks, or the last one before its first step.
    training.run(3, ([0, 1, 2], 2))
    first = training.count_samples().total()
    training.run(2, ([1], 0))
    assert 0 < first < training.count_samples().total() < 128
    data = load(Configuration(data="synthetic", samples=160)).train
    samples = Counter(hashlib.sha256(each.tobytes()).digest() for each in data.features)
    if placement == "dedicated":
        # Or the only worker after the epoch's last step.
        left = 128 - training.count_samples().total()
        training.run(2, ([0], left // 4))
        assert training.count_samples() == samples
    assert all(each[0].left is not None for each in training.attempts)
    # Checkpoints within the epoch: every five steps, or with an interval of no time after each.
    period = 1 if placement == "dedicated" else 5
    training.words = [*words, "--save-every", "5steps", "--name", "run"]
    printed = training.run(3, None, 0.0 if period == 1 else None)
    assert training.count_samples() == samples + samples
    servers = 1 if placement == "dedicated" else 2
    training.check_end("run", servers)
    saved = [int(step) for step in re.findall(r"Checkpoint written: \S+/step-(\d+) ", printed)]
    begun, end = training.attempts[-2][0].left, saved[-1]
    assert begun is not None
    assert saved == [
        step for step in range(begun + 1, end + 1) if step % period == 0 or step == end
    ]
    # No worker has gone on while the last rank, a server's, was slow to save.
    step = next(step for step in preempted.SLOW_STEPS if begun < step < end)
    other = [*words, "--resume", f"runs/run/checkpoints/step-{step}", "--name", "other"]
    training = SharedTraining(pool, tmp_path, other)
    training.run(3, None)
    assert 0 < training.count_samples().total() < 128
    training.check_end("other", servers)


TRAINING = ("--data", "toy", "--samples", "2000", "--batch-size", "8", "--epochs", "20")


def send(job: Any, when: str, number: signal.Signals) -> None:
    if when == "early":
        job.until(lambda: len(job.ranks()) == 2, "the ranks to be started")
    else:
        job.until(lambda: "Epoch 3" in job.stdout(), "the third epoch")
    ranks = job.ranks()
    if when in ("one", "early"):
        os.kill(ranks[1], number)
        return
    for rank in sorted(ranks, reverse=True):
        os.kill(ranks[rank], number)
        if when == "twice":
            os.kill(ranks[rank], number)
        time.sleep(0.3 if when == "spread" else 0)


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("when", "name"),
    [
        ("one", "USR2"),
        *(
            pytest.param(when, name, marks=pytest.mark.long)
            for when, name in (
                ("all", "TERM"), ("spread", "USR1"), ("twice", "USR2"), ("early", "USR2"),
            )
        ),
    ],
)  # fmt: skip
def test_a_job_makes_way_and_goes_on(when: str, name: str, tmp_path: Path) -> None:
    words = ["-m", "mpiddp.train", *TRAINING, "--name", "run"]
    arguments: dict[str, Any] = {"timeout": 90, "cwd": tmp_path, "env": {"OMP_NUM_THREADS": "1"}}
    python = sys.executable
    if when == "early":
        # As the front starts them for a job that is requeued.
        words, python = ["--block-signal=USR1,USR2", sys.executable, *words], "env"
    with launchers.start(OPENMPI, 2, words, python=python, **arguments) as job:
        send(job, when, signal.Signals[f"SIG{name}"])
        result = job.wait()
    assert result.returncode == 75, result
    assert result.output.count("Checkpoint written") == 1
    outcome = read_outcome(tmp_path / "runs/run")
    assert outcome is not None
    assert (outcome["code"], outcome["rank"]) == (75, 0)
    (line,) = re.findall(r"preempted after step (\d+): SIG(\w+) reached rank \d", result.output)
    assert line == (str(outcome["step"]), name)
    names = [path.name for path in (tmp_path / "runs/run/checkpoints").iterdir()]
    assert names == [f"step-{outcome['step']}"]
    if when == "one":
        again = launchers.run(OPENMPI, 2, words, **arguments)
        assert again.returncode == 0, again
        assert f"Resumed from runs/run/checkpoints/step-{outcome['step']}: " in again.stdout
        rows = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["epoch"] for row in rows] == list(range(1, 21))


@pytest.mark.mpi
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", ["USR1", pytest.param("TERM", marks=pytest.mark.long)])
def test_a_script_makes_way_and_goes_on(name: str, tmp_path: Path) -> None:
    program = launchers.ROOT / "tests/programs/making_way.py"
    arguments = ["-m", "mpiddp", program]
    with launchers.start(OPENMPI, 2, [*arguments, "100000"], timeout=90, cwd=tmp_path) as job:
        job.until(lambda: job.stdout().count("begins after step 0") == 2, "both ranks to begin")
        # USR1 may come before the script has looked for the first time.
        time.sleep(0.5 if name == "TERM" else 0)
        os.kill(job.ranks()[1], signal.Signals[f"SIG{name}"])
        result = job.wait()
    assert result.returncode == 75, result
    stops = re.findall(r"rank (\d) stops after step (\d+)", result.stdout)
    assert sorted(rank for rank, _ in stops) == ["0", "1"]
    assert len({step for _, step in stops}) == 1
    step = stops[0][1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{step}"]
    if name == "USR1":
        return  # test_checkpointer.py resumes scripts without a second launch.
    again = launchers.run(OPENMPI, 2, [*arguments, str(int(step) + 3)], timeout=90, cwd=tmp_path)
    assert again.returncode == 0, again
    assert again.stdout.count(f"begins after step {step}\n") == 2
