"""Programs: what their instructions promise each other, and how much memory they take."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import promises
from interleavings import Address, address_of, area_of
from mpiddp.collectives.compiler.instructions import (
    Fetch,
    Finish,
    Pack,
    Publish,
    Push,
    Reduce,
    Source,
    Start,
    Wait,
)
from mpiddp.collectives.compiler.pieces import BufferCut, Grid
from mpiddp.schedules import registry
from mpiddp.schedules.schedule import Transfer, all_reduce, scatter
from promises import compile_program

WHOLE = BufferCut(1 << 20, 1 << 20, True)


@st.composite
def teams(draw: st.DrawFn):
    """The programs of any schedule on any nodes, with the cut and the schedule."""
    if draw(st.booleans()):
        schedule = draw(promises.random_trees())
        nodes = draw(promises.node_sizes(schedule.ranks))
    else:
        ranks = draw(st.integers(1, 7))
        nodes = draw(st.just([1] * ranks) | promises.node_sizes(ranks))
        whole = promises.build(draw(st.sampled_from(registry.names())), ranks, nodes)
        schedule = draw(st.sampled_from(promises.list_variants(whole)))
    cell = draw(st.integers(1, 12))
    cut = BufferCut(cell, cell * draw(st.integers(1, 3)), draw(st.booleans()))
    count = draw(st.integers(0, 40))
    return schedule, cut, promises.compile_all(schedule, count, nodes, cut)


# ---- cells --------------------------------------------------------------------------------


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


# ---- messages -----------------------------------------------------------------------------


@settings(max_examples=80)
@given(teams())
def test_each_message_is_started_once_and_finished_once_afterwards(team):
    for program in team[2]:
        started, finished = Counter(), Counter()
        for instruction in program.instructions:
            match instruction:
                case Start(numbers):
                    started.update(numbers)
                case Finish(number):
                    finished.update([number])
                    assert started[number] == 1
        once = dict.fromkeys(range(len(program.messages)), 1)
        assert started == finished == once


@settings(max_examples=80)
@given(teams())
def test_both_ends_of_a_message_agree_and_tags_count_from_zero(team):
    schedule, cut, programs = team
    sent: dict[Address, tuple] = {}
    received: dict[Address, tuple] = {}
    for program in programs:
        for message in program.messages:
            side = sent if message.sends else received
            address = address_of(program.rank, message)
            assert address not in side
            side[address] = (message.step, message.length)
            assert 0 < message.length <= cut.message
            assert schedule.packed or not (message.sends and message.scratch)
    assert sent == received
    tags = defaultdict(list)
    for source, destination, tag in sent:
        tags[source, destination].append(tag)
    assert all(sorted(each) == list(range(len(each))) for each in tags.values())


@settings(max_examples=80)
@given(teams())
def test_no_receive_lands_where_a_message_still_leaves_from(team):
    for program in team[2]:
        under_way = set()
        for instruction in program.instructions:
            match instruction:
                case Start(numbers):
                    for number in numbers:
                        _check_place(program, number, under_way)
                        under_way.add(number)
                case Finish(number):
                    under_way.discard(number)
                case Reduce(_, start, length):
                    flying = map(program.messages.__getitem__, under_way)
                    for message in (m for m in flying if m.sends and not m.scratch):
                        end = message.start + message.length
                        assert end <= start or start + length <= message.start


def _check_place(program, number, under_way):
    area = area_of(program.rank, program.messages[number])
    for other in under_way:
        there = area_of(program.rank, program.messages[other])
        apart = area.scratch != there.scratch or not overlaps(area, there)
        assert apart or (program.messages[number].sends and program.messages[other].sends)


def overlaps(one, other) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


@settings(max_examples=80)
@given(teams())
def test_instructions_work_on_a_block_of_something_at_most(team):
    _, cut, programs = team
    for program in programs:
        assert program.block == cut.cell
        for instruction in program.instructions:
            match instruction:
                case Push(_, rank, start, length) | Fetch(_, rank, start, length, _):
                    assert 0 < length <= cut.cell and start + length <= program.count
                    assert rank in program.partners
                case Reduce(_, start, length, operands):
                    assert 0 < length <= cut.cell and start + length <= program.count
                    assert [o.rank for o in operands] == sorted({o.rank for o in operands})
                    assert all(o.start == start for o in operands if o.source is not Source.SCRATCH)
                    peers = {o.rank for o in operands if o.source is Source.PEER}
                    assert peers <= set(program.partners)


@settings(max_examples=80)
@given(teams())
def test_stages_are_published_in_their_order_and_waited_for_once(team):
    for program in team[2]:
        stages = [each.stage for each in program.instructions if isinstance(each, Publish)]
        assert stages == sorted(set(stages))
        known = defaultdict(int)
        for wait in program.instructions:
            if isinstance(wait, Wait):
                assert wait.stage > known[wait.rank] and wait.rank != program.rank
                known[wait.rank] = wait.stage


@settings(max_examples=80)
@given(teams())
def test_a_sum_is_final_where_all_contributions_are_in_it_and_once_for_each_element(team):
    schedule, _, programs = team
    for program in programs:
        done = Counter()
        for each in program.instructions:
            if isinstance(each, Reduce) and each.final:
                done.update(range(each.start, each.start + each.length))
        # Exchanges complete a sum in several ranks; none of them twice.
        assert set(done.values()) <= {1}
    has_sums = any(t.reduce for step in schedule.steps for t in step)
    if has_sums and len(schedule.members) > 1:
        covered = set()
        for program in programs:
            for each in program.instructions:
                if isinstance(each, Reduce) and each.final:
                    covered.update(range(each.start, each.start + each.length))
        assert covered == set(range(programs[0].count))


# ---- who waits for whom in a program ------------------------------------------------------


@pytest.mark.parametrize("name", registry.names())
def test_without_flow_all_messages_of_a_step_start_at_once_and_none_before_it(name):
    for schedule in promises.list_variants(promises.build(name, 5)):
        for program in promises.compile_all(schedule, 40, [1] * 5, BufferCut(3, 3, False)):
            steps = []
            for instruction in program.instructions:
                if isinstance(instruction, Start):
                    mine = {program.messages[number].step for number in instruction.messages}
                    assert len(mine) == 1
                    steps.append(mine.pop())
            assert steps == sorted(set(steps))


def test_with_flow_a_long_chunk_is_passed_on_before_all_of_it_is_there():
    ring = promises.build("ring", 4)
    program = compile_program(ring, 0, 80, [0], BufferCut(5, 5, True))
    numbers = {each: place for place, each in enumerate(program.instructions)}
    first_sent = next(
        place
        for place, each in enumerate(program.instructions)
        if isinstance(each, Start)
        and any(program.messages[n].sends and program.messages[n].step == 1 for n in each.messages)
    )
    last_of_step_0 = max(
        numbers[Finish(number)]
        for number, message in enumerate(program.messages)
        if message.step == 0 and not message.sends
    )
    assert first_sent < last_of_step_0


@pytest.mark.parametrize("nodes", [[1] * 4, [4], [3, 1]])
def test_a_buffer_of_nothing_takes_no_messages_and_no_copies(nodes):
    for _, schedule in promises.list_all(4, nodes):
        for program in promises.compile_all(schedule, 0, nodes):
            assert program.messages == () and program.scratch == 0
            assert {type(each) for each in program.instructions} <= {Wait, Publish}


def test_one_rank_alone_has_nothing_to_do():
    for _, schedule in promises.list_all(1):
        (program,) = promises.compile_all(schedule, 10, [1])
        assert program.instructions == program.messages == program.partners == ()


def test_all_ranks_on_one_node_send_no_messages_and_lonely_ones_have_no_partners():
    for _, schedule in promises.list_all(5):
        assert all(p.messages == () for p in promises.compile_all(schedule, 30, [5]))
        assert all(p.partners == () for p in promises.compile_all(schedule, 30, [1] * 5))


# ---- extra memory -------------------------------------------------------------------------


def spare(ranks: int) -> bool:
    return ranks & (ranks - 1) != 0


EXTRA = {
    "ring": ("one chunk", lambda n, size: size // n),
    "naive-ring": ("S", lambda n, size: size),
    "recursive-doubling": ("S", lambda n, size: size),
    "halving-doubling": ("S/2, or S", lambda n, size: size if spare(n) else size // 2),
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
@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("message", [1 << 20, 1225])
def test_over_messages_the_extra_buffer_is_as_long_as_the_docstring_says(name, ranks, message):
    text, formula = EXTRA[name]
    words = " ".join((registry.find(name).make.__doc__ or "").split())
    assert f"Extra buffer: {text}." in words
    # So that every chunk is cut into messages of equal length, in whichever number.
    size = 48 * 1225
    for flows in (True, False):
        cut = BufferCut(message, message, flows)
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


@pytest.mark.parametrize("text", PACKED)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_message_is_packed_into_as_much_as_the_docstring_says(text, ranks):
    size = 840 * ranks
    programs = promises.compile_all(promises.build(text, ranks), size, [1] * ranks)
    found = max(program.scratch for program in programs)
    assert found == PACKED[text](ranks) * size or (text, ranks) == ("pat:aggregation=2", 2)
    # What arrives in messages that hold less than a chunk is not packed.
    cut = BufferCut(210, 210, True)
    programs = promises.compile_all(promises.build(text, ranks), size, [1] * ranks, cut)
    assert not any(isinstance(each, Pack) for p in programs for each in p.instructions)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 9])
def test_swing_packs_at_most_one_and_a_half_buffers(ranks):
    programs = promises.compile_all(promises.build("swing", ranks), 2520, [1] * ranks)
    most = max(program.scratch for program in programs)
    assert most <= (1.5 if ranks % 2 else 1) * 2520


def test_a_packed_message_leaves_as_one_and_is_unpacked_where_it_belongs():
    steps = [[Transfer(0, 1, 0, 1, True), Transfer(0, 1, 2, 3, True)]]
    schedule = scatter(2, steps, owners=[1, 1, 1], packed=True)
    sender, receiver = promises.compile_all(schedule, 9, [1, 1])
    assert [message[2:6] for message in sender.messages] == [(1, 0, 6, True)]
    packs = [each for each in sender.instructions if isinstance(each, Pack)]
    assert packs == [Pack(0, 3, 0), Pack(6, 3, 3)]
    sums = [each for each in receiver.instructions if isinstance(each, Reduce)]
    assert [(each.start, each.operands[0].start) for each in sums] == [(0, 0), (6, 3)]


@pytest.mark.parametrize(("ranks", "servers"), [(4, 2), (6, 3), (8, 2)])
def test_with_several_servers_the_extra_buffer_is_that_of_one_of_them(ranks, servers):
    for name, others in (("direct", ranks - 1), ("central", ranks - servers)):
        schedule = registry.parse(f"{name}:servers={servers}").build(ranks)
        programs = promises.compile_all(schedule, 840, [1] * ranks)
        assert max(program.scratch for program in programs) == others * 840 // servers


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (2, 4), (3, 2), (4, 2)])
@pytest.mark.parametrize("inner", ["direct", "ring"])
def test_on_two_levels_the_extra_buffer_is_the_greater_of_the_two(nodes, each, inner):
    words = " ".join((registry.find("two-level").make.__doc__ or "").split())
    assert "Extra buffer: the greater of the two levels'." in words
    schedule = registry.parse(f"two-level:inner={inner}").build(nodes * each, [each] * nodes)
    programs = promises.compile_all(schedule, 840, [1] * (nodes * each))
    inside = (each - 1) * 840 // each if inner == "direct" else 840 // each
    assert max(p.scratch for p in programs) == max(inside, 840 // (each * nodes))


def test_every_algorithm_of_the_module_has_its_formula_here():
    ours = {name for name in registry.names() if registry.is_built_in(registry.parse(name))}
    packed = {text.partition(":")[0] for text in PACKED}
    assert ours == {*EXTRA, *packed, "two-level"}


@pytest.mark.parametrize("name", registry.names())
def test_parts_of_a_buffer_take_no_more_extra_memory_than_all_of_it(name):
    # A pipeline in which several parts are on their way at the same time has slots for each.
    for ranks in (3, 4):
        whole = promises.build(name, ranks)
        alone = max(p.scratch for p in promises.compile_all(whole, 840, [1] * ranks))
        pipelined = registry.parse(f"{name}:segments=5").build(ranks)
        parts = max(p.scratch for p in promises.compile_all(pipelined, 840, [1] * ranks))
        assert parts <= alone * 2


def test_neighbours_take_scratch_space_only_for_what_is_read_early():
    exchange = all_reduce(2, 1, [[Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True)]])
    assert [p.scratch for p in promises.compile_all(exchange, 10, [2])] == [10, 10]
    for name in ("direct", "gather-broadcast", "binomial-tree"):
        programs = promises.compile_all(promises.build(name, 4), 840, [4])
        assert all(program.scratch == 0 for program in programs)
