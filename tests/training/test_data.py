"""The data sets, each of those that are registered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import data_files
from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data_sets import DataSet, load, split_by_hash
from mpiddp.training.data.samples import Key, Samples
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.registry import DATASETS
from mpiddp.training.task.loading import read_first


@pytest.fixture(params=sorted(DATASETS))
def configuration(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Configuration:
    return data_files.provide(request.param, tmp_path, monkeypatch)


def test_samples_have_the_types_that_models_take(configuration: Configuration) -> None:
    data = load(configuration)
    for split in (data.train, data.test):
        inputs, targets, _ = Samples(split).read(Key(1, list(range(len(split)))))
        assert inputs.dtype == (torch.int64 if configuration.data == "text" else torch.float32)
        assert targets.dtype == torch.int64
        assert inputs.shape == (len(split), *data.shape)
        assert inputs.isfinite().all()
        found = set(targets.flatten().tolist())
        assert found <= set(range(data.classes))
        # Not every byte occurs in a text.
        assert len(found) == data.classes or data.classes == 256


def test_a_data_set_is_the_same_every_time(configuration: Configuration) -> None:
    assert load(configuration).digest() == load(configuration).digest()


@pytest.mark.parametrize("name", ["digits", "synthetic", "toy"])
def test_a_fifth_is_for_testing(name: str) -> None:
    data = load(Configuration(data=name))
    samples = len(data.train) + len(data.test)
    assert len(data.test) == samples // 5


@pytest.mark.parametrize("name", ["synthetic", "toy"])
def test_made_up_data_follows_seed_and_size(name: str) -> None:
    first, second = (load(Configuration(data=name, seed=seed, samples=50)) for seed in (0, 1))
    assert len(first.train) + len(first.test) == 50
    assert first.digest() != second.digest()


@pytest.mark.parametrize("name", ["synthetic", "toy"])
def test_made_up_data_can_be_learnt_by_a_straight_cut(name: str) -> None:
    data = load(Configuration(data=name))
    solution = np.linalg.lstsq(
        data.train.features.reshape(len(data.train), -1),
        np.eye(data.classes)[data.train.labels] - 1 / data.classes,
    )[0]
    scores = data.test.features.reshape(len(data.test), -1) @ solution
    assert (scores.argmax(axis=1) == data.test.labels).mean() > 0.9


def digits() -> DataSet:
    return load(Configuration(data="digits"))


def test_digits_are_those_of_the_original_collection() -> None:
    # Samples per digit of the collection's test part, from UCI's optdigits.names.
    counts = Counter(np.concatenate([digits().train.labels, digits().test.labels]).tolist())
    assert [counts[digit] for digit in range(10)] == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert digits().shape == (1, 8, 8)


def test_digits_are_scaled_from_nought_to_one() -> None:
    features = digits().train.features
    assert (features.min(), features.max()) == (0, 1)
    assert (features * 16 == np.round(features * 16)).all()


def test_the_split_of_the_digits_does_not_depend_on_the_run() -> None:
    assert load(Configuration(seed=5, samples=7)).digest() == digits().digest()


def test_no_digit_is_in_both_splits() -> None:
    splits = digits().train, digits().test
    train, test = ({row.tobytes() for row in split.features} for split in splits)
    assert len(train) + len(test) == 1797
    assert not train & test


def test_a_split_keeps_every_sample_beside_its_label() -> None:
    labels = np.arange(41)
    data = split_by_hash(labels.astype(np.float32)[:, None] * 2, labels, classes=41)
    for split in (data.train, data.test):
        assert (split.features[:, 0] == 2 * split.labels).all()
    assert sorted([*data.train.labels, *data.test.labels]) == labels.tolist()


def test_two_samples_can_be_split() -> None:
    data = load(Configuration(data="toy", samples=2))
    assert (len(data.train), len(data.test)) == (1, 1)


@pytest.mark.parametrize("part", ["features", "labels"])
def test_the_digest_sees_every_byte(part: str) -> None:
    data = digits()
    before = data.digest()
    getattr(data.test, part)[-1:] += 1
    assert data.digest() != before


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.ones(3)] * 2, r"a sample is \(inputs, target\).*; found Tensor"),
        ([{"a": torch.ones(3)}] * 2, r"a dict with one of labels.*; found a dict of a \(Tensor\)"),
        ([("words", 1)] * 2, r"a sample is .*; found a list of a (list|tuple) of str, str, Tensor"),
        ([(torch.ones(3), 0), (torch.ones(4), 0)], r"do not make a batch: RuntimeError: stack"),
    ],
    ids=["no target", "no label", "text", "sizes"],
)
def test_samples_that_make_no_batch_are_refused(samples: list[Any], message: str) -> None:
    session: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=f"^data: .*{message}"):
        read_first(Samples(samples), 2, session)
