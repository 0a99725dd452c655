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


def check_order(program):
    """Messages start once and finish once afterwards, stages grow, and nothing lands on others."""
    started, finished, under_way = Counter(), Counter(), set()
    stages, known = [], defaultdict(int)
    for instruction in program.instructions:
        match instruction:
            case Start(numbers):
                started.update(numbers)
                for number in numbers:
                    check_place(program, number, under_way)
                    under_way.add(number)
            case Finish(number):
                finished.update([number])
                assert started[number] == 1
                under_way.discard(number)
            case Reduce(_, start, length):
                for message in map(program.messages.__getitem__, under_way):
                    end = message.start + message.length
                    is_apart = end <= start or start + length <= message.start
                    assert is_apart or message.scratch or not message.sends
            case Publish():
                stages.append(instruction.stage)
            case Wait():
                assert instruction.stage > known[instruction.rank]
                assert instruction.rank != program.rank
                known[instruction.rank] = instruction.stage
    assert started == finished == Counter(range(len(program.messages)))
    assert stages == sorted(set(stages))


def check_place(program, number, under_way):
    """No receive lands where a message still leaves from."""
    area = area_of(program.rank, program.messages[number])
    for other in under_way:
        there = area_of(program.rank, program.messages[other])
        overlaps = max(area.start, there.start) < min(area.stop, there.stop)
        apart = area.scratch != there.scratch or not overlaps
        assert apart or (program.messages[number].sends and program.messages[other].sends)


def check_sizes(program, cut):
    """Instructions work on a block of something at most."""
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


def check_ends(schedule, cut, programs):
    """Both ends of a message agree, and tags count from zero."""
    sides: dict[bool, dict[Address, tuple]] = {True: {}, False: {}}
    for program in programs:
        for message in program.messages:
            address = address_of(program.rank, message)
            assert address not in sides[message.sends]
            sides[message.sends][address] = (message.step, message.length)
            assert 0 < message.length <= cut.message
            assert schedule.packed or not (message.sends and message.scratch)
    assert sides[True] == sides[False]
    tags = defaultdict(list)
    for source, destination, tag in sides[True]:
        tags[source, destination].append(tag)
    assert all(sorted(each) == list(range(len(each))) for each in tags.values())


def check_sums(schedule, programs):
    """A sum is final where all contributions are in it, and once for each element."""
    covered = set()
    for program in programs:
        sums = [each for each in program.instructions if isinstance(each, Reduce) and each.final]
        done = [place for each in sums for place in range(each.start, each.start + each.length)]
        # Exchanges complete a sum in several ranks; none of them twice.
        assert len(done) == len(set(done))
        covered.update(done)
    has_sums = any(t.reduce for step in schedule.steps for t in step)
    if has_sums and len(schedule.members) > 1:
        assert covered == set(range(programs[0].count))


@settings(max_examples=120)
@given(teams())
def test_programs_keep_what_they_promise_each_other(team):
    schedule, cut, programs = team
    for program in programs:
        check_order(program)
        check_sizes(program, cut)
        if schedule.ranks == 1:
            assert program.instructions == program.messages == program.partners == ()
    check_ends(schedule, cut, programs)
    check_sums(schedule, programs)


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


@pytest.mark.parametrize(
    ("text", "nodes", "longest"),
    [
        # With several servers, that of one of them.
        ("direct:servers=3", None, 5 * 840 // 3),
        ("central:servers=3", None, 3 * 840 // 3),
        # The greater of the two levels'.
        ("two-level:inner=direct", [3, 3], 2 * 840 // 3),
        ("two-level:inner=ring", [2, 2, 2], 840 // 2),
        ("swing", None, 840),
        # A pipeline in which several parts are on their way at the same time has slots for each.
        ("ring:segments=5", None, 2 * 840 // 6),
        ("naive-ring:segments=5", None, 2 * 840),
    ],
)
def test_the_longest_extra_buffer_of_six_ranks(text, nodes, longest):
    programs = promises.compile_all(registry.parse(text).build(6, nodes), 840, [1] * 6)
    assert max(program.scratch for program in programs) <= longest
    is_exact = text != "swing" and "segments" not in text
    assert not is_exact or max(program.scratch for program in programs) == longest


def test_every_algorithm_of_the_module_has_its_formula_here():
    ours = {name for name in registry.names() if registry.is_built_in(registry.parse(name))}
    packed = {text.partition(":")[0] for text in PACKED}
    assert ours == {*EXTRA, *packed, "two-level"}


def test_neighbours_take_scratch_space_only_for_what_is_read_early():
    exchange = all_reduce(2, 1, [[Transfer(0, 1, 0, 1, True), Transfer(1, 0, 0, 1, True)]])
    assert [p.scratch for p in promises.compile_all(exchange, 10, [2])] == [10, 10]
    for name in ("direct", "gather-broadcast", "binomial-tree"):
        programs = promises.compile_all(promises.build(name, 4), 840, [4])
        assert all(program.scratch == 0 for program in programs)
