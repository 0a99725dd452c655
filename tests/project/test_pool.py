"""Ranks that stay: what a call returns, what it may change, and how a damaged pool is replaced."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch

import launchers
import mpiddp
from mpiddp.launch.failure.reports import FixedProgress
from mpiddp.launch.session import find_failure_handler
from pool import Pools

pytestmark = pytest.mark.mpi


def see(session, number):
    """What a call sees of the rank that makes it."""
    print(f"rank {session.world.rank} prints {number}", flush=True)
    os.write(2, b"and writes\n")
    return session.world.rank + number, Path.cwd(), os.environ.get("GIVEN"), os.getpid()


def test_every_rank_answers_for_itself(pool, tmp_path):
    called = pool("openmpi", 2).call(see, 10, cwd=tmp_path, env={"GIVEN": "x"})
    assert [value[:3] for value in called.values] == [(10, tmp_path, "x"), (11, tmp_path, "x")]
    assert called.stdout == ["rank 0 prints 10\n", "rank 1 prints 10\n"]
    assert called.stderr == ["and writes\n"] * 2
    again = pool("openmpi", 2).call(see, 10).values
    # The same processes, and nothing is left of the first call.
    assert [value[3] for value in again] == [value[3] for value in called.values]
    assert {value[2] for value in again} == {None} and tmp_path not in {each[1] for each in again}


def change(session):
    """Change whatever a call may change; warnings are errors."""
    with pytest.raises(UserWarning):
        warnings.warn("nobody heeds this", stacklevel=1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    torch.manual_seed(session.world.rank + 17)
    session._timeout = 1.0
    find_failure_handler(session).run = FixedProgress(step=5)


def find_state(session):
    return (
        os.sched_getaffinity(0), torch.get_default_dtype(), torch.get_num_threads(),
        torch.initial_seed(), session.timeout, find_failure_handler(session).step,
    )  # fmt: skip


def test_what_a_call_changes_is_restored(pool):
    ranks = pool("openmpi", 2)
    before = ranks.call(find_state).values
    ranks.call(change)
    assert ranks.call(find_state).values == before


def find_wait(session):
    return mpiddp.describe_collectives()["wait"]


def test_variables_that_collective_calls_read_once_are_read_again(pool):
    ranks = pool("openmpi", 2)
    usual = ranks.call(find_wait).values
    for wait in ("sleep", "yield"):
        assert ranks.call(find_wait, env={"MPIDDP_WAIT": wait}).values == [wait] * 2
    assert ranks.call(find_wait).values == usual


@pytest.mark.parametrize("how", [pytest.param("asked for again", marks=pytest.mark.long), "closed"])
def test_a_rank_that_ends_between_two_calls_is_reported(how):
    pools = Pools()
    ranks = pools("openmpi", 2)
    os.kill(ranks.call(see, 1).values[1][3], signal.SIGKILL)
    launchers.until(lambda: not ranks.is_running, "the end")
    said = "the ranks did not end well: rank 1 of 2"
    with pytest.raises((AssertionError, mpiddp.MpiddpError), match=said):
        pools("openmpi", 2) if how == "asked for again" else pools.close()
    assert ranks.is_ended
    if how == "asked for again":
        assert pools("openmpi", 2).is_running
    pools.close()
