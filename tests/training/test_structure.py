"""Samples of several tensors: in tuples, lists and dicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import structured
from mpiddp.errors import ConfigurationError
from mpiddp.training.data import device_data
from mpiddp.training.data.data_sets import DataSet, Split
from mpiddp.training.data.samples import Batch, Key, Samples
from mpiddp.training.data.structure import FormError, find_form, take_inputs
from mpiddp.training.step.step import split_batch
from mpiddp.training.task.loading import load_data
from mpiddp.training.task.task import Task
from trainings import read_rows

OPTIONS = {
    "plain": [],
    "parts": ["--accumulation-steps", "4"],
    "skip": ["--on-nan", "skip"],
    "server": ["--sync", "parameter-server"],
}


@pytest.mark.mpi
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_numbers_train_the_same_model_in_any_structure(options, pool, tmp_path):
    words = ["--epochs", "2", "--batch-size", "8", *options]
    called = pool("openmpi", 2).call(structured.train_each, words, cwd=tmp_path, timeout=140)
    for rows in called.values:
        assert len(rows) == len(structured.FORMS) + len(structured.STREAMS)
        assert set(rows.values()) == {rows["one tensor"]}
    said = read_rows(tmp_path / "runs/a dict")[-1]
    assert said["test_accuracy"] > 0.5


def test_a_step_is_cut_in_all_tensors() -> None:
    batch = Batch({"a": torch.arange(5), "b": [torch.ones(5, 2)]}, torch.arange(5))
    parts = split_batch(batch, 2)
    assert [part.inputs["a"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part.inputs["b"][0].shape for part in parts] == [(3, 2), (2, 2)]
    assert [part.weight for part in parts] == [3 / 5, 2 / 5]
    assert split_batch(batch.first(), 2)[1].weight == 0


def test_arrays_by_name_are_moved_to_a_device_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_data, "PART", 2)
    arrays = {"a": np.arange(5.0), "b": np.arange(10).reshape(5, 2)}
    split = Split(arrays, np.arange(5))
    moved = device_data.move(split, torch.device("cpu"))
    for found in (moved.read([3, 1]), Samples(split).read(Key(1, [3, 1]))[:2]):
        assert found[0]["a"].tolist() == found[1].tolist() == [3, 1]
        assert found[0]["b"].tolist() == [[6, 7], [2, 3]]
    assert device_data.fits(split, 5 * 32 * 10) and not device_data.fits(split, 5 * 32 * 10 - 1)
    before = DataSet(split, split, 5).digest()
    arrays["b"][4, 1] += 1
    assert DataSet(split, split, 5).digest() != before


def test_a_factory_is_given_the_shapes_in_their_places() -> None:
    sample = {"a": torch.ones(3), "b": (1.0, np.ones((2, 2))), "label": 1}
    data = load_data(Task(data=lambda: DataSet([sample], [sample], 2)), seed=0)
    assert data.shape == {"a": (3,), "b": [(), (2, 2)]}
    with pytest.raises(
        ConfigurationError, match=r"^data: a sample is .*; found a dict of a \(a list of str\)"
    ):
        load_data(Task(data=lambda: DataSet([{"a": "text"}], [sample], 2)), seed=0)


def test_samples_to_predict_may_have_targets() -> None:
    one, pair = find_form(torch.ones(3)), find_form([torch.ones(3), torch.ones(1)])
    assert take_inputs(np.ones(3), one).shape == take_inputs((np.ones(3), 1), one).shape == (3,)
    assert take_inputs((1.0,), one) == 1.0
    assert take_inputs((1, 2), pair) == take_inputs((1, 2, 0), pair) == (1, 2)
    assert take_inputs(((1, 2), 0), pair) == (1, 2)
    named = find_form({"a": 1})
    assert take_inputs({"a": 5, "labels": 1}, named) == take_inputs({"a": 5}, named) == {"a": 5}
    with pytest.raises(FormError, match=r"inputs of the training data.*found a dict of b \(int\)"):
        take_inputs({"b": 5}, named)
