"""Files of plain weights: which tensors become a model's, and what is said of the others."""

import argparse
import errno
import importlib.util
import os
import pickle
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mpiddp.checkpoints import plain_weights
from mpiddp.checkpoints.plain_weights import WeightSelection, load_weights, write_weights
from mpiddp.errors import CheckpointError, ConfigurationError
from saves import Hostile, assert_equal


def make_model(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))


def add_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{name}": each for name, each in state.items()}


@pytest.fixture
def given() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: each.clone() for name, each in make_model().state_dict().items()}


def load(
    found: object, path: Path, selection: WeightSelection | None = None, classes: int = 3
) -> dict[str, torch.Tensor]:
    """The state of a model that was given what was stored."""
    torch.save(found, path)
    torch.manual_seed(2)
    model = make_model(classes)
    before = torch.get_rng_state()
    load_weights(model, path, selection or WeightSelection())
    assert torch.equal(torch.get_rng_state(), before)
    return model.state_dict()


def refuse(
    found: object, path: Path, selection: WeightSelection | None = None, classes: int = 3
) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(found, path, selection, classes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


WRAPPED: dict[str, tuple[Callable[[Any], object], str]] = {
    "plain": (lambda state: state, ""),
    "of a script": (
        lambda state: {
            "epoch": 3,
            "model_state_dict": state,
            "optimizer_state_dict": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []},
        },
        "",
    ),
    "state_dict": (lambda state: {"state_dict": state}, ""),
    "of DDP": (lambda state: add_prefix(state, "module."), ""),
    "compiled": (lambda state: add_prefix(state, "_orig_mod."), ""),
    "of Lightning": (
        lambda state: {"state_dict": {**add_prefix(state, "net."), "head.bias": torch.ones(1)}},
        "net",
    ),
    "an average": (
        lambda state: {"state_dict": {"x": torch.ones(1)}, "state_dict_ema": state},
        "state_dict_ema",
    ),
}


@pytest.mark.parametrize("way", WRAPPED)
def test_the_usual_ways_to_store_a_state_dict(way, given, tmp_path):
    wrap, prefix = WRAPPED[way]
    assert_equal(load(wrap(given), tmp_path / "w.pt", WeightSelection(prefix)), given)


def test_safetensors(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(add_prefix(given, "model."), path)
    model = make_model()
    assert load_weights(model, path, WeightSelection("model")).endswith("w.safetensors: 9 tensors")
    assert_equal(model.state_dict(), given)
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=None),
        pytest.raises(ConfigurationError, match=r"pip install 'mpiddp\[safetensors\]'$"),
    ):
        load_weights(model, path, WeightSelection())
    path.write_text("text\n" * 9)
    with pytest.raises(ConfigurationError, match=r"expected a file of the library safetensors, f"):
        load_weights(model, path, WeightSelection())


def test_what_does_not_fit_is_named(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    said = refuse(given, path, classes=7)
    assert said == (
        f"weights: {path} is of another model than Sequential: other shapes: 2.weight (expected "
        "(7, 5), found (3, 5)), 2.bias (expected (7,), found (3,)): to train without these, give "
        "--weights-except '2.*'"
    )
    first = {name: each for name, each in given.items() if name.startswith("0")}
    said = refuse({**first, "head": torch.ones(1)}, path)
    assert "missing 1.weight, 1.bias, 1.running_mean, … (7 in all); unexpected head: to" in said
    assert said.endswith("give --weights-except '1.*,2.*,head'")
    said = refuse({"x": torch.ones(1)}, path)
    assert said.endswith("unexpected x")
    said = refuse({"net": {"backbone": given}}, path)
    assert said.endswith(": give --weights-prefix net.backbone")
    said = refuse(given, path, WeightSelection("encoder"))
    assert said == (
        f"weights_prefix: no tensor of {path} is below 'encoder'; it has 0.weight, 0.bias, "
        "1.weight, … (9 in all)"
    )


def test_a_new_head_stays_as_the_model_has_it(given, tmp_path):
    path = tmp_path / "w.pt"
    torch.manual_seed(2)
    new = make_model(7).state_dict()
    for stored in (given, {name: each for name, each in given.items() if name[0] != "2"}):
        found = load(stored, path, WeightSelection(skipped=("2.*",)), classes=7)
        expected = {name: new[name] if name[0] == "2" else given[name] for name in new}
        assert_equal(found, expected)
    said = load_weights(make_model(7), path, WeightSelection(skipped=("2.*",)))
    assert said == f"Weights taken from {path}: 7 tensors; as the model has them: 2.weight, 2.bias"
    said = refuse(given, path, WeightSelection(skipped=("fc.*", "2.*")))
    assert said.startswith("weights_except: 'fc.*' matches no tensor of ")
    assert refuse(given, path, WeightSelection(skipped=("*",))).endswith(
        "no tensor is left to take"
    )


def test_a_file_that_is_no_state_dict_is_refused(tmp_path, capsys):
    model, path = nn.Linear(2, 2), tmp_path / "weights.pt"
    with pytest.raises(ConfigurationError, match=r"cannot read .*: No such file"):
        load_weights(model, path, WeightSelection())
    for content in (b"", b"rubbish", b"hello\n", pickle.dumps(Hostile())):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="expected a file of tensors alone"):
            load_weights(model, path, WeightSelection())
    for found in (Hostile(), {"weight": Hostile()}):
        assert "expected a file of tensors alone" in refuse(found, path)
    said = refuse({"state_dict": {}, "options": argparse.Namespace(a=1)}, path)
    assert f"found argparse.Namespace in {path}: write it with torch.save(model.state" in said
    assert re.search(r"expected a state_dict .*, found list", refuse([1], path))
    assert refuse({"epoch": 3}, path).partition(": missing 0.weight")[1]
    with pytest.raises(CheckpointError, match="expected a checkpoint in"):
        load_weights(model, tmp_path, WeightSelection())
    assert capsys.readouterr().out == ""
    assert [each.name for each in tmp_path.iterdir()] == ["weights.pt"]


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_file_is_written_as_a_whole_and_by_the_umask(name: str, tmp_path: Path) -> None:
    tied = torch.arange(6.0).view(3, 2)
    path = tmp_path / name
    path.write_text("old")
    before = os.umask(0o027)
    try:
        write_weights(path, {"a": tied, "b": tied.T, "c": torch.tensor(2)})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    found = load_file(path) if name != "w.pt" else torch.load(path, weights_only=True)
    assert_equal(found, {"a": tied, "b": tied.T, "c": torch.tensor(2)})

    content = path.read_bytes()
    with (
        mock.patch.object(os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left")),
        pytest.raises(OSError, match="No space left"),
    ):
        write_weights(path, {"a": torch.zeros(9)})
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    class Full:
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    def save(found: object, _: object) -> None:
        saved(found, Full())

    saved = torch.save
    with (
        mock.patch.object(plain_weights.torch, "save", save),
        pytest.raises(OSError, match="No space left on device"),
    ):
        write_weights(tmp_path / "w.pt", {"a": torch.zeros(9)})
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_shapes_are_not_known_yet(tmp_path: Path) -> None:
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "w.pt")
    model = nn.LazyLinear(2)
    load_weights(model, tmp_path / "w.pt", WeightSelection())
    assert model.weight.shape == (2, 4)
