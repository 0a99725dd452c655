"""Operators: which types they take, in which type they add, and what comes out."""

import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import promises
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
    """Reduces the tensors, from the left, into the one at place ``own`` or into another one.

    Returns the result and the operands afterwards."""
    count = len(tensors[0])
    tensors = [tensor.clone() for tensor in tensors]
    out = tensors[own] if own is not None else torch.full((count,), 55).to(arithmetic.dtype)
    room = torch.full((count,), 77).to(arithmetic.accumulation)
    needs = arithmetic.needs_workspace(own, len(tensors))
    spans = [make_span(tensor) for tensor in tensors]
    views = [span.operand(0, count) for span in spans]
    out_span, room_span = make_span(out), make_span(room)
    actions = arithmetic.reduce(
        views[own] if own is not None else out_span.operand(0, count),
        views,
        own,
        final,
        room_span.operand(0, count) if needs else None,
    )
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
