"""Data sets and models, each of those that are registered; data on a device; and text."""

import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import data_files
import reading
from launchers import ROOT, run_python
from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.session import Session
from mpiddp.training.data import device_data
from mpiddp.training.data.batches import Cut, make_evaluation_batches, make_training_batches
from mpiddp.training.data.data_sets import DataSet, Split, load
from mpiddp.training.data.device_data import DeviceSplit, fits, move, place
from mpiddp.training.data.image_data import CIFAR10, Shift
from mpiddp.training.data.reading import BatchReading
from mpiddp.training.data.samples import Batch, Key, Samples
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.options.groups.registry import DATASETS, MODELS
from mpiddp.training.task.loading import read_first
from mpiddp.training.task.models import build
from mpiddp.training.trainer import train


@pytest.fixture(params=sorted(DATASETS))
def configuration(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Configuration:
    return data_files.provide(request.param, tmp_path, monkeypatch)


def test_samples_have_the_types_that_models_take(configuration: Configuration) -> None:
    data = load(configuration)
    assert data.digest() == load(configuration).digest()
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


@pytest.mark.parametrize("name", ["synthetic", "toy"])
def test_made_up_data_follows_seed_and_size(name: str) -> None:
    first, second = (load(Configuration(data=name, seed=seed, samples=50)) for seed in (0, 1))
    assert len(first.train) + len(first.test) == 50
    assert first.digest() != second.digest()


def digits() -> DataSet:
    return load(Configuration(data="digits"))


def test_digits_are_those_of_the_original_collection_each_in_one_split() -> None:
    # Samples per digit of the collection's test part, from UCI's optdigits.names.
    counts = Counter(np.concatenate([digits().train.labels, digits().test.labels]).tolist())
    assert [counts[digit] for digit in range(10)] == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert digits().shape == (1, 8, 8)
    splits = digits().train, digits().test
    train, test = ({row.tobytes() for row in split.features} for split in splits)
    assert len(train) + len(test) == 1797 and not train & test


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


COUNT = 25
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NEEDED = COUNT * (3 * 32 * 32 * 4 + 8)
"""Bytes of the images as float32, and of their labels."""


@pytest.fixture
def images() -> Split:
    """As those of CIFAR-10: bytes, which are normalised when they are read."""
    generator = np.random.default_rng(3)
    pixels = generator.integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8)
    return Split(pixels, generator.integers(10, size=COUNT), CIFAR10)


def test_a_split_may_take_a_tenth_of_the_free_memory_as_it_is_fed_to_the_model(images):
    assert fits(images, 10 * NEEDED)
    assert not fits(images, 10 * NEEDED - 1)
    # Each epoch has other images.
    assert not fits(replace(images, augment=Shift(32, 4, flips=True)), 10 * NEEDED)


def test_batches_on_a_device_have_the_same_bits(images, monkeypatch):
    monkeypatch.setattr(device_data, "PART", 10)
    moved = move(images, CPU)
    assert len(moved) == COUNT and moved.features.dtype == torch.float32
    cut = Cut(batch_size=4, rank=0, ranks=2)
    for make in (make_training_batches, make_evaluation_batches):
        expected = make(Samples(images, seed=5), cut)
        # Workers cannot read what is on a device, so none is started.
        found = make(Samples(moved, seed=5), cut, BatchReading(workers=2))
        pairs = zip(_list(found), _list(expected), strict=True)
        for one, other in pairs:
            assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
            assert one.weight == other.weight
        assert found.reader._workers is None


def _list(batches: Any) -> list[Batch]:
    found = list(batches.start(2) if hasattr(batches, "start") else batches)
    assert len(found) == 4
    return found


