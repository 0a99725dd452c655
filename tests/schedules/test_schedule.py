"""Schedules: how they are cut, mirrored, moved, pipelined and handed to the ranks; and the oracle
that later tests trust to run them."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import (
    MIRROR,
    Collective,
    Round,
    Schedule,
    Transfer,
    all_reduce,
    beside,
    gather_back,
    halve,
    place,
    project,
    reverse,
    reverse_steps,
    rotate,
    scatter,
    segment,
)
from prices import WITH_HALVES


@st.composite
def schedules(draw):
    """Any transfers between ranks that exist; what they do together need not make sense."""
    n, c = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    pairs = st.sampled_from(list(itertools.permutations(range(n), 2)))
    spans = st.sampled_from(list(itertools.combinations(range(c + 1), 2)))
    transfers = st.builds(
        lambda pair, span, reduce: Transfer(*pair, *span, reduce), pairs, spans, st.booleans()
    )
    steps = draw(st.lists(st.lists(transfers, max_size=6), max_size=4))
    return Schedule(
        draw(st.sampled_from(list(MIRROR))),
        n,
        c,
        tuple(map(tuple, steps)),
        tuple(range(n)),
        tuple(draw(st.lists(st.integers(0, n - 1), min_size=c, max_size=c))),
    )


# ---- making -------------------------------------------------------------------------------


@given(schedules(), st.integers(0, 300))
def test_chunks_cover_the_buffer_and_differ_by_one_element_at_most(schedule, count):
    bounds = schedule.bounds(count)
    sizes = {high - low for low, high in itertools.pairwise(bounds)}
    assert (bounds[0], bounds[-1], len(bounds)) == (0, count, schedule.chunks + 1)
    assert sizes <= {count // schedule.chunks, -(-count // schedule.chunks)}


@given(schedules())
def test_a_mirror_image_of_a_mirror_image_is_the_schedule(schedule):
    mirrored = reverse(schedule)
    assert reverse(mirrored) == schedule
    assert mirrored.collective is MIRROR[schedule.collective]
    for step, image in zip(schedule.steps, reversed(mirrored.steps), strict=True):
        for there, back in zip(step, image, strict=True):
            assert (there.src, there.dst) == (back.dst, back.src)
            assert (there.lo, there.hi, there.reduce) == (back.lo, back.hi, not back.reduce)


def test_an_all_reduce_has_no_mirror_image():
    with pytest.raises(ValueError, match="an all-reduce has no mirror image"):
        reverse(registry.parse("ring").build(3))


def test_a_scatter_to_one_owner_is_a_reduce():
    steps = [[Transfer(0, 1, 0, 1, True)]]
    assert scatter(2, steps, owners=[1]).collective is Collective.REDUCE
    two = [[Transfer(0, 1, 0, 1, True), Transfer(1, 0, 1, 2, True)]]
    assert scatter(2, two, owners=[1, 0]).collective is Collective.REDUCE_SCATTER


@pytest.mark.parametrize("name", WITH_HALVES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_halves_put_together_again_are_the_whole(name, ranks):
    whole = registry.parse(name).build(ranks)
    first, second = halve(whole)
    assert first.steps + second.steps == whole.steps
    assert first.owners == second.owners == whole.owners
    assert second.collective is MIRROR[first.collective]
    prove(gather_back(first))
    prove(gather_back(reverse(second)))


def test_a_schedule_without_owners_or_that_is_half_already_has_no_halves():
    with pytest.raises(ValueError, match="all-reduce without owners"):
        halve(registry.parse("one-shot").build(3))
    with pytest.raises(ValueError, match="no halves"):
        halve(halve(registry.parse("ring").build(3))[0])


@given(schedules(), st.integers(0, 4))
def test_rotating_all_the_way_round_changes_nothing(schedule, root):
    turned = rotate(schedule, root)
    assert rotate(turned, schedule.ranks - root % schedule.ranks) == schedule
    move = [(rank + root) % schedule.ranks for rank in range(schedule.ranks)]
    for step, image in zip(schedule.steps, turned.steps, strict=True):
        assert image == tuple(t._replace(src=move[t.src], dst=move[t.dst]) for t in step)


def test_placing_names_ranks_and_chunks_anew():
    ring = scatter(2, [[Transfer(0, 1, 0, 1, True), Transfer(1, 0, 1, 2, True)]], owners=[1, 0])
    assert place(ring, 9, [4, 7], 10, 3) == [
        [Transfer(4, 7, 10, 13, True), Transfer(7, 4, 13, 16, True)]
    ]


@pytest.mark.parametrize("where", [[0], [0, 1, 2], [0, 5], [-1, 0]])
def test_placing_needs_a_rank_for_each(where):
    two = scatter(2, [], owners=[0])
    with pytest.raises(ValueError, match="expected 2 ranks below 5"):
        place(two, 5, where)


def test_parts_beside_each_other_take_as_long_as_the_longest():
    a, b, c = (Transfer(src, src + 1, 0, 1, True) for src in range(3))
    there = beside([[[a], [b]], [[c]]])
    assert there == [[a, c], [b]] and len(there + reverse_steps(there)) == 4


@given(schedules(), st.integers(1, 4))
def test_segments_run_one_step_behind_each_other(schedule, count):
    cut = segment(schedule, count)
    chunks = schedule.chunks
    assert cut.chunks == count * chunks
    assert len(cut.steps) == (len(schedule.steps) + count - 1 if schedule.steps else 0)
    wanted = Counter(
        (step + part, t._replace(lo=t.lo + part * chunks, hi=t.hi + part * chunks))
        for step, transfers in enumerate(schedule.steps)
        for t in transfers
        for part in range(count)
    )
    assert Counter((step, t) for step, transfers in enumerate(cut.steps) for t in transfers) == (
        wanted
    )
    assert [cut.owners[chunk] for chunk in range(cut.chunks)] == [
        schedule.owners[chunk % chunks] for chunk in range(cut.chunks)
    ]


def test_an_all_reduce_in_segments_is_nowhere_half_done():
    ring = registry.parse("ring").build(3)
    assert ring.owners and not segment(ring, 2).owners
    assert segment(ring, 1) is ring
    assert segment(segment(ring, 2), 3).chunks == 6 * ring.chunks


@pytest.mark.parametrize("count", [0, -1])
def test_segments_below_one_are_refused(count):
    with pytest.raises(
        ConfigurationError, match=f"segments must be an integer >= 1, found {count}"
    ):
        segment(registry.parse("ring").build(3), count)


# ---- one rank's part ----------------------------------------------------------------------


@given(schedules())
def test_every_transfer_is_one_send_and_one_receive_in_its_step(schedule):
    wanted = Counter((step, t) for step, ts in enumerate(schedule.steps) for t in ts)
    sends, receives = Counter(), Counter()
    for rank, program in enumerate(project(schedule)):
        numbers = [step for step, *_ in program]
        assert numbers == sorted(set(numbers))
        for number, posted, sent in program:
            assert posted or sent
            assert [t.src for t in posted] == sorted(t.src for t in posted)
            assert all(t.dst == rank for t in posted) and all(t.src == rank for t in sent)
            sends.update((number, t) for t in sent)
            receives.update((number, t) for t in posted)
    assert sends == receives == wanted


@given(schedules())
def test_messages_between_two_ranks_are_expected_in_the_order_in_which_they_are_sent(schedule):
    programs = project(schedule)
    for src, dst in itertools.permutations(range(schedule.ranks), 2):
        sent = [(r.step, t) for r in programs[src] for t in r.sends if t.dst == dst]
        awaited = [(r.step, t) for r in programs[dst] for t in r.receives if t.src == src]
        assert sent == awaited


@given(schedules(), st.integers(0, 1000), st.integers(0, 9))
def test_no_projected_schedule_waits_for_ever(schedule, seed, count):
    oracle.run(schedule, [range(count)] * schedule.ranks, seed)


# ---- the oracle itself --------------------------------------------------------------------


EXCHANGE = [[add(0, 1), add(1, 0)]]


def refuses(schedule):
    """How many timings the oracle catches the schedule in."""
    caught = 0
    for seed in range(20):
        try:
            oracle.check(schedule, 8, seed)
        except AssertionError:
            caught += 1
    return caught


def test_the_oracle_accepts_an_exchange_and_refuses_one_that_lacks_a_message():
    assert refuses(all_reduce(2, 1, EXCHANGE)) == 0
    assert refuses(all_reduce(2, 1, [[add(0, 1)]])) == 20


def test_the_oracle_lets_a_copy_land_between_the_sends_of_its_receiver():
    # Rank 1 passes its own value on in the step in which that of rank 0 takes its place.
    sum_up, share = [add(0, 2)], [copy(2, 0), copy(2, 1)]
    torn = all_reduce(3, 1, [sum_up, [copy(0, 1), add(1, 2)], share], members=[0, 1])
    calm = all_reduce(3, 1, [sum_up, [add(1, 2)], [copy(0, 1)], share], members=[0, 1])
    assert 0 < refuses(torn) < 20
    assert refuses(calm) == 0


def test_the_oracle_takes_what_comes_first_where_a_server_holds_nothing():
    push_and_pull = [[add(0, 2), add(1, 2)], [copy(2, 0), copy(2, 1)]]
    assert refuses(all_reduce(3, 1, push_and_pull, members=[0, 1])) == 0
    # Were the server a member, its buffer would be part of the sum, and it is owed the result.
    assert refuses(all_reduce(3, 1, push_and_pull)) == 0
    assert refuses(all_reduce(3, 1, [*push_and_pull, [add(2, 0)]], members=[0, 1])) == 20


def test_the_oracle_sees_that_two_ranks_send_before_they_receive():
    there, back = add(0, 1), add(1, 0)
    programs = [
        (Round(0, (), (there,)), Round(1, (back,), ())),
        (Round(0, (), (back,)), Round(1, (there,), ())),
    ]
    for seed in range(4):
        with pytest.raises(oracle.DeadlockError, match=r"ranks \[0, 1\] wait for ever"):
            oracle.run(all_reduce(2, 1, []), [[1, 2]] * 2, seed, programs)


def test_the_oracle_sees_a_message_that_meets_the_wrong_receive():
    programs = [(Round(0, (), (add(0, 1, 0),)),), (Round(0, (add(0, 1, 1),), ()),)]
    with pytest.raises(oracle.MisfitError):
        oracle.run(all_reduce(2, 2, []), [[1, 2]] * 2, 0, programs)


def test_the_oracle_sees_bits_that_differ_with_the_order_of_adding():
    # Rank 0 makes (a + b) + c, server 3 makes a + (b + c).
    steps = [[add(1, 3), add(2, 3)], [add(0, 3), add(1, 0)], [add(2, 0)]]
    alike = all_reduce(4, 1, [*steps, [copy(0, 1), copy(0, 2)]], members=[0, 1, 2])
    oracle.check_bits(alike, 64, range(4))
    mixed = all_reduce(4, 1, [*steps, [copy(0, 1), copy(3, 2)]], members=[0, 1, 2])
    assert refuses(mixed) == 0
    with pytest.raises(AssertionError, match="other bits"):
        oracle.check_bits(mixed, 64, range(4))


def test_many_segments_take_no_more_than_their_messages():
    base = registry.parse("naive-ring").build(3)
    schedule = segment(base, 20_000)
    assert len(schedule.steps) == 4 + 20_000 - 1
    assert sum(map(len, schedule.steps)) == 4 * 20_000
