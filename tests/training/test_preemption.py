"""Trainings and scripts that are preempted: all ranks stop in one step, and lose nothing."""

import hashlib
import os
import re
import signal
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_resuming import NOT_COMPARED, SMALL

import interrupted
import launchers
import preempted
import trainings
from mpiddp.process.outcome import read_outcome
from mpiddp.training.data.data_sets import load
from mpiddp.training.options.config import Configuration
from pool import Pool, Pools
from trainings import read_rows


def preempt(
    ranks: Pool, folder: Path, words: list[str], calls: list[tuple[int, int]], most: int
) -> list[int]:
    """Train to the end; of each call the rank and the step of the signal.

    Returns the steps after which all ranks left, up to ``most`` later.
    """
    left = [0]
    for rank, step in calls:
        call = ([rank], step - left[-1])
        called = ranks.call(preempted.run_apart, words, call, cwd=folder)
        (end,) = {each.left for each in called.values}
        assert step <= end <= step + most
        assert called.printed.count("Checkpoint written") == 1
        left.append(end)
    ranks.call(preempted.run_apart, words, None, cwd=folder)
    return left


def test_a_preempted_run_ends_as_the_uninterrupted_one(pool, tmp_path):
    words, ranks = [*SMALL, "--save-every", "never"], pool("openmpi", 3)
    ranks.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    # An epoch has 6 steps.
    calls = [(0, 1), (2, 6), (1, 8)]
    left = preempt(ranks, tmp_path, [*words, "--name", "cut"], calls, 0)
    names = sorted(path.name for path in (tmp_path / "runs/cut/checkpoints").glob("step-*"))
    assert names == sorted(f"step-{step}" for step in left[-2:])
    rows = [read_rows(tmp_path / "runs" / name, NOT_COMPARED) for name in ("cut", "whole")]
    assert rows[0] == rows[1]


def test_workers_and_a_dedicated_server_stop_within_an_epoch(pool, tmp_path):
    # Eight steps in each of two epochs.
    words = [*SMALL, "--sync", "parameter-server", "--server-placement", "dedicated"]
    words += ["--staleness", "2", "--save-every", "never", "--name", "run"]
    # A worker that is not waited for may be ahead.
    preempt(pool("openmpi", 3), tmp_path, words, [(0, 1), (1, 9)], 5)
    rows = read_rows(tmp_path / "runs/run")
    assert [row["step"] for row in rows] == [8, 16]
    # One gradient of each worker in each step, over all attempts.
    assert sum(rows[-1]["staleness"].values()) == 2 * 16


# 128 samples for training, in each of two epochs.
UNBOUNDED = (
    "--data", "synthetic", "--samples", "160", "--epochs", "2", "--batch-size", "4",
    "--sync", "parameter-server", "--staleness", "unlimited", "--keep", "50",
)  # fmt: skip


def test_workers_without_a_bound_stop_after_the_same_step(pool, tmp_path):
    words = [*UNBOUNDED, "--servers", "2", "--save-every"]
    attempts: list[list[preempted.RankRecord]] = []

    def run(ranks: int, call: tuple[list[int], int] | None, *more: str) -> str:
        """Where the attempt before has left, this one begins. Returns what was printed."""
        called = pool("openmpi", ranks).call(
            preempted.run_apart, [*words, *more], call, cwd=tmp_path
        )
        assert len({(each.left, *each.weights) for each in called.values}) == 1
        # All workers have taken equally many batches.
        assert len({each.batches for each in called.values}) == 1
        if attempts:
            assert attempts[-1][0].weights[-1] == called.values[0].weights[0]
        attempts.append(called.values)
        return called.printed

    def count_samples() -> Counter[bytes]:
        return Counter(each for ranks in attempts for rank in ranks for each in rank.samples)

    # The signal reaches all ranks, or the last one before its first step.
    run(3, ([0, 1, 2], 2), "never", "--name", "run")
    first = count_samples().total()
    run(2, ([1], 0), "never", "--name", "run")
    assert 0 < first < count_samples().total() < 128
    assert all(each[0].left is not None for each in attempts)
    printed = run(3, None, "5steps", "--name", "run")
    data = load(Configuration(data="synthetic", samples=160)).train
    samples = Counter(hashlib.sha256(each.tobytes()).digest() for each in data.features)
    assert count_samples() == samples + samples
    gradients = 2 * sum(rank.batches for ranks in attempts for rank in ranks)
    check_sums(tmp_path / "runs/run", gradients)
    saved = [int(step) for step in re.findall(r"Checkpoint written: \S+/step-(\d+) ", printed)]
    begun, end = attempts[-2][0].left, saved[-1]
    assert saved == [step for step in range(begun + 1, end + 1) if step % 5 == 0 or step == end]
    # No worker has gone on while the last rank, a server's, was slow to save.
    step = next(step for step in preempted.SLOW_STEPS if begun < step < end)
    attempts.clear()
    run(3, None, "never", "--resume", f"runs/run/checkpoints/step-{step}", "--name", "other")
    assert 0 < count_samples().total() < 128
    check_sums(tmp_path / "runs/other", gradients)


