"""How ranks wait: which policy all of them agree on, what it does, and when it gives up."""

import os
import threading
import time

import pytest

from mpiddp.collectives.transport.waiting import (
    FIRST_SPINS,
    FIRST_YIELDS,
    LONG_POLL,
    LONGEST_PAUSE,
    POLL,
    Policy,
    Waiter,
    choose_policy,
)
from mpiddp.launch.mpi.pauses import FIRST_PAUSE, PAUSE_SHARE

POLICIES = pytest.mark.parametrize("policy", list(Policy), ids=lambda policy: policy.value)


@pytest.mark.parametrize(
    ("nodes", "policy"),
    [([(4, 4)], Policy.SPIN), ([(2, 4), (2, 1)], Policy.YIELD), ([(2, 2), (3, 4)], Policy.SPIN)],
)
def test_ranks_yield_everywhere_if_they_crowd_one_node(nodes, policy):
    size = sum(ranks for ranks, _ in nodes)
    assert choose_policy([""] * size, nodes) is policy
    for wish in Policy:
        assert choose_policy([wish.value] * size, nodes) is wish


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
def test_a_wait_ends_at_the_first_test_that_is_true(policy):
    for seconds, n in ((0.0, 1), (30.0, 1), (30.0, 2), (30.0, 7)):
        test = Counter(n)
        Waiter(policy, seconds).wait(test, complain)
        assert test.calls == n
    pauses = Waiter(policy, 30.0).first_pauses
    counts = {Policy.SPIN: FIRST_SPINS, Policy.YIELD: FIRST_YIELDS, Policy.SLEEP: 0}
    assert len(pauses) == counts[policy]
    assert {os.sched_yield} <= {*pauses} if policy is Policy.YIELD else os.sched_yield not in pauses


class Clock:
    """Time that passes by a microsecond with each look at the clock, and with sleep.

    ``stop``: seconds that pass besides in the first sleep or yield.
    """

    def __init__(self, monkeypatch, stop: float = 0.0) -> None:
        self.now, self.sleeps, self.yields, self.stop = 0.0, [], 0, stop
        monkeypatch.setattr(time, "monotonic", self.look)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(os, "sched_yield", self.give_way)

    def look(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.stop
        self.stop = 0.0
        self.sleeps.append(seconds)

    def give_way(self) -> None:
        self.now += self.stop
        self.stop = 0.0
        self.yields += 1


@pytest.mark.parametrize(
    ("policy", "look"),
    [(Policy.SPIN, LONG_POLL), (Policy.YIELD, POLL)],
    ids=lambda value: getattr(value, "value", ""),
)
def test_a_wait_looks_for_a_while_and_then_sleeps(policy, look, monkeypatch):
    clock, spared = Clock(monkeypatch), Counter(10**9)
    looks = round(look / 1e-6)
    Waiter(policy, 30.0).wait(Counter(looks - 5), complain, spared)
    assert clock.sleeps == []
    # Who spins keeps its core if no other rank needs it, and who yields gives it away at once.
    spins = policy is Policy.SPIN
    assert (spared.calls, clock.yields) == ((looks - 6, 0) if spins else (0, looks - 6))
    Waiter(policy, 30.0).wait(Counter(looks + 5), complain, spared)
    assert 1 <= len(clock.sleeps) <= 9 and clock.sleeps[0] >= FIRST_PAUSE
    # Who knows nothing of cores does not spin for long: other nodes' ranks may share the machine.
    Waiter(Policy.SPIN, 30.0).wait(Counter(round(POLL / 1e-6) + 5), complain)
    assert len(clock.sleeps) > 1
    # The kernel's slice is a tick of 4 ms with CONFIG_HZ=250, and 3 ms with 1000.
    assert LONG_POLL >= 2 * 4e-3


def test_another_thread_gives_the_interpreter_away_while_it_looks(monkeypatch):
    clock = Clock(monkeypatch)
    waiter = Waiter(Policy.SPIN, 30.0)
    spared = Counter(10**9)
    thread = threading.Thread(target=waiter.wait, args=(Counter(5), complain, spared))
    thread.start()
    thread.join()
    assert clock.sleeps == [0] * 4 and clock.yields == spared.calls == 0


def test_sleeps_are_a_share_of_the_time_waited_and_a_millisecond_at_most(monkeypatch):
    clock = Clock(monkeypatch)
    Waiter(Policy.SLEEP, 30.0).wait(Counter(100), complain)
    assert clock.sleeps[0] == FIRST_PAUSE and len(clock.sleeps) == 99
    assert clock.sleeps == sorted(clock.sleeps) and clock.sleeps[-1] == LONGEST_PAUSE == 1e-3
    waited = 0.0
    for pause in clock.sleeps:
        assert pause <= max(FIRST_PAUSE, 1.1 * PAUSE_SHARE * (waited + 1e-4))
        waited += pause


@POLICIES
@pytest.mark.parametrize("looks", [1, 1000])
def test_time_for_which_a_rank_was_stopped_itself_does_not_count(policy, looks, monkeypatch):
    # As after SIGSTOP and SIGCONT: the clock has gone on, and the others go on, or not before.
    clock = Clock(monkeypatch, stop=100.0)
    Waiter(policy, 10.0).wait(lambda: len(clock.sleeps) + clock.yields >= looks, complain)
