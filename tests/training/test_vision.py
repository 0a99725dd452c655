"""torchvision beside a torch that its wheel was not built for."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from launchers import ROOT, run_python
from mpiddp.training.data import vision


def test_models_and_transforms_can_be_used_whatever_torch_it_is():
    found = vision.import_torchvision()
    assert found is vision.import_torchvision() is sys.modules["torchvision"]
    from torchvision.models import resnet18
    from torchvision.transforms import v2

    # As torchvision's documentation has it.
    assert sum(each.numel() for each in resnet18().parameters()) == 11689512
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert v2.functional.horizontal_flip(images).shape == images.shape


def test_an_error_of_another_kind_is_not_mended(monkeypatch):
    def fail(name):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(vision.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="no kernel image"):
        vision.import_torchvision()


def test_torchvision_that_is_not_there_is_asked_for(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setattr(vision.importlib, "import_module", fail)
    with pytest.raises(vision.ConfigurationError, match=r"pip install 'mpiddp\[vision\]', or the"):
        vision.import_torchvision()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("model", "code", "said"),
    [("convnet", 0, "Training done"), ("resnet18", 2, "pip install 'mpiddp[vision]'")],
)
def test_the_trainer_needs_it_for_what_is_of_it_alone(model, code, said, tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ModuleNotFoundError(name=__name__)")
    words = ("-n", "2", "train", "--data", "digits", "--epochs", "1", "--model", model)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    found = run_python("-m", "mpiddp", *words, cwd=tmp_path, env=paths, timeout=160)
    assert said in found.expect(code).output