def check_sums(run: Path, gradients: int) -> None:
    """Losses are counted as often as there are samples, and gradients as servers have had them."""
    rows = read_rows(run)
    for row in rows:
        assert round(row["samples_per_second"] * row["seconds"]) == 128
    assert sum(rows[-1]["staleness"].values()) == gradients


LEFT = {
    # Of each worker; the epoch's last one, and one of a preempted job.
    "the end of an epoch": (8, ["--save-every", "never"], False),
    "a signal": (3, ["--save-every", "never"], True),
    "no bound of staleness": (3, ["--save-every", "never", "--staleness", "unlimited"], False),
}


@pytest.mark.parametrize("when", LEFT)
def test_a_rank_that_only_serves_hears_that_the_loop_was_left(when, pool, tmp_path):
    last, options, is_called = LEFT[when]
    words = [*SMALL, "--sync", "parameter-server", "--server-placement", "dedicated", *options]
    words += ["--name", "run"]
    ranks = pool("openmpi", 3)
    called = ranks.call(partial(preempted.leave, is_called=is_called), words, last, cwd=tmp_path)
    assert f"Training left after step {last}; the checkpoint is written" in called.printed
    outcome = read_outcome(tmp_path / "runs/run")
    assert outcome is not None and (outcome["code"], outcome["step"]) == (0, last)
    assert (tmp_path / f"runs/run/checkpoints/step-{last}").is_dir()


TRAINING = (
    "--data", "toy", "--samples", "200", "--batch-size", "8", "--epochs", "100000",
    "--save-every", "never",
)  # fmt: skip


def send(job: Any, when: str, number: signal.Signals) -> None:
    if when == "early":
        job.until(lambda: len(job.ranks()) == 2, "the ranks to be started")
    else:
        job.until(lambda: "Epoch 1 " in job.stdout(), "the first epoch")
    ranks = job.ranks()
    if when in ("one", "early"):
        os.kill(ranks[1], number)
        return
    for rank in sorted(ranks, reverse=True) * 2:
        with suppress(ProcessLookupError):
            os.kill(ranks[rank], number)


@pytest.mark.parametrize(
    ("when", "name"),
    [
        ("one", "USR2"),
        pytest.param("twice", "TERM", marks=pytest.mark.long),
        pytest.param("early", "USR2", marks=pytest.mark.long),
    ],
)
def test_a_job_makes_way_and_goes_on(when: str, name: str, pool: Pools, tmp_path: Path) -> None:
    words = ["-m", "mpiddp.train", *TRAINING, "--name", "run"]
    arguments: dict[str, Any] = {"timeout": 90, "cwd": tmp_path, "env": {"OMP_NUM_THREADS": "1"}}
    python = sys.executable
    if when == "early":
        # As the front starts them for a job that is requeued.
        words, python = ["--block-signal=USR1,USR2", sys.executable, *words], "env"
    with launchers.start("openmpi", 2, words, python=python, **arguments) as job:
        send(job, when, signal.Signals[f"SIG{name}"])
        result = job.wait().expect(75)
    assert result.output.count("Checkpoint written") == 1
    outcome = read_outcome(tmp_path / "runs/run")
    assert (outcome["code"], outcome["rank"]) == (75, 0)
    (line,) = re.findall(r"preempted after step (\d+): SIG(\w+) reached rank \d", result.output)
    assert line == (str(outcome["step"]), name)
    names = [path.name for path in (tmp_path / "runs/run/checkpoints").glob("step-*")]
    assert names == [f"step-{outcome['step']}"]
    if when == "one":
        # It need not be trained to the end: that takes a busy machine minutes.
        last = read_rows(tmp_path / "runs/run")[-1]["epoch"] + 2
        again = [*TRAINING, "--name", "run", "--epochs", str(last)]
        called = pool("openmpi", 2).call(trainings.run, again, cwd=tmp_path)
        assert f"Resumed from runs/run/checkpoints/step-{outcome['step']}: " in called.printed
        epochs = [row["epoch"] for row in read_rows(tmp_path / "runs/run")]
        assert epochs == list(range(1, last + 1))
