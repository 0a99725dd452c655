"""Every call of torch.distributed leaves under mpiddp what it leaves under Gloo."""

from __future__ import annotations

import comparison
import messages
import pytest

from mpiddp.torch_backend.group import PART_BASE

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(170)]
DEADLINE = 150.0
SIZES = (3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 5)))


@pytest.mark.parametrize("size", SIZES)
def test_every_call_leaves_what_it_leaves_under_gloo(size, pool):
    called = pool("openmpi", size).call(comparison.compare_calls, False, timeout=DEADLINE)
    assert all(count > 300 for count, _ in called.values)
    assert [found for _, found in called.values] == [[]] * size


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_type_and_operator_of_every_call(size, pool):
    called = pool("openmpi", size).call(comparison.compare_calls, True, timeout=DEADLINE)
    assert all(count > 1000 for count, _ in called.values)
    assert [found for _, found in called.values] == [[]] * size


@pytest.mark.parametrize("size", SIZES)
def test_messages_objects_and_works(size, pool):
    called = pool("openmpi", size).call(messages.compare_messages, timeout=DEADLINE)
    assert called.values == [[]] * size


def test_messages_objects_and_works_through_gloo(pool):
    called = pool("openmpi", 3).call(messages.compare_messages_through_gloo, timeout=DEADLINE)
    assert called.values == [[]] * 3


@pytest.mark.parametrize("size", SIZES[::2])
def test_groups_that_overlap(size, pool):
    assert (
        pool("openmpi", size).call(messages.compare_groups, timeout=DEADLINE).values == [[]] * size
    )


@pytest.mark.parametrize("size", SIZES[::2])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_groups_of_several_threads(size, dtype, pool):
    called = pool("openmpi", size).call(messages.compare_threads, 30, dtype, timeout=DEADLINE)
    assert called.values == [[]] * size


@pytest.mark.long
def test_a_group_that_has_another_backend_as_well(pool):
    backend = "cpu:mpiddp,cuda:gloo"
    called = pool("openmpi", 3).call(comparison.compare_calls, False, backend, timeout=DEADLINE)
    assert [found for _, found in called.values] == [[]] * 3
    called = pool("openmpi", 3).call(messages.compare_messages, backend, timeout=DEADLINE)
    assert called.values == [[]] * 3
    split = pool("openmpi", 3).call(messages.split_a_group, backend).values
    assert split == ([[1, 1], [2, 1], [3, 1]] if PART_BASE is None else [[1, 1], [5, 2], [5, 2]])
