"""A run that was interrupted ends as the one that was not, bit for bit."""

import errno
import hashlib
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_metrics import ROW, TIMES

import interrupted
import trainings
from mpiddp.checkpoints.packing import unpack
from mpiddp.checkpoints.storage.finding import Found
from mpiddp.checkpoints.storage.manifest import read_manifest
from mpiddp.checkpoints.storage.shards import read_shards
from mpiddp.errors import StorageError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.training import resuming, saving
from mpiddp.training.data.data_sets import load
from mpiddp.training.data.seeding import seed_generators
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.options.groups.checkpoints import Interval
from mpiddp.training.resuming import look_for_checkpoint
from mpiddp.training.run_state import EpochSums, Position
from mpiddp.training.saving import find_score
from mpiddp.training.trainer import train
from pool import Pools
from trainings import read_rows

NOT_COMPARED = {*TIMES, "attempt", "sent_bytes"}
"""What servers send while a checkpoint is made belongs to no step."""
# 128 samples for training: 6 steps of 3 ranks in an epoch, 12 in all.
SMALL = (
    "--data", "synthetic", "--samples", "160", "--epochs", "2", "--batch-size", "8",
    "--save-every", "1step",
)  # fmt: skip
SERVED = ("--sync", "parameter-server")
WAYS = {
    "framework": (),
    "served": (*SERVED, "--servers", "2"),
    "adamw": ("--optimizer", "adamw", "--model", "convnet", "--channels-last", "--ema", "0.9"),
    "fsdp": (
        "--parallel", "fsdp", "--wrap-parameters", "1000", "--optimizer", "adamw", "--ema", "0.9",
        "--accumulation-steps", "2",
    ),
    "local": ("--average-every", "4", "--ema", "0.9", "--sync", "ring"),
    "noisy-stream": ("--data", "structured:load_noise", "--model", "mlp"),
}  # fmt: skip


def assert_equal_ends(folder: Path, cut: str) -> None:
    rows = [read_rows(folder / "runs" / name, NOT_COMPARED) for name in ("whole", cut)]
    assert rows[0] == rows[1]
    whole, found = (interrupted.read_last(folder / "runs" / name) for name in ("whole", cut))
    assert whole.keys() == found.keys()
    assert [name for name in whole if not torch.equal(whole[name], found[name])] == []
    assert any(name.startswith("rank-1.random.torch") for name in whole)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.long] * (way == "noisy-stream")) for way in WAYS]
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(way: str, pool: Pools, tmp_path: Path) -> None:
    # The sum of two has only one order; with three it depends on a gradient's place in its bucket.
    words, ranks = [*SMALL, *WAYS[way]], pool("openmpi", 3)
    ranks.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    # The first step; an epoch's last, and the one before it; the last of all.
    cuts = [1, 5, 6, 12] if way == "framework" else [5, 6]
    called = ranks.call(interrupted.run, [*words, "--name", "cut"], cuts, cwd=tmp_path)
    begun = [line for line in called.printed.splitlines() if line.startswith("Resumed from")]
    for line, cut in zip(begun, cuts, strict=True):
        assert line.startswith(f"Resumed from runs/cut/checkpoints/step-{cut}: ")
    assert_equal_ends(tmp_path, "cut")
    if way == "framework":
        # Nothing is left to train: that checkpoint is the end, and the new run has no other.
        other = [*words, "--name", "other", "--resume", "runs/cut"]
        assert "Training done" in ranks.call(interrupted.run, other, [], cwd=tmp_path).printed
        assert not list(tmp_path.glob("runs/other/checkpoints/step-*"))


