"""Ranks that work in each other's memory: every wait that is there is needed, none is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import interleavings
import promises
from mpiddp.collectives.compiler.hazards import find_dependencies
from mpiddp.collectives.compiler.instructions import RankProgram, Wait
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import Schedule, all_reduce, relabel

SMALL = BufferCut(2, 2, True)
SEEDS = range(20)


def draw_buffers(schedule: Schedule, count: int, seed: int = 0) -> list[np.ndarray]:
    """Large random integers, so that no wrong value goes unnoticed."""
    numbers = np.random.default_rng(seed)
    return [numbers.integers(-(2**40), 2**40, count) for _ in range(schedule.ranks)]


def play(schedule: Schedule, programs: Sequence[RankProgram], seed: int) -> None:
    """Raise something unless the promises are kept in this order of events."""
    before = draw_buffers(schedule, programs[0].count, seed)
    after = interleavings.play(programs, before, seed)
    promises.check(schedule, *(list(map(torch.from_numpy, side)) for side in (before, after)))


def goes_wrong(schedule: Schedule, programs: Sequence[RankProgram], seed: int) -> bool:
    try:
        play(schedule, programs, seed)
    except (AssertionError, ValueError):
        return True
    return False


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("ranks", [2, 5])
def test_every_stage_that_is_waited_for_is_published_and_no_other(name, ranks):
    for schedule in promises.list_variants(promises.build(name, ranks)):
        all_needs = [find_dependencies(schedule, rank, range(ranks)) for rank in range(ranks)]
        waited = {
            (rank, stage)
            for needs in all_needs
            for waits in (*needs.reading.values(), *needs.writing.values(), needs.leaving)
            for rank, stage in waits.items()
        }
        assert waited == {(rank, s) for rank in range(ranks) for s in all_needs[rank].published}


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("ranks", [2, 5])
def test_in_memory_nothing_races_and_every_order_of_events_gives_the_result(name, ranks):
    for schedule in promises.list_variants(promises.build(name, ranks)):
        programs = promises.compile_all(schedule, 2 * schedule.chunks + 1, [ranks], SMALL)
        interleavings.check(programs)
        for seed in range(4):
            play(schedule, programs, seed)


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=12)
@given(st.data())
def test_on_any_nodes_nothing_races_or_waits_for_ever(name, data):
    ranks = data.draw(st.integers(1, 7), "ranks")
    nodes = data.draw(promises.node_sizes(ranks), "nodes")
    variants = promises.list_variants(promises.build(name, ranks, nodes))
    # Ranks that share a node need not be neighbours by number.
    where = data.draw(st.permutations(range(ranks)), "where")
    schedule = relabel(data.draw(st.sampled_from(variants), "schedule"), where)
    count = data.draw(st.integers(0, 40), "count")
    cell = data.draw(st.integers(1, 12), "cell")
    longest = cell * data.draw(st.integers(1, 3), "cells in a message")
    cut = BufferCut(cell, longest, data.draw(st.booleans(), "flows"))
    programs = promises.compile_all(schedule, count, nodes, cut)
    interleavings.check(programs)
    play(schedule, programs, data.draw(st.integers(0, 99), "seed"))


@settings(max_examples=50)
@given(
    promises.random_trees(), st.data(), st.integers(0, 9), st.integers(1, 3), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_a_schedule_that_nobody_would_write_runs_on_any_nodes(
    schedule, data, count, cell, flows, seed
):
    prove(schedule)
    nodes = data.draw(promises.node_sizes(schedule.ranks), "nodes")
    programs = promises.compile_all(schedule, count, nodes, BufferCut(cell, 2 * cell, flows))
    interleavings.check(programs)
    play(schedule, programs, seed)


def test_a_message_that_left_early_keeps_no_neighbour_waiting():
    # Rank 0 starts the message of the last step in the third one, and rank 2 posts its receive
    # only when it has that of the step between, which rank 0 sends when rank 1 has come further.
    steps = [
        [add(2, 1, 0), add(0, 1, 0), add(2, 0, 1)],
        [add(1, 0, 1)],
        [copy(1, 0, 0), copy(0, 1, 1)],
        [copy(0, 2, 0)],
        [copy(0, 2, 1)],
    ]
    schedule = all_reduce(3, 2, steps)
    prove(schedule)
    programs = promises.compile_all(schedule, 2, [2, 1], BufferCut(1, 1, True))
    interleavings.check(programs)
    for seed in SEEDS:
        play(schedule, programs, seed)


def test_a_message_that_nobody_uses_leaves_before_a_neighbour_writes_there():
    # Rank 2 gets rank 0's value, and does nothing with it.
    steps = [[add(0, 2), add(0, 1)], [copy(1, 0)]]
    schedule = all_reduce(3, 1, steps, members=[0, 1])
    prove(schedule)
    for flows in (True, False):
        interleavings.check(promises.compile_all(schedule, 4, [2, 1], BufferCut(4, 4, flows)))


def list_victims(kind: type, *sizes: int) -> list[tuple[Schedule, list[RankProgram], int, int]]:
    """All instructions of a kind: the schedule, the programs, the rank, and where it stands."""
    victims = []
    for ranks in sizes:
        for _, schedule in promises.list_all(ranks):
            programs = promises.compile_all(schedule, 2 * schedule.chunks + 1, [ranks], SMALL)
            for rank, program in enumerate(programs):
                places = [n for n, i in enumerate(program.instructions) if isinstance(i, kind)]
                victims += [(schedule, programs, rank, place) for place in places]
    return victims


def replace_instruction(programs, rank, place, *instead):
    changed = list(programs)
    old = programs[rank].instructions
    instructions = (*old[:place], *instead, *old[place + 1 :])
    changed[rank] = replace(programs[rank], instructions=instructions)
    return changed


def is_refused(programs) -> bool:
    try:
        interleavings.check(programs)
    except AssertionError:
        return True
    return False


def count_caught(victims, mutate, seeds=SEEDS) -> tuple[int, int]:
    """How many mutants go wrong in one order at least, and how many the graph refuses."""
    caught = refused = 0
    for schedule, programs, rank, place in victims:
        mutant = mutate(programs, rank, place)
        found = any(goes_wrong(schedule, mutant, seed) for seed in seeds)
        is_seen = is_refused(mutant)
        assert is_seen or not found, "the graph takes for safe what goes wrong"
        caught += found
        refused += is_seen
    return caught, refused


def test_nearly_every_wait_is_needed():
    victims = list_victims(Wait, 3, 4)[::5]
    caught, refused = count_caught(victims, replace_instruction)
    assert caught >= 0.95 * refused
    # The others say what an earlier wait for somebody else implies.
    assert caught >= 0.9 * len(victims)
