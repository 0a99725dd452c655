"""A parameter server's clock: nobody gets further ahead than allowed, and nobody is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.sync.parameter_server.staleness import Clock

BOUNDS = st.none() | st.integers(0, 4)


def run(workers, bound, choices, steps):
    """Workers that compute take turns as ``choices`` says; yields the steps after each push."""
    clock = Clock(workers, bound)
    computing = set(range(workers))
    done = [0] * workers
    for choice in choices:
        ready = sorted(worker for worker in computing if done[worker] < steps)
        if not ready:
            return
        worker = ready[choice % len(ready)]
        computing.remove(worker)
        done[worker] += 1
        clock.push(worker)
        clock.update(worker)
        released = clock.release()
        computing.update(released)
        yield clock, done, computing


@given(st.integers(1, 5), BOUNDS, st.lists(st.integers(0, 100), max_size=80), st.integers(1, 12))
def test_who_computes_is_never_more_than_the_bound_ahead(workers, bound, choices, steps):
    for clock, done, computing in run(workers, bound, choices, steps):
        assert clock.updates == sum(done)
        for worker in range(workers):
            within = bound is None or done[worker] - min(done) <= bound
            # Whoever may go on does so at once, and nobody else.
            assert (worker in computing) is within


@given(st.integers(2, 5), st.integers(0, 4), st.lists(st.integers(0, 100), max_size=80))
def test_staleness_is_bounded_by_what_the_others_can_push(workers, bound, choices):
    for clock, done, _ in run(workers, bound, choices, 1000):
        # While one computes each other one can be bound behind it, and get bound + 1 ahead of it.
        assert max(clock.staleness) <= (workers - 1) * (2 * bound + 1)
        assert clock.staleness.total() == sum(done)


def test_without_a_bound_nobody_waits_and_staleness_is_what_others_did_meanwhile():
    clock = Clock(3, None)
    for _ in range(4):
        clock.push(0)
        clock.update(0)
        assert clock.release() == [0]
    clock.push(2)
    clock.update(2)
    assert clock.release() == [2]
    assert clock.staleness == {0: 4, 4: 1}


def test_in_step_all_are_released_together_and_nothing_is_stale():
    clock = Clock(3, 0)
    for worker in (2, 0):
        clock.push(worker)
        assert clock.release() == []
    clock.push(1)
    clock.update_together()
    assert clock.release() == [0, 1, 2]
    assert clock.staleness == {0: 3}


@pytest.mark.parametrize(("bound", "updates"), [(0, 7), (2, 21), (None, 21)])
def test_who_goes_on_from_a_state_has_made_its_steps(bound, updates):
    clock = Clock(3, bound)
    clock.load_state({"steps": [7, 8, 9], "updates": 24, "staleness": {1: 4}}, 9)
    assert (clock.begun, clock.updates, clock.staleness) == (7, 24, {1: 4})
    # Of other workers: each made as many steps as the training.
    clock.load_state({"steps": [5, 9], "updates": 14, "staleness": {}}, 7)
    assert (clock.begun, clock.updates) == (7, updates)
