"""torchvision beside a torch that its wheel was not built for."""

from __future__ import annotations

import os
import sys

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
