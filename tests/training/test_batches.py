"""Which rank sees which samples."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.sync.parameter_server.server import Server, UpdateRule
from mpiddp.training.data.batches import (
    Cut,
    Share,
    SharedBatches,
    check_share,
    make_evaluation_batches,
    make_training_batches,
)
from mpiddp.training.data.data import Split
from mpiddp.training.data.reading import Reader
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


def test_a_batch_may_be_as_large_as_a_share_and_no_larger() -> None:
    for samples, ranks, batch_size in ((3, 3, 1), (10, 3, 3), (8, 1, 8)):
        check_share(samples, ranks, batch_size)
    with pytest.raises(ConfigurationError, match=r"found 2 samples for 3 ranks: start fewer"):
        check_share(2, 3, 1)
    with pytest.raises(ConfigurationError, match=r"batch_size: expected at most 3, .* found 4"):
        check_share(10, 3, 4)


def make_server(workers: int) -> Server:
    """The one that gives batches to workers without a bound."""
    wire, weights = SimpleNamespace(timeout=1.0), torch.zeros(1)
    rule = UpdateRule(lambda parameters: torch.optim.SGD(parameters), lambda step: 0.1, None)
    return Server(wire, 0, range(workers), weights, [1], rule)


class Workers:
    """They take batches of one split, in any order, until all pause."""

    def __init__(self, split: Split, cut: Cut, dice: random.Random) -> None:
        self.split, self.cut, self.dice = split, cut, dice
        self.server = make_server(cut.ranks)
        self.tickets = list(range(cut.ranks))

    def make_batches(self, place: int) -> SharedBatches:
        share = Share(len(self.split), 3, self.cut)
        return SharedBatches(Reader(Samples(self.split)), share, lambda: self.tickets[place])

    def train(self, taken: int, steps: int | None, *, leaving: float = 0.0) -> list[list[int]]:
        """The samples of each batch; ``leaving``: how likely a worker leaves after one."""
        found = list[list[int]]()
        running = {
            place: self.make_batches(place).start(1, taken, steps)
            for place in range(self.cut.ranks)
        }
        while running:
            place = self.dice.choice(sorted(running))
            batch = next(running[place], None)
            if batch is None:
                del running[place]
                continue
            found.append(batch.targets.tolist())
            self.tickets[place] = self.server._choose_number()
            if self.dice.random() < leaving:
                del running[place]
        return found

    def sum_up(self, batches: int) -> tuple[int, int]:
        """As after so many of them; all by the first rank's worker."""
        found = [(batches, self.tickets[0]), *((0, each) for each in self.tickets[1:])]
        return self.make_batches(0).sum_up(batches, lambda _: found)


@given(
    samples=st.integers(1, 60),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4) | st.none()), max_size=4),
    batch_size=st.integers(1, 9),
    drops=st.booleans(),
    dice=st.randoms(use_true_random=False),
)
def test_workers_that_pause_and_other_workers_take_every_sample_once(
    samples, worlds, batch_size, drops, dice
):
    taken, seen = 0, list[int]()
    for count, steps in worlds:
        workers = Workers(numbered(samples), Cut(batch_size, 0, count, drops), dice)
        if steps is None:
            # It stays due, or is due to some of them only.
            workers.server.pause_when(lambda: dice.random() < 0.3)
        batches = workers.make_batches(0)
        left, found = batches.count(taken), workers.train(taken, steps)
        taken += len(found) * batch_size
        seen += [sample for each in found for sample in each]
        assert len(seen) == len(set(seen)) == min(taken, samples)
        if steps is not None:
            done = workers.sum_up(len(found))
            assert done == (len(found) * batch_size, min(steps, left))
    last = Workers(numbered(samples), Cut(batch_size, 0, dice.randint(1, 5), drops), dice)
    seen += [sample for each in last.train(taken, None) for sample in each]
    expected = samples // batch_size * batch_size if drops else samples
    assert len(seen) == len(set(seen)) == expected


@given(
    samples=st.integers(1, 60),
    ranks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch_size=st.integers(1, 9),
    dice=st.randoms(use_true_random=False),
)
def test_no_sample_is_skipped_after_workers_that_left_their_loops(samples, ranks, batch_size, dice):
    workers = Workers(numbered(samples), Cut(batch_size, 0, ranks[0]), dice)
    found = workers.train(0, None, leaving=0.3)
    taken, _ = workers.sum_up(len(found))
    found += Workers(numbered(samples), Cut(batch_size, 0, ranks[1]), dice).train(taken, None)
    assert {sample for each in found for sample in each} == set(range(samples))


def test_epochs_of_workers_that_take_in_turns_differ() -> None:
    ticket = iter(range(60))
    share = Share(20, 3, Cut(4))
    batches = SharedBatches(Reader(Samples(numbered(20))), share, lambda: next(ticket) % 6)
    first, second = (
        [label for batch in batches.start(epoch) for label in batch.targets.tolist()]
        for epoch in (1, 2)
    )
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
