"""A run that goes on with another number of ranks: each sample once, the same parameters."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from attempts import Family, Finding
from laboratory import Laboratory, Training, make_signal

SAMPLES = 640
OPTIONS = ("--save-every", "1000epochs", "--epochs", "1")


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    # 4 ranks take 20 steps for an epoch.
    return {"worlds": parameters["worlds"], "steps": [dice.randint(1, 6), dice.randint(1, 8)]}


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
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


WORLD = Family(choose, attempt)
