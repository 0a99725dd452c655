"""A run that goes on after any of its steps ends as the one that was not interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from attempts import Family, Finding
from laboratory import Laboratory, Training, check_equal, find_resumed, read_end

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
