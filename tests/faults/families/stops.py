"""Ranks that do not go on: stopped, cut off, in a step that has no end."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import slurm
from attempts import Family, Finding
from families.kills import CODES
from laboratory import SAVING, Laboratory, Times, Training, make_signal


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
