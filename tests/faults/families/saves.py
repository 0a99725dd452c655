"""kill -9 in the middle of a save: what is on the disk can always be gone on from."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from attempts import Family, Finding
from families.kills import CODES
from laboratory import INTERVAL, Laboratory, Training, make_signal

POINTS = {
    "begun": ("os.mkdir", r"\.partial$"),
    "shards": ("open", r"\.partial/__\d_\d\.distcp"),
    "list of tensors": ("open", r"\.partial/\.metadata"),
    "manifest": ("open", r"\.partial/manifest\.json"),
    "written, not renamed": ("os.rename", r"\.partial$"),
    "older ones are removed": ("os.rename", "$"),
}
"""The event of each point of a save, before which the kill comes."""
RANKS = 2


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    point = list(POINTS)[number % len(POINTS)]
    return {
        "point": point,
        "victim": dice.randrange(RANKS),
        # Older ones are removed from the third save on.
        "save": dice.randint(3 if point == "older ones are removed" else 1, 7),
    }


def make_rule(choice: Mapping[str, Any]) -> dict[str, Any]:
    event, path = POINTS[choice["point"]]
    save, victim = choice["save"], choice["victim"]
    # The third save removes the first one's.
    removed = 2 * (choice["point"] == "older ones are removed")
    folder = rf"/step-{(save - removed) * INTERVAL}"
    # Each rank writes its shard; the rest is rank 0's work.
    rank = victim if choice["point"] == "shards" else 0
    path = folder + (path if removed else rf"\.[\w-]+{path}")
    return make_signal(rank, signal.SIGKILL, [victim], event=event, path=path)


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    training = Training(folder, RANKS)
    times, result = training.break_off(make_rule(choice))
    assert result.returncode in CODES, result
    resumed, lost = laboratory.go_on(training)
    # Training went on while it was written.
    begun = choice["save"] * INTERVAL
    assert begun - resumed <= INTERVAL, f"step {resumed} is left of a save of step {begun}"
    return Finding("resumed, bitwise equal", times.detected, times.gone, lost)


SAVE = Family(choose, attempt)
