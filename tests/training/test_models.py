"""The models, each of those that are registered."""

from __future__ import annotations

import math
import os
import sys

import pytest
import torch
from torch import nn

import data_files
from launchers import ROOT, run_python
from mpiddp.errors import ConfigurationError
from mpiddp.training.data import vision
from mpiddp.training.data.data_sets import load
from mpiddp.training.data.samples import Key, Samples
from mpiddp.training.options.groups.registry import DATASETS, MODELS
from mpiddp.training.task.models import build

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


# ---- torchvision beside a torch that its wheel was not built for ---------------------------------


def test_models_and_transforms_can_be_used_whatever_torch_it_is():
    found = vision.import_torchvision()
    assert found is vision.import_torchvision() is sys.modules["torchvision"]
    from torchvision.models import resnet18
    from torchvision.transforms import v2

    # As torchvision's documentation has it.
    assert sum(each.numel() for each in resnet18().parameters()) == 11689512
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert v2.functional.horizontal_flip(images).shape == images.shape


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
