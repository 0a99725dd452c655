"""The exit code of a job: from its outcome, from what srun said, from signals."""

from __future__ import annotations

import itertools
import signal

import pytest

from mpiddp.front.job_end import Exit, describe_code, find_end, find_failure

CRASHED = "node1: task 0: Segmentation fault (core dumped)"
LEFT = "node1: task 1: Exited with exit code 3"
KILLED = "node2: tasks 2-3: Killed"
TERMINATED = "node2: task 4: Terminated"
NODE = "Node failure on node3"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ([TERMINATED], TERMINATED),
        ([KILLED, TERMINATED, LEFT], LEFT),
        ([LEFT, KILLED, CRASHED], CRASHED),
        ([CRASHED, KILLED, NODE], NODE),
        # Above 128 the rank was killed by a signal, and a shell around it said so.
        (["node1: task 1: Exited with exit code 137", KILLED], KILLED),
    ],
)
def test_the_cause_is_found_in_any_order(said, cause):
    around = ["srun: Job step aborted: Waiting up to 12 seconds.", "a line of the script's own"]
    for order in itertools.permutations(said):
        lines = [f"srun: error: {text}" for text in order]
        assert find_failure([*around, *lines, "task 9: Killed"]) == cause


@pytest.mark.parametrize(
    ("found", "code", "parts"),
    [
        (Exit(7), 7, []),
        (Exit(137, LEFT), 3, [LEFT, "srun's code was 137"]),
        (Exit(137, KILLED), 6, [KILLED]),
        (Exit(1, NODE), 6, [NODE]),
        # A script that was told to end may have a code of its own for that; mpirun says 1.
        (Exit(75, "", signal.SIGTERM), 75, []),
        (Exit(1, "", signal.SIGTERM), 143, ["mpiddp was sent SIGTERM; srun's code was 1"]),
        (Exit(0, "", signal.SIGUSR1), 0, []),
        (Exit(137, LEFT, outcome={"code": 4, "reason": "far\naway"}), 4, ["far; srun's code"]),
        (Exit(0, outcome={"code": 0, "reason": "done", "path": "runs/x"}), 0, ["runs/x"]),
        (Exit(134, outcome={"code": 0}), 0, ["srun's code was 134"]),
        (Exit(143, "node1: task 0: Exited with exit code 143", outcome={"code": 143}), 143, []),
        (Exit(9, outcome={"code": "4"}), 9, []),
        # Ranks that srun terminated because one was killed wrote that down.
        (Exit(143, KILLED, outcome={"code": 143}), 6, ["srun terminated the others"]),
        (Exit(143, KILLED, signal.SIGTERM, {"code": 143}), 143, []),
        # The one that went first after Ctrl-C is missed by the others.
        (Exit(137, "", signal.SIGINT, {"code": 6}), 130, ["mpiddp was sent SIGINT"]),
        (Exit(137, "", signal.SIGINT, {"code": 4, "reason": "no"}), 4, []),
    ],
)
def test_the_code_and_where_it_comes_from(found, code, parts):
    end = find_end(found, "srun")
    assert end.code == code
    assert [part for part in parts if part not in str(end)] == []
    assert parts or found.outcome or end.why == ""


def test_codes_of_signals_are_named_and_those_of_a_program_without_a_launcher_kept():
    assert describe_code(128 + signal.SIGSEGV) == "signal 11 (SIGSEGV) killed it"
    assert describe_code(77) == describe_code(255) == "a code that the program chose"
    assert find_end(Exit(9, "", signal.SIGTERM), None).code == 9