@pytest.mark.parametrize("options", [[], ["--data", "structured:load_stream", "--model", "mlp"]])
def test_another_number_of_ranks_takes_each_sample_once(options, pool, tmp_path):
    # One epoch: after two steps, and after two more, another number of ranks goes on.
    words = [*SMALL, *options, "--epochs", "1", "--name", "cut"]
    samples, parameters, seeds = [], [], []
    for ranks, cuts in zip((3, 2, 3), ([2], [4], []), strict=True):
        called = pool("openmpi", ranks).call(interrupted.run, words, cuts, not cuts, cwd=tmp_path)
        every = [each for found in called.values for each in found]
        samples += [each for each in every if isinstance(each, bytes)]
        seeds += [each for each in every if isinstance(each, int)]
        weights = [[each for each in found if isinstance(each, str)] for found in called.values]
        assert weights == weights[:1] * ranks
        parameters.append(weights[0])
    # No two ranks, and no two attempts, have one seed.
    assert len(set(seeds)) == len(seeds) == 3 + 2 + 3
    # What one cut left, the next ranks begin with.
    assert [found[0] for found in parameters[1:]] == [found[-1] for found in parameters[:-1]]
    data = load(Configuration(data="synthetic", samples=160)).train
    expected = Counter(hashlib.sha256(each.tobytes()).digest() for each in data.features)
    assert Counter(samples) >= expected
    # A rank without a sample in the last step has another's.
    assert len(samples) - len(data) < 3
    (row,) = read_rows(tmp_path / "runs" / "cut")
    assert row["step"] == 4 + -(-(128 - 2 * 8 * (3 + 2)) // (8 * 3))


def test_a_single_sample_in_the_rest_of_an_epoch_is_refused(pool: Pools, tmp_path: Path) -> None:
    # 162 samples: 66 are left after the first step of three ranks, 2 after one more of two ranks.
    words = ["--data", "toy", "--samples", "202", "--epochs", "1", "--batch-size", "32"]
    words += ["--save-every", "1step", "--name", "cut", "--model", "trainings:build_normalised"]
    pool("openmpi", 3).call(interrupted.run, words, [1], False, cwd=tmp_path)
    two = pool("openmpi", 2)
    for said in two.call(trainings.refuse, *words, cwd=tmp_path).values:
        expected = "2: last_batch: the last step of the resumed epoch, on some rank, has one sample"
        assert said.startswith(expected) and "\n" not in said
    two.call(trainings.run, [*words, "--last-batch", "drop"], cwd=tmp_path)
    assert read_rows(tmp_path / "runs" / "cut")[-1]["step"] == 2


def test_a_dedicated_server_is_resumed(pool: Pools, tmp_path: Path) -> None:
    words = [*SMALL, *SERVED, "--server-placement", "dedicated"]
    ranks = pool("openmpi", 3)
    ranks.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    # The server learns late of what its workers do.
    ranks.call(interrupted.run_late, [*words, "--name", "cut"], [3, 8], cwd=tmp_path)
    assert_equal_ends(tmp_path, "cut")


def test_a_checkpoint_is_for_ddp_and_for_fsdp(pool: Pools, tmp_path: Path) -> None:
    # 8 steps.
    words = [*SMALL, "--epochs", "1", "--save-every", "3steps", "--optimizer", "adamw"]
    words += ["--ema", "0.9"]
    sharded = [*words, "--parallel", "fsdp", "--wrap-parameters", "1000"]
    ranks = pool("openmpi", 2)
    ranks.call(interrupted.run, [*words, "--name", "whole"], [], cwd=tmp_path)
    parameters = []
    for options, cuts in ((words, [3]), (sharded, [6]), (words, [])):
        named = [*options, "--name", "cut"]
        called = ranks.call(interrupted.run, named, cuts, not cuts, cwd=tmp_path)
        for found in called.values:
            parameters.append([each for each in found if isinstance(each, str)])
    # Where one ends, on either rank, the next begins.
    for rank in (0, 1):
        ddp, fsdp, last = parameters[rank::2]
        assert (ddp[-1], fsdp[-1]) == (fsdp[0], last[0])
        assert len({*ddp, *fsdp, *last}) == 3
    assert "changed since then: parallel, wrap_parameters\n" in called.printed
    whole, found = (interrupted.read_last(tmp_path / "runs" / name) for name in ("whole", "cut"))
    assert whole.keys() == found.keys()
    for name in whole:
        if name.startswith(("model.", "optimizer.")):
            torch.testing.assert_close(found[name], whole[name])


def test_no_usable_checkpoint_is_exit_code_5(pool: Pools, tmp_path: Path) -> None:
    words, ranks = [*SMALL, "--epochs", "1", "--name", "lost"], pool("openmpi", 3)
    ranks.call(interrupted.run, words, [3], False, cwd=tmp_path)
    folder = tmp_path / "runs" / "lost" / "checkpoints"
    newest = "runs/lost/checkpoints/step-3"
    other = [*words, "--name", "other", "--resume", newest]
    ranks.call(interrupted.run, other, [4], False, cwd=tmp_path)
    changed = ranks.call(trainings.refuse, *other, "--seed", "1", cwd=tmp_path).values
    assert all(said.startswith("5: ") and "(seed 0, now 1)" in said for said in changed)
    for file in folder.glob("step-*/__1_0.distcp"):
        file.unlink()
    # The other run would go on from its own.
    for options in (words, [*words, "--name", "third", "--resume", newest]):
        for said in ranks.call(trainings.refuse, *options, cwd=tmp_path).values:
            assert said.startswith("5: ") and "__1_0.distcp: is missing" in said
    assert len(list(folder.glob("step-*"))) == 2
    called = ranks.call(interrupted.run, [*words, "--resume", "never"], [], cwd=tmp_path)
    assert "Attempt 2 in runs/lost: starting over\n" in called.printed
    assert read_rows(tmp_path / "runs" / "lost")[-1]["step"] == 6


def test_other_options_have_their_effect_after_a_resumption(pool: Pools, tmp_path: Path) -> None:
    ranks = pool("openmpi", 3)
    ranks.call(interrupted.run, [*SMALL, "--name", "first"], [7], False, cwd=tmp_path)
    words = [*SMALL, "--resume", "runs/first/checkpoints/step-7"]
    short = [*words, "--epochs", "1", "--name", "short"]
    # At the end of an epoch that was not the last one, nothing was tested.
    for cut in (7, 6):
        short[len(SMALL) + 1] = f"runs/first/checkpoints/step-{cut}"
        for said in ranks.call(trainings.refuse, *short, cwd=tmp_path).values:
            assert said.startswith("2: epochs: expected 2 or more") and said.endswith("found 1")
    task = ("--task", "trainings:make_task")
    for said in ranks.call(trainings.refuse, *words, *task, "--name", "few", cwd=tmp_path).values:
        assert said.startswith("5: ") and "\n" not in said
        assert "is within epoch 2, of which it has sums for the metrics accuracy, but the" in said
        assert "but the task has hits: change metrics at the end of an epoch" in said
    # torch has no fused SGD for it, which the first run had.
    sharded = ("--parallel", "fsdp", "--wrap-parameters", "1000", "--weight-decay", "0.5")
    ranks.call(trainings.run, [*words, *sharded, "--name", "sharded"], cwd=tmp_path)
    last = tmp_path / "runs" / "sharded" / "checkpoints" / "step-12"
    (group,) = unpack(read_shards(last, "optimizer."))["groups"]
    assert group["weight_decay"] == 0.5
    between = [*SMALL, "--resume", "runs/first/checkpoints/step-6", *task, "--name", "hits"]
    ranks.call(trainings.run, between, cwd=tmp_path)
    (row,) = read_rows(tmp_path / "runs" / "hits")
    assert row["hits"] > 0 and "accuracy" not in row
    # The best checkpoint is the one with the lowest loss.
    score = read_manifest(tmp_path / "runs" / "hits" / "checkpoints" / "step-12").score
    assert score == -row["test_loss"]


def test_training_goes_on_after_any_save_that_fails(pool: Pools, tmp_path: Path) -> None:
    words = [*SMALL, "--save-every", "2steps", "--epochs", "1", "--name", "on"]
    ranks = pool("openmpi", 2)
    called = ranks.call(trainings.run_with_bad_saves, words, cwd=tmp_path)
    assert called.values == ["nothing was said"] * 2
    said = [line for line in called.printed.splitlines() if "could not be written" in line]
    assert [line.partition("written: rank 1 on ")[2].partition(": ")[2] for line in said] == [
        f"{reason}; the older ones are as they were, and training goes on"
        for reason in ("RuntimeError: torn apart", "MemoryError: no room")
    ]
    # 8 steps: after the second and third save, the fourth.
    folder = tmp_path / "runs" / "on" / "checkpoints"
    assert {each.name for each in folder.glob("step-*")} == {"step-2", "step-8"}
    stopped = [*words, "--on-save-error", "stop", "--name", "stopped"]
    for found in ranks.call(trainings.run_with_bad_saves, stopped, cwd=tmp_path).values:
        assert found.endswith(": RuntimeError: torn apart; the older ones are as they were")
    folder = tmp_path / "runs" / "stopped" / "checkpoints"
    assert [each.name for each in folder.glob("step-*")] == ["step-2"]


def test_a_seed_is_for_all_generators():
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    draws = []
    for seed in (1 << 55, 7, 1 << 55):
        seed_generators(seed)
        draws.append(draw())
    assert draws[0] == draws[2]
    assert all(first != other for first, other in zip(draws[0], draws[1], strict=True))


def test_the_best_has_the_highest_accuracy_or_else_the_lowest_loss() -> None:
    evaluated = replace(ROW, test_loss=0.5)
    assert find_score(ROW) is None
    assert find_score(replace(evaluated, test_metrics={"gap": 7.0, "accuracy": 0.75})) == 0.75
    for metrics in ({}, {"gap": 7.0}):
        better = replace(evaluated, test_loss=0.25, test_metrics=metrics)
        score, higher = find_score(replace(evaluated, test_metrics=metrics)), find_score(better)
        assert score is not None and higher is not None and higher > score


def test_a_position_that_cannot_be_read_ends_the_attempt_and_not_the_job(tmp_path, monkeypatch):
    def fail(_: Found) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    found = Found(tmp_path / "step-1", mock.Mock(configuration={}))
    session = mock.Mock(broadcast=lambda value: value)
    monkeypatch.setattr(resuming, "read_values", fail)
    monkeypatch.setattr(resuming, "_choose", lambda *_: found)
    monkeypatch.setattr(resuming, "check_fit", lambda *_: [])
    with pytest.raises(StorageError, match=r"step-1 cannot be read: rank 0 on .*error"):
        look_for_checkpoint(Configuration(runs_dir=tmp_path).resolve(), session)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MPIDDP_JOB_DIRECTORY": "front", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"MPIDDP_JOB_DIRECTORY": "front", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"MPIDDP_JOB_DIRECTORY": "other", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_only_a_later_attempt_of_a_job_goes_on_from_its_checkpoints(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found: Any = SimpleNamespace(manifest=SimpleNamespace(front="front", job="7"))
    assert resuming._is_this_jobs(found) is expected


def test_a_short_run_has_a_checkpoint_after_its_first_epoch(session, tmp_path, monkeypatch, capsys):
    # Any time is too long for the others.
    monkeypatch.setattr(saving, "parse_interval", lambda _: Interval(epochs=1, share=0.0))
    words = ["--data", "toy", "--samples", "200", "--epochs", "4", "--name", "first"]
    train(parse([*words, "--runs-dir", str(tmp_path)]), session, FailureHandler())
    found = sorted(path.name for path in (tmp_path / "first" / "checkpoints").glob("step-*"))
    assert found == ["step-10", "step-40"]
    assert "Checkpoints: after each epoch if writing takes up to 1%" in capsys.readouterr().out


def test_an_epoch_of_a_version_that_timed_fewer_stages_goes_on() -> None:
    session, task = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(metrics={})
    training: Any = SimpleNamespace(session=session, task=task)
    sums = EpochSums(training, Position())
    state = sums.state_dict()
    state["costs"] = {"seconds": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "steps": 7}
    sums.load_state_dict(state)
    assert sums.costs.seconds == [1, 0, 2, 3, 4, 5, 6] and sums.costs.steps == 7
