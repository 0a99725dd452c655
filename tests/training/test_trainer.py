"""The training loop, in this process and in real jobs."""

import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_metrics import TIMES
from torch import nn

import launchers
import trainings
from mpiddp.errors import MpiddpError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.process.outcome import read_outcome
from mpiddp.training.data.data_sets import load
from mpiddp.training.data.samples import Batch
from mpiddp.training.evaluation import evaluate
from mpiddp.training.options.config import Configuration
from mpiddp.training.records.history import STAGES
from mpiddp.training.records.metrics import Row
from mpiddp.training.task import models
from mpiddp.training.task.task import Task
from mpiddp.training.trainer import train
from pool import Pools
from trainings import read_rows


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    return Configuration(
        name="first", runs_dir=tmp_path, data="toy", samples=200, epochs=2
    ).resolve()


def run(configuration: Configuration, session: Session) -> Row:
    return train(configuration, session, FailureHandler())


@pytest.mark.parametrize(
    ("data", "optimizer"), [("synthetic", "sgd"), ("toy", "sgd"), ("digits", "adamw")]
)
def test_the_default_model_learns_each_data_set(data, optimizer, session, tmp_path):
    configuration = Configuration(runs_dir=tmp_path, data=data, epochs=3, optimizer=optimizer)
    assert run(configuration.resolve(), session).test_metrics["accuracy"] > 0.9


