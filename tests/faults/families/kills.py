"""kill -9 of one rank, at any moment, or in the middle of a save."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import launchers
from attempts import Family, Finding
from laboratory import (
    INTERVAL,
    PARTIAL,
    SAVING,
    Laboratory,
    Times,
    Training,
    make_signal,
    watch_end,
)

EARLY_ENDS = {
    4: "ended by --timeout",
    14: "ended by MPI",
    128 + signal.SIGTERM: "ended by srun",
    128 + signal.SIGKILL: "ended by srun, or by --timeout",
}
"""By exit code, how a job under srun ends whose ranks do not know each other yet: they did not find
each other in time; Open MPI gave up in MPI_Init (MPI_ERR_UNKNOWN); srun's signal ended the others;
or the victim's own, the highest. Nothing of mpiddp can tell the others: its limits are for later.
"""
KNOWN = re.compile(r"mpiddp: started|was lost|left early|Exited with exit code 6")
"""What a job says whose ranks have found each other."""
MOMENTS = ("start", "step", "save", "evaluation", "last step")
START_SECONDS = 30
"""The start-up's --timeout under srun, which tells nobody of a rank that has gone."""
EARLY_SECONDS = {"srun": START_SECONDS + 30, "srun-kill": 5}
"""In which such a job has ended: each rank counts from where it begins to wait; and with
--kill-on-bad-exit=1 srun sends SIGTERM, and then SIGKILL."""
CODES = (6, 128 + signal.SIGKILL, signal.SIGKILL)
"""The survivors', or the victim's as a launcher reports it; Hydra gives the signal alone."""


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    launcher = parameters["launchers"][number % len(parameters["launchers"])]
    ranks = dice.choice(parameters["ranks"])
    moment = dice.choice(MOMENTS)
    return {
        "launcher": launcher,
        "ranks": ranks,
        "victim": dice.randrange(ranks),
        "moment": moment,
        # The seconds count from when the rank is there, the share is of the steps.
        "seconds": round(dice.uniform(0, 1.5), 3),
        "share": round(dice.random(), 3),
        "count": dice.randint(1, 6),
    }


@contextlib.contextmanager
def find_launcher(name: str, laboratory: Laboratory) -> Iterator[launchers.Launcher]:
    """A row of the table, or ``srun`` or ``srun-kill`` on the cluster."""
    if not name.startswith("srun"):
        yield launchers.table()[name]
        return
    with laboratory.cluster() as cluster:
        ends_all = int(name == "srun-kill")
        yield cluster.srun("--nodes=2", f"--kill-on-bad-exit={ends_all}")


def make_rule(choice: Mapping[str, Any], steps: int) -> dict[str, Any]:
    count = choice["count"]
    event = {
        "step": {"event": "step", "count": 1 + int(choice["share"] * (steps - 1))},
        "last step": {"event": "step", "count": steps},
        "save": {"event": "open", "path": PARTIAL, "count": min(count, 4)},
        "evaluation": {"event": "evaluation", "count": count},
    }[choice["moment"]]
    return make_signal(choice["victim"], signal.SIGKILL, **event)


def break_off(
    training: Training, choice: Mapping[str, Any], steps: int
) -> tuple[Times, launchers.Result]:
    """Start it, and kill a rank; what remains, and how long that took."""
    is_start = choice["moment"] == "start"
    rules = None if is_start else [make_rule(choice, steps)]
    with training.start(rules) as job:
        if is_start:
            victim = job.rank(choice["victim"])
            time.sleep(choice["seconds"])
            os.kill(victim, signal.SIGKILL)
            since = time.time()
        else:
            since = training.await_fired(job)["time"]
        survivors = [process for rank, process in job.ranks().items() if rank != choice["victim"]]
        return watch_end(job, since, survivors), job.wait()


def is_early(choice: Mapping[str, Any], result: launchers.Result) -> bool:
    """Whether a job under srun has ended before its ranks knew each other."""
    is_start = choice["moment"] == "start" and choice["launcher"] in EARLY_SECONDS
    return is_start and result.returncode in EARLY_ENDS and not KNOWN.search(result.stderr)


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    # Ranks that have not found each other yet have no lifeline.
    waits = choice["launcher"] == "srun" and choice["moment"] == "start"
    options = (*SAVING, *(["--timeout", str(START_SECONDS)] if waits else []))
    steps = laboratory.find_whole(choice["ranks"], options).read_steps()
    with find_launcher(choice["launcher"], laboratory) as launcher:
        training = Training(folder, choice["ranks"], options, launcher)
        times, result = break_off(training, choice, steps)
        if is_early(choice, result):
            assert times.gone <= EARLY_SECONDS[choice["launcher"]], f"{times.gone:.1f} s: {result}"
            training.finish()
            laboratory.check_end(training)
            return Finding(f"{EARLY_ENDS[result.returncode]} in the start-up, bitwise equal")
        assert result.returncode in CODES, result
        assert training.read_outcome().get("code", 6) == 6, result
        _, lost = laboratory.go_on(training)
    return Finding("resumed, bitwise equal", times.detected, times.gone, lost)


KILL = Family(choose, attempt)


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


def choose_save(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    point = list(POINTS)[number % len(POINTS)]
    return {
        "point": point,
        "victim": dice.randrange(RANKS),
        # Older ones are removed from the third save on.
        "save": dice.randint(3 if point == "older ones are removed" else 1, 7),
    }


def make_save_rule(choice: Mapping[str, Any]) -> dict[str, Any]:
    event, path = POINTS[choice["point"]]
    save, victim = choice["save"], choice["victim"]
    # The third save removes the first one's.
    removed = 2 * (choice["point"] == "older ones are removed")
    folder = rf"/step-{(save - removed) * INTERVAL}"
    # Each rank writes its shard; the rest is rank 0's work.
    rank = victim if choice["point"] == "shards" else 0
    path = folder + (path if removed else rf"\.[\w-]+{path}")
    return make_signal(rank, signal.SIGKILL, [victim], event=event, path=path)


def attempt_save(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    training = Training(folder, RANKS)
    times, result = training.break_off(make_save_rule(choice))
    assert result.returncode in CODES, result
    resumed, lost = laboratory.go_on(training)
    # Training went on while it was written.
    begun = choice["save"] * INTERVAL
    assert begun - resumed <= INTERVAL, f"step {resumed} is left of a save of step {begun}"
    return Finding("resumed, bitwise equal", times.detected, times.gone, lost)


SAVE = Family(choose_save, attempt_save)
