"""Which rank the others wait for."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from mpiddp.training.rank_costs import SHORTEST, SLOW, RankCosts, describe_slow_rank
from mpiddp.training.step.stages import Costs, StepStage

STEPS = 100


def rank(
    read: float = 0.0, forward: float = 1.0, waited: float = 0.0, steps: int = STEPS
) -> RankCosts:
    seconds = [0.0] * len(StepStage)
    seconds[StepStage.READ], seconds[StepStage.FORWARD] = read, forward
    seconds[StepStage.COMMUNICATION] = waited
    return RankCosts("node1", Costs(seconds, steps), 10**8, None)


def test_the_rank_that_waits_least_is_named_with_what_is_slow() -> None:
    usual = rank(waited=2.0)
    line = describe_slow_rank([usual, usual, rank(forward=3.0, waited=0.1)])
    assert line == (
        "Straggler: rank 2 on node1 takes 3.0 times as long as the others, computing 30.0 ms of a "
        "step instead of 10.0"
    )
    line = describe_slow_rank([rank(read=2.0), usual, usual])
    assert line.endswith("reading 20.0 ms of a step instead of 0.0") and "rank 0" in line


def test_nobody_is_named_for_little() -> None:
    usual = rank(waited=1.0)
    assert describe_slow_rank([usual, rank(forward=SLOW - 0.01)]) is None
    assert describe_slow_rank([rank()]) is None
    quick = rank(forward=SHORTEST / 2, waited=1.0)
    assert describe_slow_rank([quick, rank(forward=SHORTEST)]) is None


def test_a_busy_rank_that_waits_holds_nobody_up() -> None:
    """Its work takes long, but it is done before the others': what they wait for is another."""
    assert describe_slow_rank([rank(waited=0.0), rank(forward=3.0, waited=1.0)]) is None


def test_ranks_that_only_serve_are_left_out() -> None:
    server = rank(forward=0.0, steps=0)
    assert describe_slow_rank([server, rank()]) is None
    line = describe_slow_rank([server, rank(waited=2.0), rank(forward=3.0)])
    assert line is not None and "rank 2" in line


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.data())
def test_workers_that_took_different_numbers_of_steps_are_compared_by_step(steps, data):
    slow = data.draw(st.integers(0, len(steps) - 1))
    found = [
        rank(forward=(3.0 if place == slow else 1.0) * count, waited=2.0 * count, steps=count)
        for place, count in enumerate(steps)
    ]
    found[slow].costs.seconds[StepStage.COMMUNICATION] = 0
    line = describe_slow_rank(found)
    assert re.match(rf"Straggler: rank {slow} on node1 takes 3.0 times", line)
