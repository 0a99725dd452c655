"""Ranks that fail by themselves, or do not go on: stopped, cut off, in a step that has no end."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import launchers
import slurm
from attempts import Family, Finding
from families.kills import CODES
from laboratory import SAVING, Laboratory, Times, Training, make_signal

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


def choose_still(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    way = ("stopped", "link cut")[number % 5 in (1, 3)]
    ranks = 4 if way == "link cut" else dice.choice(parameters["ranks"])
    return {
        "way": way,
        "ranks": ranks,
        # Rank 0 in each other attempt; node1 has ranks 0 and 1.
        "victim": 0 if number % 2 else dice.randrange(ranks),
        "step": dice.randint(1, 60),
        "seconds": parameters["seconds"],
    }


def attempt_still(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    options = (*SAVING, "--lifeline-timeout", str(choice["seconds"]))
    if choice["way"] == "stopped":
        training = Training(folder, choice["ranks"], options)
        times, output = stop_rank(training, choice)
        _, lost = laboratory.go_on(training)
    else:
        with laboratory.cluster() as cluster:
            flags = ("--nodelist=node[1-2]", "--nodes=2", "--ntasks-per-node=2")
            launcher = cluster.srun(*flags, "--kill-on-bad-exit=0")
            training = Training(folder, choice["ranks"], options, launcher)
            times, output = cut_link(training, choice, cluster)
            _, lost = laboratory.go_on(training)
    named = [choice["victim"]] if choice["way"] == "stopped" else [0, 2]
    for rank in named:
        assert re.search(rf"mpiddp: rank {rank} of \d on \S+ was lost", output), output
    return Finding("named, resumed, bitwise equal", times.detected, times.gone, lost)


def stop_rank(training: Training, choice: Mapping[str, Any]) -> tuple[Times, str]:
    rule = make_signal(choice["victim"], signal.SIGSTOP, event="step", count=choice["step"])
    times, result = training.break_off(rule)
    assert result.returncode in CODES, result
    return times, result.output


def cut_link(
    training: Training, choice: Mapping[str, Any], cluster: slurm.Cluster
) -> tuple[Times, str]:
    """srun itself waits for a node that it cannot reach; the ranks on both sides must end."""
    node = f"node{1 + choice['victim'] // 2}"
    rule = {"rank": 0, "event": "step", "count": choice["step"], "action": "note_only"}
    with training.start([rule], pause=0.02) as job:
        training.await_fired(job)
        try:
            cluster.must("cut", node)
            since = time.time()
            job.until(lambda: not cluster.list_on_node(job), "the ranks to end")
            gone = time.time() - since
        finally:
            cluster.must("heal", node)
        return Times(gone, gone), job.wait().output


STILL = Family(choose_still, attempt_still)


def choose_endless(dice: Random, number: int, parameters: Mapping[str, Any]) -> dict[str, Any]:
    ranks = dice.choice(parameters["ranks"])
    return {
        "action": ("spin", "hold_lock")[number % 2],
        "ranks": ranks,
        "victim": 0 if number // 2 % 2 else dice.randrange(ranks),
        "step": dice.randint(1, 60),
        "seconds": parameters["seconds"],
    }


def attempt_endless(choice: Mapping[str, Any], laboratory: Laboratory, folder: Path) -> Finding:
    options = (*SAVING, "--stall-timeout", str(choice["seconds"]))
    training = Training(folder, choice["ranks"], options)
    rule = {
        "rank": choice["victim"], "event": "step", "count": choice["step"],
        "action": choice["action"],
    }  # fmt: skip
    times, result = training.break_off(rule)
    assert result.returncode in CODES, result
    assert training.read_outcome()["code"] == 6
    # The table of positions names the rank that the others wait for.
    named = rf"rank {choice['victim']} on \S+ +{choice['action']}, saboteur\.py"
    assert re.search(named, result.output), result
    _, lost = laboratory.go_on(training)
    return Finding("named, resumed, bitwise equal", times.detected, times.gone, lost)


ENDLESS = Family(choose_endless, attempt_endless)
