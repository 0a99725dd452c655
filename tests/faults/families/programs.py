"""Ranks that fail by themselves: an exception, a segmentation fault, NaN, a sample that is bad."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import launchers
from attempts import Family, Finding
from laboratory import SAVING, Laboratory, Times, Training

KINDS = ("raise", "crash", "nan", "nan, skip", "sample", "sample, skip")
CRASHED = (6, 128 + signal.SIGSEGV, signal.SIGSEGV)
SAMPLES = 640
BATCH = 8


def choose(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    ranks = dice.choice(parameters["ranks"])
    return {
        "kind": KINDS[number % len(KINDS)],
        "ranks": ranks,
        "victim": dice.randrange(ranks),
        "step": dice.randint(2, 90),
        "sample": dice.randrange(SAMPLES),
    }


def attempt(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    kind, _, policy = choice["kind"].partition(", ")
    options = (*SAVING, *(["--on-nan", policy, "--on-bad-sample", policy] if policy else []))
    training = Training(folder, choice["ranks"], options)
    times, result = break_off(training, choice, kind)
    if policy:
        check_skipped(result, training, choice, kind)
        return Finding("the same step left out on all ranks")
    check_report(result, training, choice, kind)
    _, lost = laboratory.go_on(training)
    outcome = "one report, resumed, bitwise equal"
    # When a sample is read that cannot be is not known.
    return Finding(outcome, times.detected, times.gone, lost) if times else Finding(outcome)


def break_off(
    training: Training, choice: Mapping[str, Any], kind: str
) -> tuple[Times | None, launchers.Result]:
    rule = {"rank": choice["victim"], "count": choice["step"]} | {
        "raise": {"event": "step", "action": "raise_error"},
        "crash": {"event": "step", "action": "read_address_zero"},
        "nan": {"event": "batch", "action": "spoil"},
        "sample": {"event": "open", "path": "no such path", "action": "note_only"},
    }[kind]
    if kind != "sample":
        return training.break_off(rule)
    with training.start([rule], data=["unreadable", str(choice["sample"])]) as job:
        return None, job.wait()


def check_report(
    result: launchers.Result, training: Training, choice: Mapping[str, Any], kind: str
) -> None:
    outcome, victim = training.read_outcome(), choice["victim"]
    reports = re.findall(r"mpiddp: rank (\d) of \d on ", result.stderr)
    assert len(reports) == 1, result
    if kind == "crash":
        assert result.returncode in CRASHED, result
        assert reports == [str(victim)] and "SIGSEGV" in result.stderr, result
        return
    # The first batch is tried before there is a run directory.
    is_early = kind == "sample" and choice["sample"] < BATCH
    assert (result.returncode, outcome.get("code")) == (1, None if is_early else 1), result
    if kind == "raise":
        assert reports == [str(victim)] and outcome["rank"] == victim, result
        assert result.stderr.count("RuntimeError: on purpose") == 1, result
    if kind == "nan":
        assert reports == [str(victim)] and outcome["rank"] == victim, result
        assert f"found nan in step {choice['step'] + 1}, with" in result.stderr, result
    if kind == "sample":
        assert f"training sample {choice['sample']} cannot be read" in result.stderr, result


def check_skipped(
    result: launchers.Result, training: Training, choice: Mapping[str, Any], kind: str
) -> None:
    """It has come to its end, at which ranks compare their parameters."""
    assert result.returncode == 0, result
    if kind == "nan":
        said = rf"the loss is nan in step {choice['step'] + 1}, .*: the step is left out"
        assert len(re.findall(said, result.stderr)) == 1, result
    else:
        said = rf"training sample {choice['sample']} cannot be read: .*; left out of step \d+"
        # Once in each of the epochs.
        assert len(set(re.findall(said, result.stderr))) == 4, result


PROGRAM = Family(choose, attempt)
