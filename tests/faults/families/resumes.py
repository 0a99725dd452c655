"""A run that goes on after any of its steps, or with another number of ranks."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from attempts import Family, Finding
from laboratory import Laboratory, Training, check_equal, find_resumed, make_signal, read_end

RANKS = 3
"""The sum of two has only one order; with three it depends on a gradient's place in its bucket."""
KEPT = ("--epochs", "2", "--save-every", "1step", "--keep", "1000")


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    ways, cuts = list(parameters["ways"]), parameters["cuts"]
    return {
        "way": ways[number % len(ways)],
        "options": parameters["ways"][ways[number % len(ways)]],
        # From the first step to the last one.
        "share": (number // len(ways)) % cuts / (cuts - 1),
    }


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    options = (*KEPT, *choice["options"])
    whole = laboratory.find_whole(RANKS, options)
    step = 1 + round(choice["share"] * (whole.read_steps() - 1))
    checkpoint = whole.run / "checkpoints" / f"step-{step}"
    training = Training(folder, RANKS, (*options, "--resume", str(checkpoint)))
    output = training.finish()
    assert find_resumed(output) == step
    if step == whole.read_steps():
        # Nothing is left to train: the checkpoint is the end, and the new run has no other.
        assert training.read_steps() == step and "Training done: " in output, output
        assert not list(training.run.glob("checkpoints/step-*")), output
        return Finding("nothing left to do", lost_steps=0)
    # Rows of epochs that had ended before are in the other run's directory.
    expected = read_end(whole.run)
    rows = {epoch: row for epoch, row in expected.rows.items() if row["step"] > step}
    check_equal(read_end(training.run), replace(expected, rows=rows))
    return Finding("bitwise equal", lost_steps=0)


CUT = Family(choose, attempt)


SAMPLES = 640
OPTIONS = ("--save-every", "1000epochs", "--epochs", "1")


def choose_world(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    # 4 ranks take 20 steps for an epoch.
    return {"worlds": parameters["worlds"], "steps": [dice.randint(1, 6), dice.randint(1, 8)]}


def attempt_world(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    (folder / "samples").mkdir()
    parts = [
        train_part(Training(folder, ranks, OPTIONS), step)
        for ranks, step in zip(choice["worlds"], [*choice["steps"], None], strict=True)
    ]
    check_parameters(parts)
    taken = Counter(sample for part in parts for line in part for sample in line["samples"])
    assert len(taken) == SAMPLES, f"{SAMPLES - len(taken)} samples were not trained on"
    again = sum(taken.values()) - SAMPLES
    assert again == 0, f"{again} samples were trained on twice"
    return Finding("each sample once, parameters equal at load", lost_steps=0)


def train_part(training: Training, step: int | None) -> list[dict[str, Any]]:
    """Train until all ranks stop after a signal, or to the end; each rank's steps."""
    rule = make_signal(0, signal.SIGUSR2, event="step", count=step or 1)
    with training.start([rule] if step else [], pause=0.05) as job:
        job.wait().expect(75 if step else 0)
    (training.folder / "fired.json").unlink(missing_ok=True)
    paths = list((training.folder / "samples").iterdir())
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    for path in paths:
        path.unlink()
    assert {line["rank"] for line in lines} == set(range(training.ranks))
    return sorted(lines, key=lambda line: line["step"])


def check_parameters(parts: list[list[dict[str, Any]]]) -> None:
    """All ranks have the same ones, also where they go on."""
    for earlier, later in pairwise(parts):
        last = {line["after"] for line in earlier if line["step"] == earlier[-1]["step"]}
        first = {line["before"] for line in later if line["step"] == later[0]["step"]}
        assert len(last) == 1 and first == last, "ranks began with other parameters"


WORLD = Family(choose_world, attempt_world)
