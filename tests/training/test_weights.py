"""``--export``, ``--evaluate-only``, and the digest of weights."""

from __future__ import annotations

import csv
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import trainings
from mpiddp.errors import ConfigurationError
from mpiddp.training import models
from mpiddp.training.config import Configuration, parse
from mpiddp.training.data import load
from mpiddp.training.weights import digest_parameters, export_weights, load_weights
from pool import Pools

SMALL = ("--data", "toy", "--samples", "215", "--epochs", "1")


@pytest.mark.mpi
def test_weights_are_exported_and_evaluated_by_any_number_of_ranks(
    pool: Pools, tmp_path: Path
) -> None:
    words = [*SMALL, "--name", "first", "--export", "first.pt"]
    called = pool("openmpi", 2).call(trainings.run, words, cwd=tmp_path)
    assert "Weights written: first.pt\n" in called.printed
    refused = [*SMALL, "--name", "refused", "--export", "absent/w.pt"]
    for said in pool("openmpi", 2).call(trainings.refuse, *refused, cwd=tmp_path).values:
        assert said.startswith("2: export: absent is no directory")
    assert not (tmp_path / "runs" / "refused").exists()

    data = load(Configuration(data="toy", samples=215))
    model = models.build("mlp", data.shape, data.classes)
    model.load_state_dict(torch.load(tmp_path / "first.pt", weights_only=True))
    model.eval()
    outputs = model(torch.from_numpy(data.test.features))
    labels = torch.from_numpy(data.test.labels)
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none").tolist()

    sources = {2: "first.pt", 3: "runs/first", 1: "runs/first/checkpoints/step-6"}
    for ranks, source in sources.items():
        name = f"of-{ranks}"
        options = [*SMALL, "--evaluate-only", "--weights", source, "--name", name]
        called = pool("openmpi", ranks).call(trainings.evaluate, options, cwd=tmp_path)
        with (tmp_path / "runs" / name / "predictions.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["sample"]) for row in rows] == list(range(43))
        assert [int(row["class"]) for row in rows] == labels.tolist()
        assert [int(row["predicted"]) for row in rows] == outputs.argmax(dim=1).tolist()
        assert [float(row["loss"]) for row in rows] == pytest.approx(losses, rel=1e-4)
        right = sum(row["class"] == row["predicted"] for row in rows)
        assert called.printed.startswith(f"Evaluation done: test accuracy {right / 43:.2%}, loss ")

    # As training would evaluate.
    words = [*SMALL, "--evaluate-only", "--weights", "first.pt", "--compile", "--name", "narrow"]
    called = pool("openmpi", 2).call(
        trainings.evaluate_compiled, [*words, "--precision", "bf16"], cwd=tmp_path
    )
    assert [each[1:] for each in called.values] == [["Sequential"]] * 2
    with (tmp_path / "runs" / "narrow" / "predictions.csv").open() as file:
        narrow = [float(row["loss"]) for row in csv.DictReader(file)]
    assert narrow == pytest.approx(losses, abs=0.05)
    assert max(abs(one - other) for one, other in zip(narrow, losses, strict=True)) > 1e-4


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_compiled_model_predicts_alike(pool: Pools, tmp_path: Path) -> None:
    pool("openmpi", 2).call(trainings.run, [*SMALL, "--name", "first"], cwd=tmp_path)
    # 22 and 21 samples of the ranks: one forward pass each, and torch.sin, which is tried first.
    for name, options, graphs in (("plain", [], 0), ("compiled", ["--compile"], 2)):
        words = [*SMALL, "--evaluate-only", "--weights", "runs/first", "--name", name, *options]
        called = pool("openmpi", 2).call(trainings.count_compiled, words, cwd=tmp_path, timeout=200)
        assert called.values == [graphs] * 2
    found = []
    for name in ("plain", "compiled"):
        with (tmp_path / "runs" / name / "predictions.csv").open() as file:
            found.append([(row["predicted"], float(row["loss"])) for row in csv.DictReader(file)])
    plain, compiled = found
    assert [each for each, _ in compiled] == [each for each, _ in plain]
    assert [each for _, each in compiled] == pytest.approx([each for _, each in plain], rel=1e-4)


def test_an_evaluation_reports_what_one_during_training_does(pool: Pools, tmp_path: Path) -> None:
    words = ["--data", "synthetic", "--samples", "60", "--model", "mlp", "--epochs", "1"]
    trained = pool("openmpi", 2).call(
        trainings.run, [*words, "--name", "ten", "--export", "ten.pt"], cwd=tmp_path
    )
    options = [*words, "--name", "again", "--evaluate-only", "--weights", "ten.pt"]
    called = pool("openmpi", 2).call(trainings.evaluate, options, cwd=tmp_path)
    [said] = re.findall(r"Test (Accuracy: .*%, Test Top5 Accuracy: .*%)", trained.printed)
    found = re.findall(r"(\S+)%", said)
    assert re.findall(r"(\S+)%", called.printed) == found and len(found) == 2


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def test_a_file_that_is_no_state_dict_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "weights.pt"
    with pytest.raises(ConfigurationError, match=r"cannot read .*: No such file"):
        load_weights(model, path)
    for content in (b"", b"rubbish", pickle.dumps(Hostile())):
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="expected a file of tensors alone"):
            load_weights(model, path)
    for found in (Hostile(), {"weight": Hostile()}):
        torch.save(found, path)
        with pytest.raises(ConfigurationError, match="expected a file of tensors alone"):
            load_weights(model, path)
    torch.save([1], path)
    with pytest.raises(ConfigurationError, match=r"expected a state_dict .*, found list"):
        load_weights(model, path)
    export_weights(nn.Linear(3, 2), path, 0)
    with pytest.raises(ConfigurationError, match=r"of another model than Linear: .*size mismatch"):
        load_weights(model, path)
    with pytest.raises(ConfigurationError, match="there is no checkpoint in"):
        load_weights(model, tmp_path)
    assert capsys.readouterr().out == ""
    assert [each.name for each in tmp_path.iterdir()] == ["weights.pt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--evaluate-only"], "evaluate_only = true .* no weights: say of which weights"),
        (["--weights", "a.pt"], "weights = 'a.pt' .* evaluate_only = false: give --evaluate-only"),
        (
            ["--evaluate-only", "--weights", "a", "--export", "b"],
            "export = 'b' .* evaluate_only = true",
        ),
    ],
)
def test_options_without_effect_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(words)


def test_the_digest_sees_every_parameter_and_its_place() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    digests = {digest_parameters(model)}
    with torch.no_grad():
        model.bias[2] += 1e-3
        digests.add(digest_parameters(model))
        model.weight[0] = model.weight[1].clone()
        digests.add(digest_parameters(model))
        digests.add(digest_parameters(model.double()))
    assert len(digests) == 4
