"""Rounding: the schedule alone decides it, whatever carries the call and however it is cut; and
narrow types are rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import promises
from mpiddp.collectives.transport.operators import NARROW, Operator, choose_accumulation
from mpiddp.schedules import registry
from mpiddp.schedules.proof import find_sums
from thread_ranks import Team

SINGLE = ("one-shot", "direct", "direct:servers=2", "central", "central:servers=2",
          "gather-broadcast")  # fmt: skip
"""Algorithms whose sums are made at once, so that narrow operands travel as they are."""


def draw_floats(ranks: int, count: int, seed: int) -> list[torch.Tensor]:
    """Of very different sizes, so that the order of additions shows in the last bits."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0 ** torch.randint(-12, 12, (count,), generator=generator)
    return [torch.randn(count, generator=generator) * scale for _ in range(ranks)]


def run_team(schedule, before, nodes, **options) -> list[torch.Tensor]:
    buffers = [buffer.clone() for buffer in before]
    Team(schedule, buffers, nodes, **options).play()
    return buffers


# ---- the same bits ------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.names())
@settings(max_examples=8)
@given(data=st.data())
def test_the_bits_are_the_oracle_s_whatever_carries_the_call_and_however_it_is_cut(name, data):
    ranks = data.draw(st.integers(2, 6), "ranks")
    nodes = data.draw(promises.node_sizes(ranks), "nodes")
    schedule = promises.build(name, ranks, nodes)
    schedule = data.draw(st.sampled_from(promises.list_variants(schedule)), "schedule")
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


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("nodes", [[1] * 5, [5], [2, 1, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_all_ranks_end_with_the_same_bits(name, nodes, dtype):
    schedule = promises.build(name, 5, nodes)
    before = [buffer.to(dtype) for buffer in draw_floats(5, 6 * schedule.chunks + 1, 4)]
    for operator in (Operator.SUM, Operator.PRODUCT, Operator.AVERAGE):
        # As narrow as it is: the worst that rounding can do.
        after = run_team(schedule, before, nodes, operator=operator, cell=3, message=7)
        first = after[schedule.members[0]].view(torch.uint8)
        assert all(torch.equal(after[rank].view(torch.uint8), first) for rank in schedule.members)


# ---- rounded once -------------------------------------------------------------------------


def sum_from_the_left(before, members) -> torch.Tensor:
    total = before[members[0]].float()
    for rank in members[1:]:
        total = total + before[rank].float()
    return total


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("nodes", [[1] * 5, [5], [3, 2]])
def test_a_sum_of_narrow_numbers_is_the_float32_sum_rounded_once(name, nodes, dtype):
    schedule = registry.parse(name).build(5)
    assert find_sums(schedule).is_single
    before = [buffer.to(dtype) for buffer in draw_floats(5, 61, 2)]
    for operator in (Operator.SUM, Operator.AVERAGE):
        accumulation = choose_accumulation(operator, dtype, None)
        after = run_team(
            schedule, before, nodes, operator=operator, accumulation=accumulation, cell=4, message=9
        )
        expected = sum_from_the_left(before, schedule.members)
        if operator is Operator.AVERAGE:
            expected = expected / len(schedule.members)
        for rank in schedule.members:
            assert torch.equal(after[rank], expected.to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding_at_every_addition_gives_other_numbers(dtype):
    schedule = registry.parse("direct").build(5)
    before = [buffer.to(dtype) for buffer in draw_floats(5, 61, 2)]
    narrow = run_team(schedule, before, [5])[0]
    assert not torch.equal(narrow, sum_from_the_left(before, schedule.members).to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("operator", [Operator.MIN, Operator.MAX], ids=str)
def test_the_least_and_the_greatest_of_narrow_numbers_are_exact(name, operator, dtype):
    schedule = promises.build(name, 4)
    assert choose_accumulation(operator, dtype, None) is dtype
    before = [buffer.to(dtype) for buffer in draw_floats(4, 2 * schedule.chunks + 1, 6)]
    for nodes in ([1] * 4, [4], [1, 3]):
        after = run_team(schedule, before, nodes, operator=operator, cell=2, message=3)
        promises.check(schedule, before, after, operator)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_an_average_divides_the_complete_sum_once(name, ranks):
    schedule = promises.build(name, ranks)
    before = draw_floats(ranks, 3 * schedule.chunks + 2, 8)
    for nodes in ([1] * ranks, [ranks]):
        sums = run_team(schedule, before, nodes, cell=2, message=4)
        averages = run_team(schedule, before, nodes, operator=Operator.AVERAGE, cell=2, message=4)
        for rank in schedule.members:
            divisor = np.float32(len(schedule.members))
            assert np.array_equal(averages[rank].numpy(), sums[rank].numpy() / divisor)
