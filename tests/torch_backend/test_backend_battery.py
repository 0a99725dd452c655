"""Every call of torch.distributed leaves under mpiddp what it leaves under Gloo."""

import comparison
import messages
import pytest

pytestmark = pytest.mark.mpi
DEADLINE = 150.0
SIZES = (3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 5)))


def compare(pool, size, function, *arguments, fewest=None):
    """No rank finds a difference, of ``fewest`` cases if it counts them."""
    found = pool("openmpi", size).call(function, *arguments, timeout=DEADLINE).values
    if fewest is not None:
        assert all(count > fewest for count, _ in found)
        found = [differences for _, differences in found]
    assert found == [[]] * size


@pytest.mark.parametrize("size", SIZES)
def test_every_call_leaves_what_it_leaves_under_gloo(size, pool):
    # Of 2 and 5 ranks with every type and operator of every call.
    compare(pool, size, comparison.compare_calls, size != 3, fewest=300)


@pytest.mark.parametrize("size", SIZES)
def test_messages_objects_and_works(size, pool):
    compare(pool, size, messages.compare_messages)


def test_messages_objects_and_works_through_gloo(pool):
    compare(pool, 3, messages.compare_messages_through_gloo)


@pytest.mark.parametrize("size", SIZES[::2])
def test_groups_that_overlap(size, pool):
    compare(pool, size, messages.compare_groups)


@pytest.mark.parametrize("size", SIZES[::2])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_groups_of_several_threads(size, dtype, pool):
    compare(pool, size, messages.compare_threads, 30, dtype)


@pytest.mark.long
def test_a_group_that_has_another_backend_as_well(pool):
    backend = "cpu:mpiddp,cuda:gloo"
    compare(pool, 3, comparison.compare_calls, False, backend, fewest=0)
    compare(pool, 3, messages.compare_messages, backend)
