"""Text, and the model that predicts it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data_sets import DataSet, load
from mpiddp.training.data.samples import Key, Samples
from mpiddp.training.options.config import Configuration
from mpiddp.training.task.models import build
from mpiddp.training.task.task import cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_target_of_each_byte_is_the_next_one(tmp_path: Path) -> None:
    content = bytes(np.random.default_rng(0).integers(0, 256, 1003, dtype=np.uint8))
    (tmp_path / "text").write_bytes(content)
    data = load(Configuration(data="text", text=tmp_path / "text", context=9))
    assert (data.shape, data.classes) == ((9,), 256)
    start = 0
    for split, length in ((data.train, 903), (data.test, 100)):
        inputs, targets, _ = Samples(split).read(Key(1, list(range(len(split)))))
        assert len(split) == (length - 1) // 9
        part = list(content[start : start + length])
        assert inputs.flatten().tolist() == part[: 9 * len(split)]
        assert targets.flatten().tolist() == part[1 : 9 * len(split) + 1]
        start += length


def test_a_text_that_is_too_short_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 90)
    with pytest.raises(ConfigurationError, match=r"more than 90 bytes .* found 90 in"):
        load(Configuration(data="text", text=tmp_path / "short", context=9))
    with pytest.raises(ConfigurationError, match=r"cannot read .*No such file"):
        load(Configuration(data="text", text=tmp_path / "none"))


def test_the_transformer_sees_no_later_byte() -> None:
    torch.manual_seed(0)
    model = build("transformer", (12,), 256).eval()
    sequence = torch.randint(0, 256, (1, 12))
    other = sequence.clone()
    other[0, 7] += 1
    first, second = model(sequence), model(other)
    assert first.shape == (1, 256, 12)
    assert torch.allclose(first[..., :7], second[..., :7], atol=1e-6)
    assert not torch.allclose(first[..., 7:], second[..., 7:], atol=1e-3)
    with pytest.raises(ConfigurationError, match="transformer expects sequences"):
        build("transformer", (1, 8, 8), 10)


def train(data: DataSet, steps: int, length: int) -> float:
    """The test loss after so many steps."""
    torch.manual_seed(0)
    model = build("transformer", data.shape, data.classes)
    samples = Samples(data.train)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step in range(steps):
        places = [(length * step + each) % len(data.train) for each in range(length)]
        inputs, targets, _ = samples.read(Key(1, places))
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    inputs, targets, _ = Samples(data.test).read(Key(0, list(range(len(data.test)))))
    with torch.no_grad():
        return cross_entropy(model(inputs), targets).item()


def test_the_transformer_learns_what_follows(tmp_path: Path) -> None:
    (tmp_path / "cycle").write_bytes(bytes(np.random.default_rng(0).permutation(20).tolist()) * 100)
    data = load(Configuration(data="text", text=tmp_path / "cycle", context=16))
    # A model that does not look at the bytes before has a loss of log(20).
    assert train(data, steps=60, length=8) < math.log(20) / 2
