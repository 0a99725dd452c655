"""Schedules: how they are cut, mirrored, moved, pipelined and handed to the ranks."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import (
    MIRROR,
    Schedule,
    Transfer,
    gather_back,
    halve,
    place,
    project,
    reverse,
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


@pytest.mark.parametrize("name", WITH_HALVES)
def test_halves_put_together_again_are_the_whole(name):
    whole = registry.parse(name).build(7)
    first, second = halve(whole)
    assert first.steps + second.steps == whole.steps
    assert first.owners == second.owners == whole.owners
    assert second.collective is MIRROR[first.collective]
    prove(gather_back(first))
    prove(gather_back(reverse(second)))


def test_what_has_no_halves_and_no_mirror_image():
    with pytest.raises(ValueError, match="an all-reduce has no mirror image"):
        reverse(registry.parse("ring").build(3))
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


@pytest.mark.parametrize("where", [[0], [0, 1, 2], [0, 5], [-1, 0]])
def test_placing_needs_a_rank_for_each(where):
    two = scatter(2, [], owners=[0])
    with pytest.raises(ValueError, match="expected 2 ranks below 5"):
        place(two, 5, where)


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
    with pytest.raises(ConfigurationError, match="segments must be an integer >= 1, found 0"):
        segment(ring, 0)


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
