"""How ranks of a node meet, and how they wait: who differs, fails or does not come is named."""

import os
import random
import re
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from crews import Crew
from mpiddp.collectives import bootstrap
from mpiddp.collectives.executor import Description
from mpiddp.collectives.planner import CallRequest
from mpiddp.collectives.transport import node_memory
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
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.mpi.pauses import FIRST_PAUSE, PAUSE_SHARE
from mpiddp.schedules.schedule import Collective

DESCRIPTION = Description("all_reduce (ring over shared-memory)", 4, {1: "n17", 2: "n17"})


def describe(rank: int) -> str:
    return DESCRIPTION.describe_wait(0, rank)


def make_pair(*, call: int | None = None, seconds: float = 0.2):
    """Both have begun ``call``, if it is given."""
    pair = Crew([0, 0], seconds=seconds).node_memories
    for each in () if call is None else pair:
        each.enter(call, None)
    return pair


def exchange(node_memory, signature, adds, buffer=b""):
    add = [lambda: adds.append(1)]
    return node_memory.exchange(signature, memoryview(buffer), (add, add), describe)


def test_another_call_is_an_error_at_the_rank_that_looks():
    one, other = make_pair()
    one.enter(5, None)
    other.enter(6, None)
    with pytest.raises(ConfigurationError) as found:
        one.meet([1], 5, describe)
    assert re.match("rank 1 makes another .* than rank 0, .*: MPIDDP_DEBUG=1", str(found.value))
    with pytest.raises(ConfigurationError, match=r"rank 0 makes another .* than rank 1"):
        other.meet([0], 6, describe)
    # Who waits for the one that found it hears of that, in an exchange as well.
    other.give_up(found.value)
    with pytest.raises(ConfigurationError, match="not all ranks make the same collective call"):
        one.wait(1, 2, lambda: describe(1))()
    one, other = make_pair(call=1)
    one.enter(5, None)
    with pytest.raises(ConfigurationError, match="rank 0 makes another collective call"):
        exchange(other, 6, [])()


def test_who_waits_for_a_rank_whose_call_failed_hears_of_it_at_once():
    one, other = make_pair(call=5, seconds=30.0)
    other.publish(1)()
    other.give_up(PeerLostError("rank 2 is gone"))
    begin = time.monotonic()
    # What it did before, it did.
    one.meet([1], 5, describe)
    one.wait(1, 1, lambda: describe(1))()
    failed = "waited for rank 1 on n17, whose own call failed"
    with pytest.raises(PeerLostError, match=f"at its end: {failed}"):
        one.wait(1, 2, lambda: DESCRIPTION.describe_wait(4, 1))()
    with pytest.raises(PeerLostError, match=failed):
        exchange(one, 5, [])()
    one.enter(6, None)
    with pytest.raises(PeerLostError, match=failed):
        one.meet([1], 6, describe)
    assert time.monotonic() - begin < 10


def test_a_rank_that_fails_in_its_next_call_has_made_this_one():
    one, other = make_pair(call=5, seconds=30.0)

    class Words:
        """Between two looks the other rank completes its call, and fails in the next one."""

        def __getitem__(self, index):
            found = words[index]
            other.enter(6, None)
            other.give_up(PeerLostError("rank 2 is gone"))
            return found

    words, one.words = one.words, Words()
    assert one.has_reached(node_memory.WORDS, one.base + 2, lambda: describe(1))


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_rank_that_has_left_the_call_and_makes_another_one_is_no_error(ahead):
    one, other = make_pair(call=5)
    for number in range(ahead):
        other.enter(100 + number, None)
        other.publish(3)()
    one.meet([1], 5, describe)
    one.wait(1, node_memory.NEXT_CALL - 1, lambda: describe(1))()


def test_memory_that_the_kernel_does_not_let_map_is_done_without():
    place = {"process": os.getpid(), "block": -1, "token": b""}
    facts = [SimpleNamespace(has_order=True, namespace="", **place)] * 2
    block, reach = bootstrap._reach(facts, [0, 1], 1, None)
    said = "rank 1 cannot map rank 0's memory (No such file or directory)"
    assert (block, reach.memory, reach.copies) == (None, said, said)


