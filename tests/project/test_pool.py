"""Ranks that stay: how a pool is replaced whose ranks have ended."""

from __future__ import annotations

import os
import signal

import pytest

import launchers
import mpiddp
from pool import Pools

pytestmark = pytest.mark.mpi


def find_process(session):
    return os.getpid()


@pytest.mark.parametrize("how", [pytest.param("asked for again", marks=pytest.mark.long), "closed"])
def test_a_rank_that_ends_between_two_calls_is_reported(how):
    pools = Pools()
    ranks = pools("openmpi", 2)
    os.kill(ranks.call(find_process).values[1], signal.SIGKILL)
    launchers.until(lambda: not ranks.is_running, "the end")
    said = "the ranks did not end well: rank 1 of 2"
    with pytest.raises((AssertionError, mpiddp.MpiddpError), match=said):
        pools("openmpi", 2) if how == "asked for again" else pools.close()
    assert ranks.is_ended
    if how == "asked for again":
        assert pools("openmpi", 2).is_running
    pools.close()
