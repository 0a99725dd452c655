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
from mpiddp.collectives.compiler.hazards import ENTERED, done_stage, find_dependencies, read_stage
from mpiddp.collectives.compiler.instructions import Publish, RankProgram, Wait
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import Schedule, all_reduce, relabel, scatter

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


# ---- who waits for whom -------------------------------------------------------------------


def test_an_exchange_reads_early_and_writes_when_the_other_has_read():
    exchange = all_reduce(2, 1, [[add(0, 1), add(1, 0)]])
    mine, other = (0, add(1, 0)), (0, add(0, 1))
    needs = find_dependencies(exchange, 0, range(2))
    assert needs.early == {mine}
    assert needs.reading[mine] == {1: ENTERED}
    assert needs.writing[mine] == {1: read_stage(0)}
    assert other not in needs.reading and other not in needs.writing
    assert needs.published == {ENTERED, read_stage(0)}
    # Its last writer is itself, and the reader before has been waited for.
    assert needs.leaving == {}


def test_the_root_of_a_reduction_reads_late_and_the_others_stay_until_it_has():
    reduction = scatter(3, [[add(1, 0), add(2, 0)]], owners=[0])
    root, leaf = (find_dependencies(reduction, rank, range(3)) for rank in (0, 1))
    assert root.early == frozenset()
    assert root.reading == {(0, add(1, 0)): {1: ENTERED}, (0, add(2, 0)): {2: ENTERED}}
    assert root.leaving == {}
    assert leaf.leaving == {0: done_stage(0)}
    assert root.published == {done_stage(0)}


def test_what_is_copied_is_waited_for_by_who_gets_it():
    broadcast = all_reduce(2, 1, [[add(1, 0)], [copy(0, 1)]])
    root, leaf = (find_dependencies(broadcast, rank, range(2)) for rank in (0, 1))
    # The root alone has touched that buffer, and does not wait for itself.
    assert root.writing[1, copy(0, 1)] == {1: ENTERED}
    assert leaf.leaving == {0: done_stage(1)}
    assert (1, copy(0, 1)) not in leaf.reading


def test_a_neighbour_that_passes_on_what_was_pushed_to_it_waits_for_the_push():
    chain = all_reduce(3, 1, [[add(2, 1)], [add(1, 0)], [copy(0, 1)], [copy(1, 2)]])
    needs = find_dependencies(chain, 1, range(3))
    assert needs.reading[3, copy(1, 2)] == {0: done_stage(2)}


def test_ranks_of_other_nodes_are_not_waited_for():
    ring = promises.build("ring", 4)
    for rank, group in ((0, range(2)), (3, range(2, 4))):
        needs = find_dependencies(ring, rank, group)
        tables = (*needs.reading.values(), *needs.writing.values(), needs.leaving)
        assert {other for waits in tables for other in waits} <= set(group) - {rank}


def test_nobody_waits_for_a_rank_that_is_alone():
    needs = find_dependencies(promises.build("ring", 4), 0, [0])
    assert needs.early == needs.published == frozenset()
    assert not any(needs.reading.values()) and not any(needs.writing.values())
    assert needs.leaving == {}


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


# ---- with all waits -----------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_in_memory_nothing_races_and_every_order_of_events_gives_the_result(name, ranks):
    for schedule in promises.list_variants(promises.build(name, ranks)):
        programs = promises.compile_all(schedule, 2 * schedule.chunks + 1, [ranks], SMALL)
        interleavings.check(programs)
        for seed in range(4):
            play(schedule, programs, seed)


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=25)
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


@settings(max_examples=100)
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


# ---- without one of them ------------------------------------------------------------------


def list_victims(kind: type, *sizes: int) -> list[tuple[Schedule, list[RankProgram], int, int]]:
    """All instructions of a kind: the schedule, the programs, the rank, and where it stands."""
    victims = []
    for ranks in sizes:
        for _, schedule in promises.list_all(ranks):
            programs = promises.compile_all(schedule, 2 * schedule.chunks + 1, [ranks], SMALL)
            for rank, program in enumerate(programs):
                for place, instruction in enumerate(program.instructions):
                    if isinstance(instruction, kind):
                        victims.append((schedule, programs, rank, place))
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


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.long)])
def test_nearly_every_wait_is_needed(part):
    victims = list_victims(Wait, 3, 4)[::part]
    caught, refused = count_caught(victims, replace_instruction)
    assert caught >= 0.95 * refused
    # The others say what an earlier wait for somebody else implies.
    assert caught >= 0.9 * len(victims)


def test_a_wait_for_the_stage_before_is_too_short_where_that_is_another_event():
    def weaken(programs, rank, place):
        wait = programs[rank].instructions[place]
        published = [
            each.stage
            for each in programs[wait.rank].instructions
            if isinstance(each, Publish) and each.stage < wait.stage
        ]
        return replace_instruction(
            programs, rank, place, wait._replace(stage=max(published, default=ENTERED))
        )

    victims = list_victims(Wait, 3)
    caught, refused = count_caught(victims, weaken)
    assert caught >= 0.9 * refused and caught >= 0.75 * len(victims)


def test_a_rank_that_is_silent_where_it_should_publish_holds_others_up():
    victims = list_victims(Publish, 4)
    # Who waits for what never comes waits in every order of events. Where nothing goes wrong, a
    # later stage is published in time, and says as much.
    caught, refused = count_caught(victims, replace_instruction, range(2))
    assert caught == refused >= 0.45 * len(victims)


def test_a_program_without_any_of_its_waits_always_goes_wrong():
    for ranks in (2, 3, 4):
        for name, schedule in promises.list_all(ranks):
            programs = promises.compile_all(schedule, 2 * schedule.chunks + 1, [ranks], SMALL)
            bare = [
                replace(
                    program,
                    instructions=tuple(i for i in program.instructions if not isinstance(i, Wait)),
                )
                for program in programs
            ]
            assert any(goes_wrong(schedule, bare, seed) for seed in SEEDS), name
