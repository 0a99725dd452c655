"""How ranks wait: which policy all of them agree on, what it does, and when it gives up."""

from __future__ import annotations

import itertools
import math
import os
import time

import pytest

from mpiddp.collectives.waiting import (
    FIRST_PAUSE,
    FIRST_SPINS,
    FIRST_YIELDS,
    LONGEST_PAUSE,
    ROUNDS_PER_LOOK,
    SPINS,
    Policy,
    Waiter,
    choose_policy,
    count_cores,
    find_quota,
)
from mpiddp.errors import ConfigurationError, PeerLostError

POLICIES = pytest.mark.parametrize("policy", list(Policy), ids=lambda policy: policy.value)


# ---- choosing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "policy"),
    [
        ([(4, 4)], Policy.SPIN),
        ([(1, 8)], Policy.SPIN),
        ([(4, 3)], Policy.YIELD),
        ([(2, 4), (2, 1)], Policy.YIELD),
        ([(2, 2), (3, 4)], Policy.SPIN),
    ],
)
def test_ranks_yield_everywhere_if_they_crowd_one_node(nodes, policy):
    assert choose_policy([""] * sum(ranks for ranks, _ in nodes), nodes) is policy


@POLICIES
def test_a_wish_of_all_ranks_is_fulfilled_on_any_node(policy):
    for nodes in ([(3, 1)], [(3, 8)]):
        assert choose_policy([policy.value] * 3, nodes) is policy


@pytest.mark.parametrize("wish", ["SPIN", "busy", " ", "spin,yield"])
def test_a_wish_that_is_no_policy_is_refused_with_those_that_exist(wish):
    with pytest.raises(ConfigurationError) as found:
        choose_policy(["spin", wish], [(2, 2)])
    assert str(found.value) == (
        f"MPIDDP_WAIT on rank 1: expected spin, yield, sleep, found {wish!r}"
    )


@pytest.mark.parametrize(
    ("wishes", "odd"), [(["spin", "spin", "sleep"], 2), (["", "yield"], 1), (["yield", ""], 1)]
)
def test_wishes_that_differ_are_refused_with_the_first_that_does(wishes, odd):
    with pytest.raises(ConfigurationError) as found:
        choose_policy(wishes, [(len(wishes), 8)])
    assert str(found.value) == (
        f"MPIDDP_WAIT must be the same on all ranks: rank 0 has {wishes[0]!r}, rank {odd} has "
        f"{wishes[odd]!r}"
    )


def test_cores_that_two_ranks_share_count_once():
    assert count_cores([[0, 1], [1, 2], [0]]) == 3
    assert count_cores([[5], [5]]) == 1


# ---- waiting ------------------------------------------------------------------------------


class Counter:
    """A test that becomes true the ``n``-th time."""

    def __init__(self, n: int) -> None:
        self.calls, self.n = 0, n

    def __call__(self) -> bool:
        self.calls += 1
        return self.calls >= self.n


def complain() -> str:
    raise AssertionError("nobody failed")


@POLICIES
@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_wait_ends_at_the_first_test_that_is_true(policy, n):
    test = Counter(n)
    Waiter(policy, 30.0).wait(test, complain)
    assert test.calls == n


@pytest.mark.parametrize("n", [SPINS + 1, SPINS + ROUNDS_PER_LOOK + 3])
def test_a_wait_goes_on_after_spinning(n):
    test = Counter(n)
    Waiter(Policy.SPIN, 30.0).wait(test, complain)
    assert test.calls == n


def test_who_spins_keeps_its_core_at_first_and_who_yields_gives_it_away_at_once(monkeypatch):
    yields = itertools.count()
    monkeypatch.setattr(os, "sched_yield", lambda: next(yields))
    Waiter(Policy.SPIN, 30.0).wait(Counter(SPINS), complain)
    assert next(yields) == 0
    Waiter(Policy.YIELD, 30.0).wait(Counter(6), complain)
    assert next(yields) == 1 + 5
    Waiter(Policy.SPIN, 30.0).wait(Counter(SPINS + 4), complain)
    assert next(yields) == 1 + 5 + 1 + 3


def test_the_first_pauses_are_short_and_those_of_the_policy():
    spins, yields, sleeps = (Waiter(policy, 30.0).first_pauses for policy in Policy)
    assert (len(spins), len(yields), sleeps) == (FIRST_SPINS, FIRST_YIELDS, ())
    assert set(yields) == {os.sched_yield} and os.sched_yield not in spins


def test_who_sleeps_sleeps_longer_each_time_up_to_a_millisecond(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    Waiter(Policy.SLEEP, 30.0).wait(Counter(12), complain)
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert len(pauses) == 11 and pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE == 1e-3


@POLICIES
def test_a_wait_ends_with_an_error_that_says_for_whom_and_how_long(policy):
    begin = time.monotonic()
    with pytest.raises(PeerLostError) as found:
        Waiter(policy, 0.2).wait(lambda: False, lambda: "ring, in step 2: waited for rank 5")
    assert time.monotonic() - begin >= 0.2
    text = str(found.value)
    assert text.startswith("ring, in step 2: waited for rank 5 for 0.2 s: ")
    assert "MPIDDP_DEBUG=1" in text and "longer timeout" in text
    assert "\n" not in text


@POLICIES
def test_an_error_of_the_test_itself_ends_the_wait(policy):
    def test() -> bool:
        raise ConfigurationError("another call")

    with pytest.raises(ConfigurationError, match="another call"):
        Waiter(policy, 30.0).wait(test, complain)


@POLICIES
def test_a_rank_that_was_stopped_itself_looks_once_more_before_it_gives_up(policy, monkeypatch):
    # As after SIGSTOP and SIGCONT: the clock has gone on, and so have the others.
    clock, arrived = [0.0], []

    def pass_time(*_: object) -> None:
        clock[0] += 100.0
        arrived.append(True)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", pass_time)
    monkeypatch.setattr(os, "sched_yield", pass_time)
    Waiter(policy, 10.0).wait(lambda: bool(arrived), complain)


@POLICIES
def test_a_wait_of_no_time_looks_at_least_once(policy):
    Waiter(policy, 0.0).wait(lambda: True, complain)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", math.inf), ("200000 100000", 2.0), ("50000 100000", 0.5), ("", math.inf)],
)
def test_a_containers_share_of_the_cores_is_read(text, cores, tmp_path):
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert find_quota(tmp_path / "cpu.max") == cores
    assert find_quota(tmp_path / "nowhere") == math.inf


def test_cores_are_the_ranks_together_and_no_more_than_their_container_has():
    assert count_cores([[0, 1], [1, 2]]) == 3
    assert count_cores([[0, 1], [1, 2]], [2.0, 2.0]) == 2
    assert count_cores([[0], [1]], [math.inf, math.inf]) == 2
