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
from mpiddp.training.data.data_sets import DataSet, load
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


@pytest.mark.parametrize("name", ["synthetic", "toy"])
def test_made_up_data_follows_seed_and_size(name: str) -> None:
    first, second = (load(Configuration(data=name, seed=seed, samples=50)) for seed in (0, 1))
    assert len(first.train) + len(first.test) == 50
    assert first.digest() != second.digest()


def digits() -> DataSet:
    return load(Configuration(data="digits"))


def test_digits_are_those_of_the_original_collection() -> None:
    # Samples per digit of the collection's test part, from UCI's optdigits.names.
    counts = Counter(np.concatenate([digits().train.labels, digits().test.labels]).tolist())
    assert [counts[digit] for digit in range(10)] == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert digits().shape == (1, 8, 8)


def test_no_digit_is_in_both_splits() -> None:
    splits = digits().train, digits().test
    train, test = ({row.tobytes() for row in split.features} for split in splits)
    assert len(train) + len(test) == 1797
    assert not train & test


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
