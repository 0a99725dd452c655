"""Programs and operators: the schedule alone decides each bit; narrow types are rounded once."""

import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import promises
from crews import Team
from mpiddp.collectives.compiler.instructions import ProgramMessage
from mpiddp.collectives.executor import Description, Recent
from mpiddp.collectives.transport.operators import (
    NARROW,
    TYPES,
    Arithmetic,
    Operator,
    choose_accumulation,
    make_span,
    name_type,
)
from mpiddp.errors import ConfigurationError
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.proof import find_sums, prove
from mpiddp.schedules.schedule import all_reduce

SINGLE = ("one-shot", "direct:servers=2", "central", "gather-broadcast")
"""Algorithms whose sums are made at once, so that narrow operands travel as they are."""


def draw_floats(ranks: int, count: int, seed: int) -> list[torch.Tensor]:
    """Of very different sizes, so that the order of additions shows in the last bits."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-12, 12, (count,), generator=generator)
    return [torch.randn(count, generator=generator) * scale for _ in range(ranks)]


def run_team(schedule, before, nodes, **options) -> list[torch.Tensor]:
    """What the second run leaves; AssertionError if elements around a buffer change."""
    around = [torch.full((len(each) + 8,), 7.0, dtype=each.dtype) for each in before]
    buffers = [each[4:-4] for each in around]
    team = Team(schedule, buffers, nodes, **options)
    for _ in range(2):
        for buffer, numbers in zip(buffers, before, strict=True):
            buffer.copy_(numbers)
        team.play()
    assert all(each[:4].eq(7).all() and each[-4:].eq(7).all() for each in around)
    return buffers


@pytest.mark.parametrize("name", [*registry.names(), ""])
@settings(max_examples=6)
@given(data=st.data())
def test_the_bits_are_the_oracle_s_whatever_carries_the_call_and_however_it_is_cut(name, data):
    """And of schedules that nobody would write."""
    if name:
        ranks = data.draw(st.integers(2, 6), "ranks")
        nodes = data.draw(promises.node_sizes(ranks), "nodes")
        variants = promises.list_variants(promises.build(name, ranks, nodes))
        schedule = data.draw(st.sampled_from(variants), "schedule")
    else:
        schedule = data.draw(promises.random_trees(), "schedule")
        ranks = schedule.ranks
        nodes = data.draw(promises.node_sizes(ranks), "nodes")
    count = data.draw(st.integers(0, 4 * schedule.chunks + 3), "count")
    before = draw_floats(ranks, count, data.draw(st.integers(0, 99), "seed"))
    expected = oracle.run(schedule, [buffer.numpy() for buffer in before], seed=0)
    for places in ([1] * ranks, [ranks], nodes):
        cell = data.draw(st.integers(1, 9), "cell")
        after = run_team(
            schedule, before, places, cell=cell, message=cell * data.draw(st.integers(1, 4)),
            flows=data.draw(st.booleans(), "flows"),
        )  # fmt: skip
        for rank, part, _ in oracle.promised(schedule, before):
            assert after[rank][part].numpy().tobytes() == expected[rank][part].tobytes()


@pytest.mark.parametrize(
    ("members", "sums"),
    [
        # Chunk 0 is whole in rank 3 one step earlier than chunk 1.
        ([0, 1, 3], [[add(0, 3, 0)], [add(1, 3, 0, 2)], [add(0, 3, 1)]]),
        # Rank 3 is a server, and has nothing yet of chunk 1.
        ([0, 1, 2], [[add(0, 3, 0)], [add(1, 3, 0, 2)], [add(2, 3, 0, 2), add(0, 3, 1)]]),
    ],
    ids=["sum", "server"],
)
def test_chunks_that_come_together_are_added_each_to_what_is_there(members, sums):
    schedule = all_reduce(
        4, 2, [*sums, [copy(3, rank, 0, 2) for rank in range(3)]], members=members
    )
    prove(schedule)
    before = [torch.full((4,), 6.0 * (rank + 1)) for rank in range(4)]
    after = run_team(schedule, before, [1, 3], operator=Operator.AVERAGE)
    promises.check(schedule, before, after, Operator.AVERAGE)


@pytest.mark.parametrize("name", registry.names())
def test_averages_are_divided_once_and_maxima_of_narrow_numbers_are_exact(name):
    schedule = promises.build(name, 6)
    before = draw_floats(6, 3 * schedule.chunks + 2, 8)
    narrow = [each.bfloat16() for each in before]
    assert choose_accumulation(Operator.MAX, torch.bfloat16, None) is torch.bfloat16
    divisor = np.float32(len(schedule.members))
    for nodes in ([1] * 6, [6]):
        sums = run_team(schedule, before, nodes, cell=2, message=4)
        averages = run_team(schedule, before, nodes, operator=Operator.AVERAGE, cell=2, message=4)
        for rank in schedule.members:
            assert np.array_equal(averages[rank].numpy(), sums[rank].numpy() / divisor)
        after = run_team(schedule, narrow, nodes, operator=Operator.MAX, cell=2, message=3)
        promises.check(schedule, narrow, after, Operator.MAX)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("nodes", [[1] * 5, [5]])
def test_a_sum_of_narrow_numbers_is_the_float32_sum_rounded_once(name, nodes, dtype):
    schedule = registry.parse(name).build(5)
    assert find_sums(schedule).is_single
    before = [buffer.to(dtype) for buffer in draw_floats(5, 61, 2)]
    for operator in (Operator.SUM, Operator.AVERAGE):
        accumulation = choose_accumulation(operator, dtype, None)
        after = run_team(
            schedule, before, nodes, operator=operator, accumulation=accumulation, cell=4, message=9
        )
        # From the left.
        expected = sum(before[rank].float() for rank in schedule.members)
        if operator is Operator.AVERAGE:
            expected = expected / len(schedule.members)
        for rank in schedule.members:
            assert torch.equal(after[rank], expected.to(dtype))


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("ranks", [2, 6])
def test_in_memory_a_binding_takes_no_more_than_blocks_beside_what_is_read_early(name, ranks):
    schedule = promises.build(name, ranks)
    cell, count = 8, 48 * schedule.chunks
    most = max(len({t.src for t in step if t.reduce}) for step in schedule.steps)
    for dtype, accumulation in ((torch.float32, None), (torch.float16, torch.float32)):
        buffers = [torch.zeros(count, dtype=dtype) for _ in range(ranks)]
        team = Team(schedule, buffers, [ranks], accumulation=accumulation, cell=cell)
        for program, workspace in zip(team.programs, team.workspaces, strict=True):
            wide = (accumulation or dtype).itemsize
            blocks = most * cell * dtype.itemsize + cell * wide
            spaces = workspace._spaces.values()
            taken = sum(len(space.memory) * space.dtype.itemsize for space in spaces)
            assert taken <= program.scratch * dtype.itemsize + blocks


def test_the_value_that_was_unused_longest_makes_room():
    recent, made = Recent(most=2), []
    for key in "abacab":
        recent.find(key, lambda key=key: made.append(key) or key)
    assert made == list("abcb")


def test_another_thread_may_make_room_while_one_looks():
    recent: Recent[int] = Recent(most=2)

    class Key:
        """Between two accesses another thread looks for two other values."""

        def __hash__(self):
            for other in next(others):
                recent.find(other, lambda: 0)
            return 1000

    key, others = Key(), iter([(), (), (), (1, 2), ()])
    assert [recent.find(each, lambda: 1) for each in (key, 0, key)] == [1, 1, 1]


def test_a_message_that_does_not_come_is_said_to_be_missed_in_its_step():
    description = Description("all_reduce (ring over mpi)", 6, {})
    message = ProgramMessage(True, 3, 1, 0, 5, False, 0)
    said = "all_reduce (ring over mpi), in step 4 of 6: waited for rank 1"
    assert description.describe_message(message) == said


FLOATS = tuple(dtype for dtype in TYPES if dtype.is_floating_point)
INTEGERS = tuple(dtype for dtype in TYPES if not dtype.is_floating_point)


@pytest.mark.parametrize(("operator", "dtype"), list(itertools.product(Operator, TYPES)))
def test_narrow_sums_are_made_in_float32_unless_nothing_is_rounded(operator, dtype):
    if operator is Operator.AVERAGE and dtype in INTEGERS:
        with pytest.raises(ConfigurationError, match=f"an average of {name_type(dtype)}"):
            choose_accumulation(operator, dtype, None)
        return
    found = choose_accumulation(operator, dtype, None)
    rounds = operator not in (Operator.MIN, Operator.MAX)
    assert found is (torch.float32 if rounds and dtype in NARROW else dtype)


@pytest.mark.parametrize(("dtype", "wish"), list(itertools.product(TYPES, TYPES)))
def test_a_wish_must_be_the_own_type_or_a_wider_floating_one(dtype, wish):
    if wish is dtype or (
        FLOATS.count(dtype) and wish.is_floating_point and wish.itemsize > dtype.itemsize
    ):
        assert choose_accumulation(Operator.SUM, dtype, wish) is wish
        return
    with pytest.raises(ConfigurationError, match=f"must be {name_type(dtype)} or a wider "):
        choose_accumulation(Operator.SUM, dtype, wish)


def reduce_once(arithmetic, tensors, own, final, repeat=1):
    """Reduce from left to right into ``tensors[own]`` or a new one; returns it and the operands."""
    count = len(tensors[0])
    tensors = [tensor.clone() for tensor in tensors]
    out = tensors[own] if own is not None else torch.full((count,), 55).to(arithmetic.dtype)
    room = torch.full((count,), 77).to(arithmetic.accumulation)
    needs = arithmetic.needs_workspace(own, len(tensors))
    spans = [make_span(tensor) for tensor in tensors]
    views = [span.operand(0, count) for span in spans]
    out_span, room_span = make_span(out), make_span(room)
    actions = arithmetic.reduce(
        views[own] if own is not None else out_span.operand(0, count), views, own, final,
        room_span.operand(0, count) if needs else None,
    )  # fmt: skip
    first = [tensor.clone() for tensor in tensors]
    for _ in range(repeat):
        for tensor, value in zip(tensors, first, strict=True):
            tensor.copy_(value)
        for action in actions:
            action()
    return out, tensors


def list_cases():
    for operator, dtype in itertools.product(Operator, TYPES):
        for accumulation in (dtype, torch.float32, torch.float64):
            try:
                choose_accumulation(operator, dtype, accumulation)
            except ConfigurationError:
                continue
            yield operator, dtype, accumulation


@pytest.mark.parametrize(
    ("operator", "dtype", "accumulation"), sorted(set(list_cases()), key=str), ids=str
)
@settings(max_examples=8)
@given(st.data())
def test_operands_are_combined_from_the_left_in_the_wider_type(operator, dtype, accumulation, data):
    operands = data.draw(st.integers(1, 5), "operands")
    own = data.draw(st.none() | st.integers(0, operands - 1), "own")
    count = data.draw(st.integers(0, 12), "count")
    final = data.draw(st.booleans(), "final")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    if dtype.is_floating_point:
        tensors = [
            torch.randn(count, generator=generator).mul(3).to(dtype) for _ in range(operands)
        ]
    else:
        tensors = [
            torch.randint(-9, 10, (count,), generator=generator).to(dtype) for _ in range(operands)
        ]
    expected = tensors[0].to(accumulation)
    for tensor in tensors[1:]:
        expected = promises.FUNCTIONS[operator](expected, tensor.to(accumulation))
    if final and operator is Operator.AVERAGE:
        expected = expected / 6
    arithmetic = Arithmetic(operator, dtype, accumulation, 6)
    result, after = reduce_once(arithmetic, tensors, own, final, repeat=2)
    assert torch.equal(result, expected.to(dtype))
    for place, (tensor, before) in enumerate(zip(after, tensors, strict=True)):
        assert place == own or torch.equal(tensor, before), "an operand of somebody else changed"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operator", Operator)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_number_stays_none(dtype, operator, place):
    tensors = [torch.tensor([1.0, float(rank)], dtype=dtype) for rank in range(3)]
    tensors[place][0] = float("nan")
    result, _ = reduce_once(Arithmetic(operator, dtype, dtype, 3), tensors, 1, True)
    assert result[0].isnan() and not result[1].isnan()


def test_a_span_does_not_keep_the_tensor_alive():
    memory = np.zeros(8)
    owner = weakref.ref(memory)
    span = make_span(torch.from_numpy(memory))
    del memory
    assert owner() is None and len(span.memory) == 8
