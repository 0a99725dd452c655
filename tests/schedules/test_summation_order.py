"""What is known of a schedule's sums: where they are complete, and in which order they are made."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import promises
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.proof import find_sums, is_order_fixed, prove, replay
from mpiddp.schedules.schedule import all_reduce, halve, segment

AT_ONCE = {"one-shot", "direct", "central", "gather-broadcast"}
"""Every sum is one addition of contributions as they were."""
IN_ORDER = AT_ONCE | {"naive-ring", "recursive-doubling", "binomial-tree", "bine"}
"""One tree of additions for all elements, whatever the number of ranks."""


def find_final_by_sets(schedule):
    """The same by playing the schedule on sets of ranks."""
    whole = frozenset(schedule.members)
    states = replay(
        schedule, lambda rank, _: frozenset([rank]), lambda sets: frozenset().union(*sets)
    )
    next(states)
    final = set()
    for number, state in enumerate(states):
        for _, dst, lo, hi, reduce in schedule.steps[number]:
            for chunk in range(lo, hi):
                if reduce and state[dst][chunk] == whole:
                    final.add((number, dst, chunk))
    return final


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_a_sum_is_final_where_every_contribution_is_in_it(name, ranks):
    for schedule in promises.list_variants(promises.build(name, ranks)):
        if schedule.collective in oracle.SUMS:
            assert find_sums(schedule).final == find_final_by_sets(schedule)


@pytest.mark.parametrize("name", registry.names())
def test_sums_of_two_ranks_are_made_at_once_and_of_more_by_some_algorithms(name):
    whole = promises.build(name, 2)
    assert is_order_fixed(whole) and is_order_fixed(promises.build(name, 1))
    if registry.is_built_in(registry.parse(name)):
        assert find_sums(whole).is_single
        for ranks in (4, 5):
            assert find_sums(promises.build(name, ranks)).is_single == (name in AT_ONCE)


BACK = [copy(0, 1), copy(0, 2)]
# Rank 3, a server, takes the sum of two and rank 2's.
SERVED = [[add(0, 1)], [add(1, 3), add(2, 3)], [copy(3, 0), copy(3, 1), copy(3, 2)]]
# Server 2 takes the sum of both as it is. An average would be divided once more.
PASSED_ON = [[add(0, 1)], [add(1, 2)], [copy(2, 0)]]
# One chunk that is added in steps is enough.
TWO = [[add(1, 0), add(2, 0), add(0, 1, 1)], [add(2, 1, 1)]]
TWO_BACK = [copy(0, 1), copy(0, 2), copy(1, 0, 1), copy(1, 2, 1)]


@pytest.mark.parametrize(
    ("schedule", "is_single", "final"),
    [
        (all_reduce(3, 1, [[add(1, 0)], [add(2, 0)], BACK]), False, {(1, 0, 0)}),
        (all_reduce(3, 1, [[add(1, 0), add(2, 0)], BACK]), True, {(0, 0, 0)}),
        (all_reduce(4, 1, SERVED, members=[0, 1, 2]), False, {(1, 3, 0)}),
        (all_reduce(3, 1, PASSED_ON, members=[0, 1]), False, {(0, 1, 0)}),
        (all_reduce(3, 2, [*TWO, TWO_BACK]), False, {(0, 0, 0), (1, 1, 1)}),
    ],
)
def test_which_sums_are_made_at_once_and_where_they_are_complete(schedule, is_single, final):
    prove(schedule)
    sums = find_sums(schedule)
    assert (sums.is_single, sums.final) == (is_single, final)


def draw_floats(ranks, count, seed):
    numbers = np.random.default_rng(seed)
    scale = 2.0 ** numbers.integers(-12, 12, count)
    return [(numbers.standard_normal(count) * scale).astype("f4") for _ in range(ranks)]


def sum_in_pieces(schedule, before, cuts):
    """The sum of each element, with a call for each piece of the buffer."""
    edges = [0, *cuts, len(before[0])]
    pieces = []
    for lo, hi in itertools.pairwise(edges):
        part = [buffer[lo:hi] for buffer in before]
        after = oracle.run(schedule, part, seed=0)
        result = np.empty(hi - lo, "f4")
        bounds = schedule.bounds(hi - lo)
        for chunk in range(schedule.chunks):
            place = slice(bounds[chunk], bounds[chunk + 1])
            result[place] = after[schedule.holders(chunk)[0]][place]
        pieces.append(result)
    return np.concatenate(pieces)


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=12)
@given(st.data())
def test_where_the_order_is_fixed_no_cut_changes_a_bit(name, data):
    ranks = data.draw(st.integers(1, 6), "ranks")
    schedules = [
        schedule
        for schedule in promises.list_variants(promises.build(name, ranks))
        if schedule.collective in oracle.SUMS and is_order_fixed(schedule)
    ]
    if not schedules:
        return
    schedule = data.draw(st.sampled_from(schedules), "schedule")
    count = data.draw(st.integers(1, 50), "count")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, count - 1)), max_size=4), "cuts"))
    cuts = [cut for cut in cuts if cut < count]
    before = draw_floats(ranks, count, data.draw(st.integers(0, 99), "seed"))
    whole = sum_in_pieces(schedule, before, [])
    assert sum_in_pieces(schedule, before, cuts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("ranks", [3, 4, 5, 7, 8])
def test_some_algorithms_add_all_elements_alike(ranks):
    found = {
        name
        for name in registry.names()
        if registry.is_built_in(registry.parse(name))
        and is_order_fixed(promises.build(name, ranks))
    }
    # Two trees over three or four ranks need not be the same, but halving is for a power of two.
    assert found >= IN_ORDER
    assert found.isdisjoint({"ring"})
    for name in IN_ORDER:
        assert is_order_fixed(segment(promises.build(name, ranks), 4))
    # Where nothing is added, it is.
    assert is_order_fixed(halve(promises.build("ring", ranks))[1])


def test_a_sum_that_ends_differently_in_one_chunk_has_no_fixed_order():
    back = [[copy(0, rank, chunk) for rank in (1, 2) for chunk in (0, 1)]]
    left = [add(1, 0, 0), add(2, 0, 0)]
    same = all_reduce(3, 2, [[*left, add(1, 0, 1), add(2, 0, 1)], *back])
    assert is_order_fixed(same)
    # (a + b) + c against a + (b + c).
    other = all_reduce(3, 2, [[*left, add(2, 1, 1)], [add(1, 0, 1)], *back])
    assert not is_order_fixed(other)
