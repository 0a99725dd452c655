"""Variants of algorithms, their halves, and who owns what; the others are in `test_proof.py`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from mpiddp.schedules import registry
from mpiddp.schedules.cost import split
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import Collective, halve, project
from prices import FULL, WITH_HALVES

COUNTS = (0, 1, 3, 7, 64, 101)
PARAMETERS = (
    "direct:servers=1",
    "direct:servers=3",
    "central:servers=2",
    "central:servers=3",
    "central:servers=8",
    "pat:aggregation=1",
    "pat:aggregation=5",
    "swing:variant=latency",
    "bine:variant=butterfly",
    "two-level:inner=swing,outer=pat",
    "two-level:inner=ring,outer=recursive-doubling",
    "two-level:inner=halving-doubling,outer=one-shot",
    "two-level:inner=double-tree,outer=direct",
    "two-level:inner=central,outer=ring",
)


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
