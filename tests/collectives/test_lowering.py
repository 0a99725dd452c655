"""Programs: every wait that is there is needed, none is missing; how much memory they take."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import promises
from interleavings import Graph, area_of
from mpiddp.collectives.compiler.hazards import done_stage, find_dependencies
from mpiddp.collectives.compiler.instructions import (
    Fetch,
    Finish,
    Pack,
    Publish,
    Push,
    RankProgram,
    Reduce,
    Start,
    Wait,
)
from mpiddp.collectives.compiler.pieces import BufferCut, Grid
from mpiddp.collectives.transport.torch_messages import TorchMessenger
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import Transfer, all_reduce, relabel, scatter
from promises import compile_program

SMALL = BufferCut(2, 2, True)


def check_alone(program: RankProgram, cut: BufferCut) -> None:
    """No receive lands where a message still leaves from; nothing is longer than a block."""
    under_way: set[int] = set()
    for instruction in program.instructions:
        match instruction:
            case Start(numbers):
                for number in numbers:
                    area = area_of(program.rank, program.messages[number])
                    for other in under_way:
                        there = area_of(program.rank, program.messages[other])
                        overlaps = max(area.start, there.start) < min(area.stop, there.stop)
                        both_send = program.messages[number].sends and program.messages[other].sends
                        assert both_send or area.scratch != there.scratch or not overlaps
                    under_way.add(number)
            case Finish(number):
                under_way.discard(number)
            case Push(_, _, _, length) | Fetch(_, _, _, length, _) | Reduce(_, _, length):
                assert 0 < length <= cut.cell


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
    Graph(programs).check()
    for program in programs:
        check_alone(program, cut)


@settings(max_examples=50)
@given(
    promises.random_trees(), st.data(), st.integers(0, 9), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_a_schedule_that_nobody_would_write_runs_on_any_nodes(schedule, data, count, cell, flows):
    prove(schedule)
    nodes = data.draw(promises.node_sizes(schedule.ranks), "nodes")
    programs = promises.compile_all(schedule, count, nodes, BufferCut(cell, 2 * cell, flows))
    Graph(programs).check()


def test_a_message_that_left_early_keeps_no_neighbour_waiting():
    # Rank 0 starts the message of the last step in the third one, and rank 2 posts its receive
    # only when it has that of the step between, which rank 0 sends when rank 1 has come further.
    steps = [
        [add(2, 1, 0), add(0, 1, 0), add(2, 0, 1)], [add(1, 0, 1)],
        [copy(1, 0, 0), copy(0, 1, 1)], [copy(0, 2, 0)], [copy(0, 2, 1)],
    ]  # fmt: skip
    schedule = all_reduce(3, 2, steps)
    prove(schedule)
    Graph(promises.compile_all(schedule, 2, [2, 1], BufferCut(1, 1, True))).check()


def test_a_message_that_nobody_uses_leaves_before_a_neighbour_writes_there():
    # Rank 2 gets rank 0's value, and does nothing with it.
    steps = [[add(0, 2), add(0, 1)], [copy(1, 0)]]
    schedule = all_reduce(3, 1, steps, members=[0, 1])
    prove(schedule)
    for flows in (True, False):
        Graph(promises.compile_all(schedule, 4, [2, 1], BufferCut(4, 4, flows))).check()


def test_no_message_lands_where_a_neighbour_still_reads():
    # Rank 1 reads rank 0's first chunk in its memory, and rank 2's is on its way there.
    steps = [
        [add(0, 1, 0), add(1, 0, 1)],
        [copy(2, 0, 0), add(2, 1, 0), add(2, 0, 1)],
        [copy(1, 0, 0), copy(1, 2, 0), copy(0, 1, 1), copy(0, 2, 1)],
    ]
    schedule = all_reduce(3, 2, steps)
    prove(schedule)
    Graph(promises.compile_all(schedule, 8, [2, 1], BufferCut(2, 2, True))).check()


def is_refused(programs: Sequence[RankProgram]) -> bool:
    try:
        Graph(programs).check()
    except AssertionError:
        return True
    return False


def test_in_memory_nothing_races_and_nearly_every_wait_is_needed():
    found = []
    for ranks in (3, 4):
        for _, schedule in promises.list_all(ranks):
            programs = promises.compile_all(schedule, 2 * schedule.chunks + 1, [ranks], SMALL)
            Graph(programs).check()
            for rank, program in enumerate(programs):
                old = program.instructions
                for place in (n for n, each in enumerate(old) if isinstance(each, Wait)):
                    changed = replace(program, instructions=(*old[:place], *old[place + 1 :]))
                    found.append((*programs[:rank], changed, *programs[rank + 1 :]))
    # The others say what an earlier wait for somebody else implies.
    assert sum(map(is_refused, found[::5])) >= 0.9 * len(found[::5])
    # The last to write to rank 1 has waited until rank 2 had read there.
    chain = all_reduce(3, 1, [[add(0, 1)], [add(1, 2)], [copy(2, 0)], [copy(0, 1)]])
    assert find_dependencies(chain, 1, range(3)).leaving == {0: done_stage(3)}


@pytest.mark.parametrize("ranks", [2, 5])
def test_every_stage_that_is_waited_for_is_published_and_no_other(ranks):
    for _, schedule in promises.list_all(ranks):
        needs = [find_dependencies(schedule, rank, range(ranks)) for rank in range(ranks)]
        waited = {
            stage
            for each in needs
            for waits in (*each.reading.values(), *each.writing.values(), each.leaving)
            for stage in waits.items()
        }
        assert waited == {(rank, s) for rank in range(ranks) for s in needs[rank].published}


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 9), st.data())
def test_cells_cover_each_chunk_in_parts_of_equal_length(lengths, cell, data):
    bounds = [0, *itertools.accumulate(lengths)]
    grid = Grid(bounds, cell)
    sizes = [hi - lo for lo, hi in itertools.pairwise(grid.edges)]
    assert grid.edges[-1] == bounds[-1] and all(0 < size <= cell for size in sizes)
    for chunk, length in enumerate(lengths):
        cells = grid.cells(Transfer(0, 1, chunk, chunk + 1, True))
        mine = [sizes[each] for each in cells]
        assert len(mine) == -(-length // cell) and sum(mine) == length == grid.length(cells)
        assert max(mine, default=0) - min(mine, default=0) <= 1
        assert {grid.chunks[each] for each in cells} <= {chunk}
    lo = data.draw(st.integers(0, len(lengths) - 1))
    span = grid.cells(Transfer(0, 1, lo, data.draw(st.integers(lo + 1, len(lengths))), True))
    most = data.draw(st.integers(1, 30))
    groups = list(grid.group(span, most))
    assert [each for group in groups for each in group] == list(span)
    assert all(len(group) == 1 or grid.length(group) <= most for group in groups)
    for left, right in itertools.pairwise(groups):
        # Each is as long as it can be.
        assert grid.length(range(left.start, right.start + 1)) > most


def test_with_flow_a_long_chunk_is_passed_on_before_all_of_it_is_there():
    ring = promises.build("ring", 4)
    program = compile_program(ring, 0, 80, [0], BufferCut(5, 5, True))
    numbers = {each: place for place, each in enumerate(program.instructions)}
    first_of_step_1 = {
        program.messages[number].sends: place
        for place, each in reversed([*enumerate(program.instructions)])
        for number in getattr(each, "messages", ())
        if program.messages[number].step == 1
    }
    last_of_step_0 = max(
        numbers[Finish(number)]
        for number, message in enumerate(program.messages)
        if message.step == 0 and not message.sends
    )
    # Its neighbour's message finds a receive, too.
    assert max(first_of_step_1[True], first_of_step_1[False]) < last_of_step_0
    # And so is one to which a neighbour's part is added.
    schedule = all_reduce(3, 1, [[add(1, 0)], [add(0, 2)], [copy(2, 0), copy(2, 1)]])
    program, *_ = promises.compile_all(schedule, 20, [2, 1], BufferCut(5, 5, True))
    kinds = [*map(type, program.instructions)]
    assert kinds.index(Start) < len(kinds) - 1 - kinds[::-1].index(Reduce)


@pytest.mark.parametrize("nodes", [[1] * 4, [4], [3, 1]])
def test_a_buffer_of_nothing_takes_no_messages_and_no_copies(nodes):
    for _, schedule in promises.list_all(4, nodes):
        for program in promises.compile_all(schedule, 0, nodes):
            assert program.messages == () and program.scratch == 0
            assert {type(each) for each in program.instructions} <= {Wait, Publish}
            assert not program.partners or len(nodes) < 4
        if len(nodes) == 1:
            assert all(each.messages == () for each in promises.compile_all(schedule, 30, nodes))


EXTRA = {
    "ring": ("one chunk", lambda n, size: size // n),
    "naive-ring": ("S", lambda n, size: size),
    "recursive-doubling": ("S", lambda n, size: size),
    "halving-doubling": ("S/2, or S", lambda n, size: size if n & (n - 1) else size // 2),
    "binomial-tree": ("S", lambda n, size: size),
    # With two ranks each is a leaf of one tree and the root of the other.
    "double-tree": ("S", lambda n, size: size if n > 2 else size // 2),
    "one-shot": ("(n−1)S", lambda n, size: (n - 1) * size),
    "direct": ("(n−1)/k·S", lambda n, size: (n - 1) * size // n),
    "central": ("(n−k)/k·S on servers", lambda n, size: (n - 1) * size),
    "gather-broadcast": ("(n−1)S on rank 0", lambda n, size: (n - 1) * size),
    "bine": ("S", lambda n, size: size),
}
"""What the docstrings say under "Extra buffer", of the rank that needs most."""


@pytest.mark.parametrize("name", EXTRA)
def test_over_messages_the_extra_buffer_is_as_long_as_the_docstring_says(name):
    text, formula = EXTRA[name]
    words = " ".join((registry.find(name).make.__doc__ or "").split())
    assert f"Extra buffer: {text}." in words
    # So that every chunk is cut into messages of equal length, in whichever number.
    size = 48 * 1225
    cuts = (BufferCut(1 << 20, 1 << 20, True), BufferCut(1225, 1225, False))
    for ranks, cut in itertools.product((2, 3, 4, 6, 7, 8), cuts):
        programs = promises.compile_all(promises.build(name, ranks), size, [1] * ranks, cut)
        assert max(program.scratch for program in programs) == formula(ranks, size)
        if "on servers" in text or "on rank 0" in text:
            assert sum(program.scratch > 0 for program in programs) == 1


PACKED = {
    # Alone, a chunk need not be packed.
    "pat": lambda n: 2 * (n // 2) / n if n > 3 else 1 / n,
    "pat:aggregation=1": lambda n: 1 / n,
    "pat:aggregation=2": lambda n: 4 / n,
    "swing": lambda n: 1 if n > 2 else 1 / 2,
}
"""Of 2^k ranks, as a multiple of the buffer."""


@pytest.mark.parametrize(("text", "ranks"), list(itertools.product(PACKED, [2, 4, 8])))
def test_a_message_is_packed_into_as_much_as_the_docstring_says(text, ranks):
    size = 840 * ranks
    programs = promises.compile_all(promises.build(text, ranks), size, [1] * ranks)
    found = max(program.scratch for program in programs)
    assert found == PACKED[text](ranks) * size or (text, ranks) == ("pat:aggregation=2", 2)
    # What arrives in messages that hold less than a chunk is not packed.
    cut = BufferCut(210, 210, True)
    programs = promises.compile_all(promises.build(text, ranks), size, [1] * ranks, cut)
    assert not any(isinstance(each, Pack) for p in programs for each in p.instructions)


def test_a_packed_message_leaves_as_one_and_is_unpacked_where_it_belongs():
    steps = [[Transfer(0, 1, 0, 1, True), Transfer(0, 1, 2, 3, True)]]
    schedule = scatter(2, steps, owners=[1, 1, 1], packed=True)
    sender, receiver = promises.compile_all(schedule, 9, [1, 1])
    assert [message[2:6] for message in sender.messages] == [(1, 0, 6, True)]
    packs = [each for each in sender.instructions if isinstance(each, Pack)]
    assert packs == [Pack(0, 3, 0), Pack(6, 3, 3)]
    sums = [each for each in receiver.instructions if isinstance(each, Reduce)]
    assert [(each.start, each.operands[0].start) for each in sums] == [(0, 0), (6, 3)]


def test_every_algorithm_of_the_module_has_its_formula_here():
    ours = {name for name in registry.names() if registry.is_built_in(registry.parse(name))}
    packed = {text.partition(":")[0] for text in PACKED}
    assert ours == {*EXTRA, *packed, "two-level"}


def test_neighbours_take_scratch_space_only_for_what_is_read_early():
    exchange = all_reduce(2, 1, [[Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True)]])
    assert [p.scratch for p in promises.compile_all(exchange, 10, [2])] == [10, 10]
    # A message that leaves from where a neighbour's part is added is none.
    steps = [[add(0, 1), add(1, 2)], [add(0, 2)], [copy(2, 0), copy(2, 1)]]
    assert promises.compile_all(all_reduce(3, 1, steps), 10, [2, 1])[1].scratch == 0
    for name in ("direct", "gather-broadcast", "binomial-tree"):
        programs = promises.compile_all(promises.build(name, 4), 840, [4])
        assert all(program.scratch == 0 for program in programs)


def test_over_torch_all_messages_of_a_step_start_at_once():
    """In any other order than its neighbour's, a rank would wait for ever under NCCL."""
    cut = TorchMessenger(None).cut(4)
    assert 4 * cut.message < 1 << 31, "not every transport below torch counts further"
    for _, schedule in promises.list_all(4):
        for program in promises.compile_all(schedule, 30, [1] * 4, cut):
            starts = [each for each in program.instructions if isinstance(each, Start)]
            assert len(starts) == len({message.step for message in program.messages})
