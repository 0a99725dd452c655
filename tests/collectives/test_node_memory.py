"""How ranks of a node meet: who makes another call is told, who is ahead is let go, who does not
come is named."""

import os
import random
import re
import time
from itertools import pairwise

import pytest
import torch

from crews import Crew
from mpiddp.collectives.executor import Description
from mpiddp.collectives.planner import CallRequest
from mpiddp.collectives.transport import node_memory
from mpiddp.errors import ConfigurationError, PeerLostError
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