def test_only_what_fits_a_gpu_is_moved(images: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(images, CPU) is images
    free = [10 * NEEDED]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 0))
    monkeypatch.setattr(device_data, "move", lambda split, device: move(split, CPU))
    assert isinstance(place(images, GPU), DeviceSplit)
    files: Any = reading.Slow()
    assert place(files, GPU) is files
    # The batch that cannot be converted tells why, as it would elsewhere.
    broken = replace(images, convert=lambda _: 1 / 0)
    assert place(broken, GPU) is broken
    free[0] -= 1
    assert place(images, GPU) is images


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


def test_the_transformer_learns_what_follows(session: Session, tmp_path: Path) -> None:
    (tmp_path / "cycle").write_bytes(bytes(np.random.default_rng(0).permutation(20).tolist()) * 100)
    words = ["--data", "text", "--text", str(tmp_path / "cycle"), "--context", "16"]
    words += ["--batch-size", "8", "--epochs", "6", "--runs-dir", str(tmp_path)]
    words += ["--optimizer", "adamw", "--learning-rate", "0.002", "--schedule", "constant"]
    # A model that does not look at the bytes before has a loss of log(20).
    row = train(parse(words), session, FailureHandler())
    assert row.test_loss is not None and row.test_loss < math.log(20) / 2


IMAGE_MODELS = sorted(set(MODELS) - {"transformer", "resnet50"})
"""Without a second resnet, which takes longest."""
SHAPES = [(3, 32, 32), (2, 5, 7)]


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_model_maps_samples_to_a_score_per_class(name: str, shape: tuple[int, ...]) -> None:
    def draw(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build(name, shape, classes=7)

    model, samples = draw(1), torch.randn(3, *shape)
    scores = model(samples)
    assert scores.shape == (3, 7)
    scores.square().sum().backward()
    assert all(each.grad.abs().sum() > 0 for each in model.parameters())
    same, other = (draw(seed).eval() for seed in (1, 2))
    assert torch.equal(*map(nn.utils.parameters_to_vector, (model.parameters(), same.parameters())))
    # A sample is judged by itself.
    torch.testing.assert_close(same(samples)[2:], same(samples[2:]))
    assert not torch.equal(same(samples), other(samples))


@pytest.mark.parametrize("data", sorted(DATASETS))
def test_the_model_of_a_data_set_fits_it(data, tmp_path, monkeypatch):
    configuration = data_files.provide(data, tmp_path, monkeypatch).resolve()
    found = load(configuration)
    model = build(configuration.model, found.shape, found.classes)
    inputs, targets, _ = Samples(found.test).read(Key(0, [0, 1]))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    assert 0 < loss.item() < 2 * math.log(found.classes) + 2


def test_the_mlp_for_toy_data_goes_from_10_over_50_to_2() -> None:
    shapes = [tuple(parameter.shape) for parameter in build("mlp", (10,), 2).parameters()]
    assert shapes == [(50, 10), (50,), (2, 50), (2,)]


@pytest.mark.parametrize("name", ["convnet", "resnet18"])
@pytest.mark.parametrize("shape", [(8, 8), (1, 3, 8), (1, 8, 3)], ids=str)
def test_what_is_no_image_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} expects images"):
        build(name, shape, 10)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    # torchvision's documentation; the one for CIFAR-10 as in many works that train it.
    [
        ("resnet18", (3, 224, 224), 1000, 11_689_512),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
    ],
)
def test_a_resnet_has_the_known_number_of_parameters(name, shape, classes, parameters):
    model = build(name, shape, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_trainer_needs_it_for_what_is_of_it_alone(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ModuleNotFoundError(name=__name__)")
    words = ("-m", "mpiddp.train", "--data=synthetic", "--samples=60", "--epochs=1", "--model")
    # Several threads for a small model only wait for each other on a busy machine.
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT))), "OMP_NUM_THREADS": "1"}
    for model, code, said in (
        ("convnet", 0, "Training done"),
        ("resnet18", 2, "pip install 'mpiddp[vision]'"),
    ):
        found = run_python(*words, model, cwd=tmp_path, env=variables, timeout=160)
        assert said in found.expect(code).output
