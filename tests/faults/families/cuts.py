"""A run that goes on after any of its steps ends as the one that was not interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import launchers
from attempts import Family, Finding
from laboratory import PATHS, SECONDS, Laboratory, Training, check_equal, find_resumed, read_end

RANKS = 3
"""The sum of two has only one order; with three it depends on a gradient's place in its bucket."""
KEPT = ("--epochs", "2", "--save-every", "1step", "--keep", "1000")
SCRIPT = Path(__file__).parents[1] / "scripted.py"
SCRIPT_STEPS = 20


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    ways, cuts = list(parameters["ways"]), parameters["cuts"]
    return {
        "way": ways[number % len(ways)],
        "options": parameters["ways"][ways[number % len(ways)]],
        # From the first step to the last one.
        "share": (number // len(ways)) % cuts / (cuts - 1),
    }


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    if choice["options"] is None:
        cut_script(choice, folder)
    else:
        cut_trainer(choice, laboratory, folder)
    return Finding("bitwise equal", lost_steps=0)


def cut_trainer(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> None:
    options = (*KEPT, *choice["options"])
    whole = laboratory.find_whole(RANKS, options)
    step = 1 + round(choice["share"] * (whole.read_steps() - 1))
    checkpoint = whole.run / "checkpoints" / f"step-{step}"
    training = Training(folder, RANKS, (*options, "--resume", str(checkpoint)))
    output = training.finish()
    assert find_resumed(output) == step
    # Rows of epochs that had ended before are in the other run's directory.
    expected = read_end(whole.run)
    rows = {epoch: row for epoch, row in expected.rows.items() if row["step"] > step}
    check_equal(read_end(training.run), replace(expected, rows=rows))


def cut_script(choice: Mapping[str, Any], folder: Path) -> None:
    """A script with mpiddp.Checkpointer, which is started again."""
    step = 1 + round(choice["share"] * (SCRIPT_STEPS - 1))
    whole = run_script(folder, "whole", choice["way"], SCRIPT_STEPS)
    cut = [run_script(folder, "cut", choice["way"], each) for each in (step, SCRIPT_STEPS)]
    assert (cut[0]["begun"], cut[1]["begun"]) == (0, step)
    assert {**cut[1], "begun": 0} == whole


def run_script(folder: Path, name: str, kind: str, steps: int) -> dict[str, Any]:
    """What rank 0 has at the end."""
    file = folder / f"{name}.json"
    words = [SCRIPT, folder / name, kind, str(steps), file]
    launchers.run(
        launchers.table()["openmpi"],
        RANKS,
        words,
        timeout=SECONDS,
        cwd=folder,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS},
        python=sys.executable,
    ).expect(0)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


CUT = Family(choose, attempt)
