"""Signals that preempt a job: all ranks stop after one step, and no step is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import launchers
from attempts import Family, Finding
from laboratory import PARTIAL, SAVING, Laboratory, Training, find_resumed, make_signal

WAYS = ("one rank", "all ranks", "spread", "twice", "save", "evaluation", "start-up")
PREEMPTED = 75
AT_THE_END = ("--save-every", "1000epochs")
"""So that there is no other checkpoint than the one that is asked for."""
PAUSE = 0.01
MODULES = 5
"""Of the model, each of which an evaluation calls. In the last evaluation a signal is too late."""


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    way, ranks = WAYS[number % len(WAYS)], dice.choice(parameters["ranks"])
    # A training that TERM reaches before it has begun ends at once.
    names = parameters["signals"][: 2 if way == "start-up" else 3]
    order = dice.sample(range(ranks), ranks)
    return {
        "way": way,
        "ranks": ranks,
        "signal": dice.choice(names),
        "order": order,
        "step": dice.randint(1, 60),
        "count": dice.randint(1, 6),
        "seconds": round(dice.uniform(0, 3), 3),
    }


def make_rules(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    first = choice["order"][0]
    number = int(signal.Signals[f"SIG{choice['signal']}"])
    rule = make_signal(first, number)
    step = {"event": "step", "count": choice["step"]}
    return {
        "one rank": [rule | step],
        "all ranks": [rule | step | {"targets": choice["order"]}],
        "spread": [rule | step],
        "twice": [rule | step],
        "save": [rule | {"event": "open", "path": PARTIAL, "count": choice["count"]}],
        "evaluation": [rule | {"event": "evaluation", "count": min(choice["count"], MODULES)}],
        "start-up": [],
    }[choice["way"]]


def send_rest(choice: Mapping[str, Any], job: launchers.Job) -> None:
    """The signals that come later, to whatever is still there."""
    processes, number = job.ranks(), signal.Signals[f"SIG{choice['signal']}"]
    order, seconds = choice["order"], choice["seconds"]
    rest = {"spread": order[1:], "twice": order[:1]}.get(choice["way"], [])
    for rank in rest:
        time.sleep(seconds / len(rest))
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(processes[rank], number)


def stop(training: Training, choice: Mapping[str, Any]) -> launchers.Result:
    """Start it, and send the signals; what the job has left."""
    # As the front starts ranks of a job that can be requeued.
    prefix = ["env", "--block-signal=USR1,USR2"] if choice["way"] == "start-up" else []
    with training.start(make_rules(choice), prefix, pause=PAUSE) as job:
        if choice["way"] == "start-up":
            process = job.rank(choice["order"][0])
            time.sleep(choice["seconds"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.Signals[f"SIG{choice['signal']}"])
        else:
            training.await_fired(job)
            send_rest(choice, job)
        return job.wait()


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    options = SAVING if choice["way"] == "save" else AT_THE_END
    training = Training(folder, choice["ranks"], options)
    result = stop(training, choice)
    outcome = training.read_outcome()
    if choice["way"] == "start-up" and result.returncode == 0:
        laboratory.check_end(training)
        return Finding("was over before the signal")
    assert (result.returncode, outcome.get("code")) == (PREEMPTED, PREEMPTED), result
    (line,) = re.findall(r"preempted after step (\d+): SIG(\w+) reached rank \d", result.output)
    assert line == (str(outcome["step"]), choice["signal"]), result
    names = [path.name for path in (training.run / "checkpoints").glob("step-*")]
    assert f"step-{outcome['step']}" in names, names
    written = result.output.count("Checkpoint written")
    assert (written == len(names) == 1) or choice["way"] == "save", result
    resumed = find_resumed(training.finish())
    assert resumed == outcome["step"]
    laboratory.check_end(training)
    return Finding("stopped after one step, resumed, bitwise equal", lost_steps=0)


SIGNAL = Family(choose, attempt)