def test_a_row_is_written_for_each_epoch(configuration, session, capsys):
    result = run(replace(configuration, epochs=5, evaluate_every=2), session)
    rows = read_rows(configuration.runs_dir / "first")
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    # 160 training samples in batches of 16.
    assert [row["step"] for row in rows] == [10, 20, 30, 40, 50]
    assert [row["test_accuracy"] is not None for row in rows] == [False, True, False, True, True]
    assert [row["parameters"] for row in rows] == [None] * 4 + [result.parameters]
    assert all(row["attempt"] == 1 for row in rows)
    for row in rows:
        assert list(row["stages"]) == list(STAGES)
        assert all(seconds >= 0 for seconds in row["stages"].values())
        assert sum(row["stages"].values()) <= row["seconds"]
        # A process that is alone sends nothing.
        assert row["sent_bytes"] == [0] and row["bandwidth"] == [None]
    assert rows[-1]["test_accuracy"] == result.test_metrics["accuracy"]
    assert result.step == 50
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("Epoch")]
    assert shown[0] == (
        f"Epoch 1 - Avg Loss: {rows[0]['loss']:.6f}, Accuracy: {rows[0]['accuracy']:.2%}"
    )
    assert shown[1].endswith(f", Test Accuracy: {rows[1]['test_accuracy']:.2%}")
    assert lines[-1].startswith(
        f"Training done: test accuracy {result.test_metrics['accuracy']:.2%} after 5 "
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_progress_bar_is_for_terminals_only(
    is_terminal, configuration, session, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    run(replace(configuration, samples=40, epochs=1), session)
    captured = capsys.readouterr()
    assert ("Epoch 1:" in captured.err) == is_terminal
    assert "Epoch 1:" not in captured.out


def test_what_the_result_depends_on(configuration: Configuration, session: Session) -> None:
    changes: list[dict[str, Any]] = [
        {}, {}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"optimizer": "adamw"}, {"samples": 50},
    ]  # fmt: skip
    short = replace(configuration, samples=60, epochs=1)
    found = [
        run(replace(short, name=str(number), **change), session).parameters
        for number, change in enumerate(changes)
    ]
    assert found[0] == found[1]
    assert len(set(found)) == len(changes) - 1, found


def test_training_that_diverges_is_an_error(configuration: Configuration, session: Session) -> None:
    with pytest.raises(MpiddpError, match=r"finite .* in step \d.*--learning-rate") as caught:
        run(replace(configuration, learning_rate=1e30), session)
    assert caught.value.exit_code == 1


def test_evaluation_is_the_mean_over_samples_whatever_the_batches(session: Session) -> None:
    data = load(Configuration(data="digits"))
    torch.manual_seed(0)
    model = models.build("mlp", data.shape, data.classes)
    features, labels = torch.from_numpy(data.test.features), torch.from_numpy(data.test.labels)
    with torch.no_grad():
        outputs = model(features)
    loss = nn.functional.cross_entropy(outputs, labels).item()
    accuracy = (outputs.argmax(dim=1) == labels).double().mean().item()
    for size in (1, 7, len(labels)):
        batches = map(Batch, features.split(size), labels.split(size))
        average = evaluate(Task(), model, batches, torch.device("cpu"))
        assert average.samples == len(labels)
        assert average.metrics == {"accuracy": accuracy}
        assert math.isclose(average.loss, loss, rel_tol=1e-6)


def launch(
    launcher: launchers.Launcher | str, ranks: int, folder: Path, *options: str, **variables: str
) -> launchers.Result:
    arguments = ["-W", "error", "-m", "mpiddp.train", *options]
    return launchers.run(launcher, ranks, arguments, cwd=folder, env=variables)


TOY = ("--data", "toy", "--samples", "200", "--epochs", "2")


def test_digits_are_learnt_to_97_per_cent(pool: Pools, tmp_path: Path) -> None:
    called = pool("openmpi", 2).call(trainings.run, ["--name", "digits"], cwd=tmp_path)
    run = tmp_path / "runs" / "digits"
    outcome = read_outcome(run)
    assert (outcome["code"], outcome["attempt"]) == (0, 1)
    last = read_rows(run)[-1]
    assert last["test_accuracy"] >= 0.97
    assert last["epoch"] == Configuration().epochs
    lines = called.printed.splitlines()
    assert re.fullmatch(r"Starting distributed training on 2 (GPU|CPU)s", lines[0])
    assert lines[1] == "1 node x 2 ranks per node = 2 ranks"
    assert re.fullmatch(r"Master node: \S+", lines[2])
    assert lines[4].startswith("Checkpoints: after each epoch if writing takes up to 1%")
    shown = [line for line in lines[5:-2] if not line.startswith(("Straggler", "Checkpoint"))]
    for epoch, line in enumerate(shown, start=1):
        assert re.match(rf"Epoch {epoch} - Avg Loss: \d+\.\d{{6}}, Accuracy: \d+\.\d\d%", line)
    written = r"Checkpoint written: runs/digits/checkpoints/step-\d+ \(\d+\.\d\d s, of which .*\)"
    assert re.fullmatch(written, lines[-2])
    end = rf"Training done: test accuracy {last['test_accuracy']:.2%} after {epoch} epochs in .* s"
    assert re.fullmatch(end + r" \(run directory runs/digits\)", lines[-1])


@pytest.mark.by_default("mpich")
def test_the_same_seed_gives_the_same_bits(either_launcher, pool, tmp_path):
    # A job trains a alone; a pool, whose ranks have one thread each, trains c, then b.
    seeds = {"a": "0", "c": "1", "b": "0"}
    lines = [[*TOY, "--name", name, "--seed", seed] for name, seed in seeds.items()]
    options = (*lines[0], "--export", "w.pt", "--log-dir", "logs")
    before = os.umask(0o007)
    try:
        launch(either_launcher, 2, tmp_path, *options, OMP_NUM_THREADS="1").expect(0)
    finally:
        os.umask(before)
    # Files are made under the user's umask.
    found = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    names = {path.name for path in found}
    assert {"w.pt", "metrics.jsonl", "manifest.json", "outcome.json"} <= names
    assert any((tmp_path / "logs").iterdir())
    assert not [path for path, mode in found.items() if mode != (0o770 if path.is_dir() else 0o660)]
    pool("openmpi", 2).call(trainings.run, *lines[1:], cwd=tmp_path)
    rows = {name: read_rows(tmp_path / "runs" / name, TIMES) for name in "abc"}
    assert len(rows["a"]) == 2 and rows["a"] == rows["b"]
    assert rows["a"][-1]["parameters"] != rows["c"][-1]["parameters"]


def test_two_ranks_share_out_the_samples_of_one(pool: Pools, tmp_path: Path) -> None:
    # 160, 161 and 163 training samples: the ranks have in the last step 8 each, 1 and 0, 2 and 1.
    samples = (200, 201, 203)
    ways = ("framework", "ring", "parameter-server")
    words = {
        (ranks, count, way): [
            *("--data", "toy", "--epochs", "2", "--batch-size", str(16 // ranks), "--sync", way),
            *("--samples", str(count), "--name", f"{ranks}-{count}-{way}"),
        ]
        for ranks in (1, 2)
        for count in samples
        for way in ways[: None if ranks == 2 else 1]
    }
    left_out = ["--last-batch", "drop", "--name", "drop"]
    words[2, 203, "drop"] = [*words[2, 203, "framework"], *left_out]
    for ranks in (1, 2):
        lines = [line for key, line in words.items() if key[0] == ranks]
        pool("openmpi", ranks).call(trainings.run, *lines, cwd=tmp_path)
    for count in samples:
        one = read_rows(tmp_path / "runs" / f"1-{count}-framework")[-1]
        for way in ways:
            two = read_rows(tmp_path / "runs" / f"2-{count}-{way}")[-1]
            assert one["step"] == two["step"]
            for name in ("loss", "accuracy", "test_loss"):
                assert two[name] == pytest.approx(one[name], rel=1e-4), (count, way)
    assert read_rows(tmp_path / "runs/drop")[-1]["step"] == 2 * (163 // 16)


@pytest.mark.mpi
def test_help_is_shown_once(tmp_path: Path) -> None:
    assert launch("openmpi", 3, tmp_path, "--help").expect(0).stdout.count("usage:") == 1


def test_ranks_that_were_told_different_things_are_refused(pool: Pools, tmp_path: Path) -> None:
    called = pool("openmpi", 2).call(trainings.refuse_different, cwd=tmp_path)
    for said in called.values:
        assert said.startswith("2: option epochs must be the same on all ranks")
        assert "\n" not in said
    assert called.output == ""
    assert not (tmp_path / "runs").exists()


def test_a_run_that_failed_says_so_and_can_be_started_again(pool: Pools, tmp_path: Path) -> None:
    words, run = [*TOY, "--name", "toy"], tmp_path / "runs" / "toy"
    result = launch("openmpi", 1, tmp_path, *words, "--learning-rate", "1e30").expect(1)
    assert result.stderr.count("training has diverged") == 1
    outcome = read_outcome(run)
    assert outcome["code"] == 1 and outcome["step"] > 0
    pool("openmpi", 2).call(trainings.run, words, cwd=tmp_path)
    outcome = read_outcome(run)
    assert (outcome["code"], outcome["attempt"]) == (0, 2)
    before = (run / "metrics.jsonl").read_bytes()
    for said in pool("openmpi", 2).call(trainings.refuse, *words, cwd=tmp_path).values:
        assert "has finished and is not overwritten" in said
    assert (run / "metrics.jsonl").read_bytes() == before
    assert read_outcome(run)["code"] == 0
