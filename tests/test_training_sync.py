"""Training with ``--sync``: it learns what plain DDP learns, and says how it did so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import launchers
from mpiddp.training.config import read_toml

OPENMPI = launchers.table()["openmpi"]
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(150)]

POINTS, NARROW_POINTS = 0.003, 0.01
"""Of accuracy, by which a synchronous run may be worse than the framework's, and one that rounds
its gradients to 8 bits."""
SMALL = ("--data", "toy", "--samples", "200", "--epochs", "2")


def train(ranks: int, folder: Path, name: str, *options: str) -> tuple[launchers.Result, Path]:
    """A run in ``folder``; the finished job and the run's directory."""
    words = ["-m", "mpiddp.train", "--name", name, *options]
    result = launchers.run(OPENMPI, ranks, words, timeout=120, cwd=folder).expect(0)
    return result, folder / "runs" / name


def read_last(run: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return row


@pytest.mark.parametrize("ranks", [2, 3])
def test_synchronous_ways_reach_the_frameworks_accuracy(ranks, tmp_path):
    # The digits of the test split are 359: one of them is a quarter of a point.
    _, plain = train(ranks, tmp_path, "plain")
    accuracy = read_last(plain)["test_accuracy"]
    assert accuracy > 0.97
    _, run = train(ranks, tmp_path, "whole", "--sync", "auto")
    assert read_last(run)["test_accuracy"] >= accuracy - POINTS
    narrow = ["--sync", "ring", "--transport", "mpi", "--wire-dtype", "bfloat16"]
    _, run = train(ranks, tmp_path, "narrow", *narrow)
    assert read_last(run)["test_accuracy"] >= accuracy - NARROW_POINTS


def test_the_choice_of_overlap_is_measured_told_and_used_again(tmp_path):
    result, run = train(2, tmp_path, "measured", *SMALL, "--sync", "direct")
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("Gradients: ")]
    found = re.fullmatch(
        r"Gradients: direct over transport auto (during|after) the backward pass of their bucket "
        r"\(([0-9.]+) ms with overlap, ([0-9.]+) without\)",
        line,
    )
    assert found
    during = found[1] == "during"
    assert float(found[2]) <= float(found[3]) if during else float(found[3]) <= float(found[2])
    settings = read_toml(run / "config.toml")
    assert settings["overlap"] == ("on" if during else "off")
    # The same choice, and the other one, lead to the same bits.
    for name, overlap in (("same", settings["overlap"]), ("other", "off" if during else "on")):
        result, again = train(2, tmp_path, name, *SMALL, "--sync", "direct", "--overlap", overlap)
        assert "ms with overlap" not in result.stdout
        assert read_last(again)["parameters"] == read_last(run)["parameters"]


def test_running_averages_are_the_same_on_all_ranks(tmp_path):
    # The trainer refuses parameters and buffers that differ between ranks.
    options = ("--data", "synthetic", "--samples", "60", "--batch-size", "8", "--epochs", "1")
    for name, sync in (("plain", "framework"), ("ring", "ring")):
        train(2, tmp_path, name, *options, "--model", "resnet18", "--sync", sync)


def test_a_rank_alone_trains_with_any_sync(tmp_path):
    train(1, tmp_path, "alone", *SMALL, "--sync", "ring")


def test_an_algorithm_that_leaves_ranks_out_is_refused_in_one_line(tmp_path):
    words = ["-m", "mpiddp.train", "--sync", "central"]
    result = launchers.run(OPENMPI, 2, words, timeout=60, cwd=tmp_path).expect(2)
    assert result.stderr.count("central leaves out the gradients of 1 of 2 ranks") == 1
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()
