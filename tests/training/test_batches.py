"""Which rank sees which samples."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.training.batches import (
    SharedBatches,
    check_share,
    make_evaluation_batches,
    make_training_batches,
)
from mpiddp.training.data import Split

sizes = st.integers(min_value=1, max_value=40)


def numbered(samples: int) -> Split:
    """A split whose features and labels are the samples' numbers."""
    labels = np.arange(samples)
    return Split(labels.astype(np.float32)[:, None], labels)


@settings(deadline=None)
@given(samples=sizes, ranks=st.integers(1, 12), batch_size=sizes)
def test_evaluation_counts_every_sample_exactly_once(
    samples: int, ranks: int, batch_size: int
) -> None:
    split, seen = numbered(samples), list[int]()
    shares = []
    for rank in range(ranks):
        batches = list(make_evaluation_batches(split, batch_size, rank, ranks))
        assert all(1 <= len(labels) <= batch_size for _, labels in batches)
        assert all((features[:, 0] == labels).all() for features, labels in batches)
        mine = [label for _, labels in batches for label in labels.tolist()]
        shares.append(len(mine))
        seen += mine
    assert sorted(seen) == list(range(samples))
    assert max(shares) - min(shares) <= 1


@settings(deadline=None)
@given(samples=sizes, ranks=st.integers(1, 6), batch_size=sizes, epoch=st.integers(1, 5))
def test_training_takes_every_sample_in_equal_steps(
    samples: int, ranks: int, batch_size: int, epoch: int
) -> None:
    steps, seen = [], Counter[int]()
    for rank in range(ranks):
        batches = make_training_batches(numbered(samples), batch_size, 0, rank, ranks)
        mine = list(batches.start(epoch))
        assert len(mine) == len(batches)
        steps.append([len(labels) for _, labels in mine])
        seen.update(label for _, labels in mine for label in labels.tolist())
    # Equal sizes on all ranks make DDP's average over ranks an average over samples.
    assert all(step == steps[0] for step in steps)
    assert set(seen) == set(range(samples))
    assert seen.total() - samples < ranks


@settings(deadline=None)
@given(
    samples=sizes,
    batch_size=st.integers(1, 5),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_other_ranks_go_on_with_the_samples_that_are_left(samples, batch_size, worlds):
    taken, seen = 0, Counter[int]()
    for ranks, steps in worlds:
        if taken + ranks * batch_size * steps >= samples:
            break
        for rank in range(ranks):
            share = make_training_batches(numbered(samples), batch_size, 0, rank, ranks)
            batches = list(share.start(1, taken))
            assert len(batches) == share.count(taken)
            seen.update(label for _, labels in batches[:steps] for label in labels.tolist())
        taken += ranks * batch_size * steps
        # Each once so far.
        assert seen.total() == len(seen) == taken
    for rank in range(2):
        share = make_training_batches(numbered(samples), batch_size, 0, rank, 2)
        seen.update(label for _, labels in share.start(1, taken) for label in labels.tolist())
    assert set(seen) == set(range(samples))
    assert seen.total() - samples < 2


def order(seed: int, epoch: int) -> list[int]:
    batches = make_training_batches(numbered(30), 7, seed, 0, 1)
    return [label for _, labels in batches.start(epoch) for label in labels.tolist()]


def test_the_order_follows_seed_and_epoch() -> None:
    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(7, 1)


@pytest.mark.parametrize(("samples", "ranks", "batch_size"), [(3, 3, 1), (10, 3, 3), (8, 1, 8)])
def test_a_batch_may_be_as_large_as_a_share(samples: int, ranks: int, batch_size: int) -> None:
    check_share(samples, ranks, batch_size)


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"found 2 samples for 3 ranks: start fewer"):
        check_share(2, 3, 1)


def test_a_batch_larger_than_a_share_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"batch_size: expected at most 3, .* found 4"):
        check_share(10, 3, 4)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), st.randoms(use_true_random=False))
def test_workers_that_take_in_turns_take_every_sample_once(samples, workers, batch_size, dice):
    split, tickets = numbered(samples), list(range(workers))
    seen = []
    for epoch in (1, 2):
        shares = [
            SharedBatches(split, batch_size, 3, workers, lambda place=place: tickets[place])
            for place in range(workers)
        ]
        tickets[:] = range(workers)
        given = workers
        running = {place: share.start(epoch) for place, share in enumerate(shares)}
        taken = []
        while running:
            place = dice.choice(sorted(running))
            batch = next(running[place], None)
            if batch is None:
                del running[place]
                continue
            taken += batch[1].tolist()
            tickets[place], given = given, given + 1
        assert sorted(taken) == list(range(samples))
        steps = -(-samples // batch_size)
        assert all(0 <= workers * len(share) - steps < workers for share in shares)
        seen.append(taken)
    if samples > 12 and workers == 1:
        assert seen[0] != seen[1]