def test_a_rank_that_does_not_come_is_named_with_its_host_and_the_step():
    one, other = make_pair()
    other.enter(5, None)
    other.publish(7)()
    one.enter(5, None)
    one.enter(6, None)
    begin = time.monotonic()
    with pytest.raises(PeerLostError) as found:
        # It is late, with a call of before.
        one.meet([1], 6, describe)
    assert time.monotonic() - begin >= 0.2
    assert str(found.value).startswith(
        "all_reduce (ring over shared-memory), in step 1 of 4: waited for rank 1 on n17 for 0.2 s:"
    )
    assert "MPIDDP_DEBUG=1" in str(found.value) and "increase --timeout" in str(found.value)
    # The stages of a call of before do not count.
    other.enter(6, None)
    with pytest.raises(PeerLostError, match=r"in step 3 of 4: waited for rank 1 on n17 for 0\.2 s"):
        one.wait(1, 1, lambda: DESCRIPTION.describe_wait(2, 1))()
    other.publish(1)()
    one.wait(1, 1, lambda: describe(1))()
    with pytest.raises(PeerLostError, match="waited for rank 1 on n17"):
        exchange(one, 5, [])()


def test_messages_go_on_while_a_rank_waits():
    one, other = make_pair(seconds=20)
    turns = []

    def progress() -> None:
        turns.append(len(turns))
        if len(turns) == 4:
            other.enter(5, None)
        if len(turns) == 8:
            other.publish(1)()

    # Where a call begins, too: a message of the call before may still be under way.
    one.help_in_waits(progress)
    one.enter(5, None)
    one.meet([1], 5, describe)
    assert len(turns) == 4
    one.wait(1, 1, lambda: describe(1))()
    assert len(turns) == 8


def test_a_rank_yields_its_core_to_another_rank_and_to_nobody_else(monkeypatch):
    one, other = make_pair()
    yields, core = [], [0]
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(core[0]))
    monkeypatch.setattr(node_memory, "_find_core", lambda: core[0])

    def pause(memory: node_memory.NodeMemory, place: int) -> bool:
        """Whether it yields between two looks on that core."""
        yields.clear()
        core[0] = place
        memory._spare_core()
        return bool(yields)

    # Neither has waited, or the library does not tell: what is unknown is not the same.
    assert not pause(one, -1) and not pause(other, -1)
    assert not pause(one, 0) and pause(other, 0) and pause(one, 0)
    # One is moved, and the other hears of it when it looks again.
    assert not pause(one, 1) and not pause(other, 0) and pause(other, 1)


def test_ranks_that_make_the_same_call_meet_after_days_of_short_calls():
    one, other = make_pair()
    for each in (one, other):
        each.base = (2**39 - 5) * node_memory.NEXT_CALL
    for signature in (node_memory.NEXT_CALL - 1, 7, 7, 8):
        one.enter(signature, None)
        other.enter(signature, None)
        one.meet([1], signature, describe)
        other.meet([0], signature, describe)


def test_each_rank_tells_where_its_buffer_lies():
    one, other = make_pair()
    places = [
        node_memory.Location(node_memory.PRIVATE, 2**47 + 5),
        node_memory.Location(node_memory.SEGMENT, 3, 12, 4096),
        node_memory.Location(node_memory.SEGMENT, 3, 12, 4096),
        node_memory.Location(node_memory.PRIVATE, 2**47 + 5),
        node_memory.Location(node_memory.PRIVATE, 0),
    ]
    versions = []
    for place in places:
        other.enter(5, place)
        one.enter(5, node_memory.Location(node_memory.PRIVATE, 77))
        assert one.location(1) == place
        assert other.location(0) == node_memory.Location(node_memory.PRIVATE, 77)
        versions.append((one.versions([1]), other.versions([0])))
    # Whoever kept what it knew of the buffer sees that it lies elsewhere.
    assert [now[0] != before[0] for before, now in pairwise(versions)] == [True, False, True, True]
    assert len({version for _, version in versions}) == 1


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (3, 77), (4, node_memory.MAILBOX // 4)])
def test_exchanges_and_calls_in_memory_take_turns_in_any_rhythm(ranks, count):
    crew = Crew([0] * ranks)
    one_shot = CallRequest(Collective.ALL_REDUCE, "one-shot")
    broadcast = CallRequest(Collective.BROADCAST, "binomial-tree", root=ranks - 1)
    turns = random.Random(count).choices("ooob", k=40)

    def part(rank, communicator):
        dice = random.Random(rank)
        wrong = 0
        for number, kind in enumerate(turns):
            if dice.random() < 0.2:
                time.sleep(0.001 * dice.random())
            tensor = torch.full((count,), float(number * ranks + rank), dtype=torch.float32)
            communicator.run(one_shot if kind == "o" else broadcast, tensor)
            expected = sum(range(number * ranks, (number + 1) * ranks))
            if kind == "b":
                expected = number * ranks + ranks - 1
            wrong += not tensor.eq(expected).all()
        return wrong

    assert crew.run(part) == [0] * ranks


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
    # Without a count of spare cores a rank soon sleeps: others may need its core.
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
