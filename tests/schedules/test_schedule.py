"""Schedules: how they are cut, mirrored, moved and pipelined; variants of algorithms, halves."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import split
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import (
    MIRROR,
    Collective,
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
from prices import FULL, WITH_HALVES


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
        draw(st.sampled_from(list(MIRROR))), n, c, tuple(map(tuple, steps)), tuple(range(n)),
        tuple(draw(st.lists(st.integers(0, n - 1), min_size=c, max_size=c))),
    )  # fmt: skip


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


COUNTS = (0, 1, 3, 7, 64, 101)
PARAMETERS = (
    "direct:servers=1", "direct:servers=3", "central:servers=2", "central:servers=3",
    "central:servers=8", "pat:aggregation=1", "pat:aggregation=5", "swing:variant=latency",
    "bine:variant=butterfly", "two-level:inner=swing,outer=pat",
    "two-level:inner=ring,outer=recursive-doubling",
    "two-level:inner=halving-doubling,outer=one-shot", "two-level:inner=double-tree,outer=direct",
    "two-level:inner=central,outer=ring",
)  # fmt: skip


@pytest.mark.parametrize("text", PARAMETERS)
def test_variants_are_proved_and_their_halves(text):
    for ranks in (*range(1, 20), 32, 33, 64):
        if "servers" in text and int(text[-1]) >= ranks:
            continue
        whole = registry.parse(text).build(ranks)
        for half in halve(whole) if whole.owners else ():
            prove(half)


def test_the_halves_are_the_collectives_that_the_documentation_names():
    to_one = {"naive-ring": 6, "binomial-tree": 0, "central": 6, "gather-broadcast": 0, "bine": 0}
    parted = {"ring", "halving-doubling", "double-tree", "direct", "pat", "swing"}
    assert set(WITH_HALVES) == parted | to_one.keys()
    for name in WITH_HALVES:
        first, second = halve(registry.parse(name).build(7))
        if name in to_one:
            assert set(first.owners) == {to_one[name]}
            wanted = (Collective.REDUCE, Collective.BROADCAST)
        else:
            wanted = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        assert (first.collective, second.collective) == wanted


@pytest.mark.parametrize(
    ("text", "ranks", "owners"),
    [
        *((name, ranks, range(ranks)) for name in ("ring", "pat", "swing") for ranks in (6, 7, 8)),
        # Spare ranks of halving own no chunk.
        ("halving-doubling", 7, (1, 3, 5, 6)),
        ("direct:servers=3", 8, range(3)),
        ("central:servers=3", 8, range(5, 8)),
    ],
)
def test_who_owns_each_chunk(text, ranks, owners):
    schedule = registry.parse(text).build(ranks)
    assert schedule.owners == tuple(owners)
    assert schedule.members == tuple(range(5 if "central" in text else ranks))


@pytest.mark.parametrize("text", ["direct", "direct:servers=3", "central:servers=3"])
def test_each_worker_begins_with_another_server(text):
    schedule = registry.parse(text).build(6)
    firsts = [program[0].sends[0].dst for program in project(schedule)[: len(schedule.members)]]
    assert set(firsts) == set(schedule.owners)


@settings(max_examples=40)
@given(
    nodes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    inner=st.sampled_from(WITH_HALVES),
    outer=st.sampled_from(FULL),
    segments=st.integers(1, 3),
    count=st.sampled_from(COUNTS),
    seed=st.integers(0, 1000),
)
def test_two_levels_on_nodes_of_any_sizes_sum_right(nodes, inner, outer, segments, count, seed):
    text = f"two-level:inner={inner},outer={outer},segments={segments}"
    schedule = registry.parse(text).build(sum(nodes), nodes)
    prove(schedule)
    oracle.check(schedule, count, seed)
    oracle.check_bits(schedule, 53, (seed, seed + 1))


def test_two_levels_without_nodes_take_two_halves():
    build = registry.parse("two-level").build
    assert build(7) == build(7, split(7, 2)) == build(7, (3, 4))
