"""Every registered algorithm sums exactly, at every member, in every timing that was tried."""

from __future__ import annotations

import ast
import inspect
import itertools
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from mpiddp.errors import ScheduleError
from mpiddp.schedules import algorithms, registry
from mpiddp.schedules.algorithms import add
from mpiddp.schedules.cost import split
from mpiddp.schedules.pairs import list_partners
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import Collective, all_reduce, halve, project, segment
from prices import FULL, WITH_HALVES

RANKS = (*range(1, 10), 12, 16, 17)
SEGMENTS = (1, 2, 3)
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


def fewest_ranks(text):
    """The ranks that an algorithm of PARAMETERS needs."""
    name, _, value = text.partition(":servers=")
    return int(value or 1) + (name == "central" and bool(value))


# ---- the batteries ------------------------------------------------------------------------


def check_sums(text, ranks, segments):
    """The oracle's sums are exact for all COUNTS, each in another timing."""
    schedule = segment(registry.parse(text).make(ranks), segments)
    seed = zlib.crc32(f"{text} {ranks} {segments}".encode())
    for number, count in enumerate((*COUNTS, ranks)):
        oracle.check(schedule, count, seed + number)


def check_halves(name, ranks):
    """Both halves of an all-reduce keep their own promises, as do their images and rotations."""
    for half in halve(registry.parse(name).make(ranks)):
        for schedule in oracle.variants(half):
            prove(schedule)
            for seed, count in enumerate((1, ranks, 64, 101)):
                oracle.check(schedule, count, seed)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", registry.names())
def test_every_member_ends_with_the_exact_sum(name, ranks):
    for segments in SEGMENTS:
        check_sums(name, ranks, segments)


@pytest.mark.parametrize("text", PARAMETERS)
def test_every_member_ends_with_the_exact_sum_with_parameters(text):
    for ranks, segments in itertools.product((1, 2, 3, 5, 8, 11), SEGMENTS):
        if ranks >= fewest_ranks(text):
            check_sums(text, ranks, segments)


@pytest.mark.parametrize("text", [text for text in PARAMETERS if "servers" not in text])
def test_variants_are_proved_and_their_halves(text):
    for ranks in (*range(1, 20), 32, 33, 64):
        whole = registry.parse(text).build(ranks)
        for half in halve(whole) if whole.owners else ():
            prove(half)


def test_published_swing_adds_in_different_orders():
    core = [[add(r, partner, 0) for r, partner in enumerate(list_partners(8, s))] for s in range(3)]
    with pytest.raises(ScheduleError, match="added in different orders"):
        prove(all_reduce(8, 1, core))
    prove(all_reduce(8, 1, reversed(core)))


@pytest.mark.parametrize("name", registry.names())
def test_all_members_end_with_the_same_bits_in_every_timing(name):
    for ranks, segments in itertools.product((2, 3, 5, 8, 9), (1, 2)):
        schedule = registry.parse(f"{name}:segments={segments}").build(ranks)
        oracle.check_bits(schedule, 101, range(3))


@pytest.mark.parametrize("name", WITH_HALVES)
def test_each_half_does_what_its_name_says(name):
    for ranks in (1, 2, 3, 4, 6, 7, 9):
        check_halves(name, ranks)


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


@pytest.mark.parametrize("name", ["ring", "pat", "swing"])
def test_some_leave_the_sum_of_chunk_r_with_rank_r(name):
    for ranks in (6, 7, 8):
        assert registry.parse(name).build(ranks).owners == tuple(range(ranks))


def test_spare_ranks_of_halving_own_no_chunk():
    assert set(registry.parse("halving-doubling").build(7).owners) == {1, 3, 5, 6}


def test_servers_take_no_part_in_the_sum_unless_they_are_workers_too():
    central = registry.parse("central:servers=3").build(8)
    assert (central.members, central.owners) == ((0, 1, 2, 3, 4), (5, 6, 7))
    direct = registry.parse("direct:servers=3").build(8)
    assert (direct.members, direct.owners) == (tuple(range(8)), (0, 1, 2))


@pytest.mark.parametrize("text", ["direct", "direct:servers=3", "central:servers=3"])
def test_each_worker_begins_with_another_server(text):
    schedule = registry.parse(text).build(6)
    firsts = [program[0].sends[0].dst for program in project(schedule)[: len(schedule.members)]]
    assert set(firsts) == set(schedule.owners)


# ---- nodes --------------------------------------------------------------------------------


@settings(max_examples=60)
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


def test_between_nodes_only_ranks_that_own_the_same_chunk_talk():
    nodes = (3, 3, 3)
    for step in registry.parse("two-level").build(9, nodes).steps:
        for src, dst, *_ in step:
            assert src // 3 == dst // 3 or src % 3 == dst % 3


def test_two_levels_without_nodes_take_two_halves():
    build = registry.parse("two-level").build
    assert build(7) == build(7, split(7, 2)) == build(7, (3, 4))


# ---- brevity ------------------------------------------------------------------------------


def count_lines(function):
    """The lines of a function's body, its docstring left out."""
    (definition,) = ast.parse(inspect.getsource(function)).body
    has_docstring = ast.get_docstring(definition) is not None
    statements = definition.body[has_docstring:]
    return sum(node.end_lineno - node.lineno + 1 for node in statements)


def test_the_ring_fits_in_eight_lines():
    assert 1 <= count_lines(algorithms.ring) <= 8
