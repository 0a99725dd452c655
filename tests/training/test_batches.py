"""Which rank sees which samples."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import structured
from mpiddp.errors import ConfigurationError
from mpiddp.training.data.batches import Cut, make_evaluation_batches, make_training_batches
from mpiddp.training.data.data_sets import DataSet, SampleStream, Split
from mpiddp.training.data.reading import BatchReading
from mpiddp.training.data.samples import BatchError, Samples
from mpiddp.training.data.seeding import mix_seed
from mpiddp.training.options.config import Configuration
from mpiddp.training.step.step import split_batch
from mpiddp.training.task.loading import load_data, load_on_all
from mpiddp.training.task.task import Task

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
    samples=sizes, ranks=st.integers(1, 6), batch_size=st.integers(1, 8),
    passes=st.integers(1, 3), epoch=st.integers(1, 5), drops=st.booleans(),
)  # fmt: skip
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
    batches = make_training_batches(Samples(numbered(30), seed=seed), Cut(7, 0, 1))
    return [label for _, labels, *_ in batches.start(epoch) for label in labels.tolist()]


def test_the_order_follows_seed_and_epoch() -> None:
    # Runs go on with the draws that they had under an older release.
    assert mix_seed(0, 1, 2) == 41228420717678771
    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(7, 1)


class Lines(structured.Stream):
    """Numbers of lines; how often it was iterated is counted."""

    def __init__(self, lines: int, says: int | None = None, bad: int = -1) -> None:
        super().__init__(range(lines), says)
        self.bad, self.begun, self.made = bad, 0, list[int]()

    def __iter__(self) -> Any:
        self.begun += 1
        for number in range(len(self.split)):
            if number == self.bad:
                raise ValueError(f"line {number}\nis cut off")
            # Every third sample is made only if it is taken.
            yield partial(self.make, number) if number % 3 == 0 else (torch.ones(1), number)

    def make(self, number: int) -> Any:
        self.made.append(number)
        return torch.ones(1), number


def read(lines: Lines, ranks: int, size: int = 2, drops: bool = False) -> list[list[int]]:
    """What each rank trains on in the second epoch."""
    found = []
    for rank in range(ranks):
        samples = Samples(SampleStream(lines, seed=0))
        batches = make_training_batches(samples, Cut(size, rank, ranks, drops))
        for epoch in (1, 2):
            mine = [int(each) for batch in batches.start(epoch) for each in batch.targets]
        found.append(mine)
    return found


def test_ranks_take_turns() -> None:
    lines = Lines(10)
    assert read(lines, 2) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert read(lines, 2, drops=True) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # An iteration serves a whole epoch, and a rank makes only the samples that it takes.
    assert lines.begun == 8 and lines.epoch == 2
    assert sorted(lines.made) == sorted(2 * [0, 3, 6, 9, 0, 3, 6])


def test_every_rank_draws_the_same() -> None:
    streams = [SampleStream(structured.load_noise().train, seed=0) for _ in range(2)]
    whole = [streams[0].take(2, place)[0] for place in range(9)]
    torch.rand(7)
    # Passed over, from the beginning and from where it was.
    assert torch.equal(streams[1].take(2, 5)[0], whole[5])
    assert torch.equal(streams[1].take(2, 8)[0], whole[8])


@pytest.mark.parametrize("workers", [0, 1])
def test_every_evaluation_has_all_samples(workers: int) -> None:
    for ranks in (1, 3, 12):
        seen = []
        for rank in range(ranks):
            samples, cut = Samples(SampleStream(Lines(10), seed=0), "test"), Cut(2, rank, ranks)
            reading = BatchReading(workers if (ranks, rank) == (3, 1) else 0)
            batches = make_evaluation_batches(samples, cut, reading)
            rounds = [[int(n) for b in batches for n in b.targets] for _ in range(2)]
            batches.reader.close()
            assert rounds[0] == rounds[1]
            seen += rounds[0]
        assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (Lines(9, says=10), "expected 10 samples in an iteration on each rank, .* found 9"),
        (Lines(11, says=10), "expected 10 samples in an iteration on each rank, .* found more"),
        (Lines(10, bad=9), "sample 9 cannot be read, .* in __iter__.: ValueError: line 9 is cut"),
    ],
    ids=["short", "long", "bad"],
)
def test_another_length_is_an_error_on_every_rank(lines: Lines, message: str, drops: bool) -> None:
    for rank in range(3):
        samples = Samples(SampleStream(lines, seed=0))
        # The last step of 3 x 2 has four samples.
        batches = make_training_batches(samples, Cut(2, rank, 3, drops)).start(1)
        with pytest.raises(BatchError, match=f"^training data: {message}") as caught:
            list(batches)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "lines", "message"),
    [
        ({"workers": 2}, Lines(3), "workers: expected at most 1 for iterable data, .* found 2"),
        ({"on_bad_sample": "skip"}, Lines(3), "on_bad_sample: expected stop for iterable data"),
        ({}, Lines(3, bad=0), "data: sample 0 cannot be read, .* line 0 is cut off, in digits"),
    ],
    ids=["workers", "skip", "unreadable"],
)
def test_what_streams_cannot_have_is_refused(changes, lines, message):
    options = replace(Configuration(), **changes)
    session: Any = SimpleNamespace(gather=lambda each: [each], agree=lambda each, _: each)
    train = [(torch.ones(1), 0)]
    task = Task(data=lambda: DataSet(train, lines, classes=0))
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        load_on_all(options, task, session)


def test_ranks_compare_the_first_sample() -> None:
    def digest(first: float) -> str:
        train = structured.Stream([({"a": torch.full((2,), first)}, 0), ({"a": torch.ones(2)}, 1)])
        data = load_data(Task(data=lambda: DataSet(train, Lines(3), classes=2)), seed=0)
        assert data.shape == {"a": (2,)}
        return data.digest()

    assert digest(1.0) == digest(1.0) != digest(2.0)
