"""Which rank sees which samples."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.training.data.batches import (
    Cut,
    make_evaluation_batches,
    make_training_batches,
)
from mpiddp.training.data.data_sets import Split
from mpiddp.training.data.samples import Samples
from mpiddp.training.step.step import split_batch

sizes = st.integers(min_value=1, max_value=40)


def numbered(samples: int) -> Split:
    """A split whose features and labels are the samples' numbers."""
    labels = np.arange(samples)
    return Split(labels.astype(np.float32)[:, None], labels)


@given(samples=sizes, ranks=st.integers(1, 12), batch_size=sizes)
def test_evaluation_counts_every_sample_exactly_once(samples, ranks, batch_size):
    split, seen = numbered(samples), list[int]()
    shares = []
    for rank in range(ranks):
        batches = list(make_evaluation_batches(Samples(split), Cut(batch_size, rank, ranks)))
        assert all(1 <= len(labels) <= batch_size for _, labels, *_ in batches)
        assert all((features[:, 0] == labels).all() for features, labels, *_ in batches)
        mine = [label for _, labels, *_ in batches for label in labels.tolist()]
        shares.append(len(mine))
        seen += mine
    assert sorted(seen) == list(range(samples))
    assert max(shares) - min(shares) <= 1


@given(samples=sizes, ranks=st.integers(1, 6), size=st.integers(1, 8), drops=st.booleans())
def test_the_smallest_batch_is_known(samples: int, ranks: int, size: int, drops: bool) -> None:
    cuts = [Cut(size, rank, ranks, drops) for rank in range(ranks)]
    found = [len(part.positions) for cut in cuts for part in cut.cut(1, range(samples))]
    assert cuts[0].find_smallest(samples) == min(found, default=size)


@given(
    samples=sizes,
    ranks=st.integers(1, 6),
    batch_size=st.integers(1, 8),
    passes=st.integers(1, 3),
    epoch=st.integers(1, 5),
    drops=st.booleans(),
)
def test_a_step_is_the_mean_over_its_samples(samples, ranks, batch_size, passes, epoch, drops):
    cuts = [Cut(batch_size, rank, ranks, drops_last=drops) for rank in range(ranks)]
    batches = [make_training_batches(Samples(numbered(samples)), cut) for cut in cuts]
    shares = [list(each.start(epoch)) for each in batches]
    assert all(each.count() == len(share) for each, share in zip(batches, shares, strict=True))
    seen, steps = Counter[int](), []
    for turn in zip(*shares, strict=True):
        step = Counter[int]()
        for batch in turn:
            for part in split_batch(batch, passes):
                # The mean loss times its weight, averaged over the ranks.
                for label in part.targets.tolist() if part.weight else []:
                    step[label] += part.weight / ranks / len(part.targets)
        assert all(each == pytest.approx(1 / len(step)) for each in step.values())
        steps.append(len(step))
        seen.update(step.keys())
    assert seen.total() == len(seen)
    whole = batch_size * ranks
    assert all(size == whole for size in steps[:-1])
    assert len(seen) == (samples // whole * whole if drops else samples)


@given(
    samples=sizes,
    batch_size=st.integers(1, 5),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_other_ranks_go_on_with_the_samples_that_are_left(samples, batch_size, worlds):
    def train(ranks, taken, steps):
        for rank in range(ranks):
            batches = make_training_batches(
                Samples(numbered(samples)), Cut(batch_size, rank, ranks)
            )
            for batch in islice(batches.start(1, taken), steps):
                seen.update(batch.targets.tolist() if batch.weight else [])

    taken, seen = 0, Counter[int]()
    for ranks, steps in worlds:
        if taken + ranks * batch_size * steps >= samples:
            break
        train(ranks, taken, steps)
        taken += ranks * batch_size * steps
        # Each once so far.
        assert seen.total() == len(seen) == taken
    train(2, taken, None)
    assert seen == Counter(range(samples))


def order(seed: int, epoch: int) -> list[int]:
    batches = make_training_batches(Samples(numbered(30), seed=seed), Cut(7))
    return [label for _, labels, *_ in batches.start(epoch) for label in labels.tolist()]


def test_the_order_follows_seed_and_epoch() -> None:
    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(7, 1)
