"""``--export``, ``--weights``, ``--evaluate-only``, and the digest of weights."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainings
from mpiddp.checkpoints.plain_weights import WeightSelection, load_weights
from mpiddp.errors import ConfigurationError
from mpiddp.export import export
from mpiddp.launch.session import Session
from mpiddp.training.data.data_sets import DataSet, load
from mpiddp.training.evaluation import predict_all, write_predictions
from mpiddp.training.exported_weights import Exports, digest_parameters
from mpiddp.training.options.config import Configuration
from mpiddp.training.prediction import read_samples, write_outputs
from mpiddp.training.run_state import Position
from mpiddp.training.task import models
from mpiddp.training.task.task import Task
from pool import Pools
from saves import assert_equal

SMALL = ("--data", "toy", "--samples", "215", "--epochs", "1")


def read_predictions(run: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((run / "predictions.csv").read_text().splitlines()))


def test_weights_are_exported_and_evaluated_by_any_number_of_ranks(pool, tmp_path):
    words = [*SMALL, "--name", "first", "--export", "first.pt"]
    called = pool("openmpi", 2).call(trainings.run, words, cwd=tmp_path)
    assert "Weights written: first.pt\n" in called.printed
    (tmp_path / "there.pt").mkdir()
    for path, problem in (("absent/w.pt", "absent is no directory"), ("there.pt", "there.pt is")):
        refused = [*SMALL, "--name", "refused", "--export", path]
        for said in pool("openmpi", 2).call(trainings.refuse, *refused, cwd=tmp_path).values:
            assert said.startswith(f"2: export: {problem}")
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
        rows = read_predictions(tmp_path / "runs" / name)
        assert [int(row["sample"]) for row in rows] == list(range(43))
        assert [int(row["class"]) for row in rows] == labels.tolist()
        assert [int(row["predicted"]) for row in rows] == outputs.argmax(dim=1).tolist()
        assert [float(row["loss"]) for row in rows] == pytest.approx(losses, rel=1e-4)
        right = sum(row["class"] == row["predicted"] for row in rows)
        assert called.printed.startswith(f"Evaluation done: test accuracy {right / 43:.2%}, loss ")

    # Without targets, and by outputs for a loss of one's own.
    np.save(tmp_path / "samples.npy", data.test.features[:7])
    options = [*SMALL, "--evaluate-only", "--weights", "first.pt", "--predict", "samples.npy"]
    words = [*options, "--name", "new"]
    called = pool("openmpi", 3).call(trainings.evaluate, words, cwd=tmp_path)
    assert called.printed == "Prediction done: 7 samples in runs/new/predictions.csv\n"
    rows = read_predictions(tmp_path / "runs" / "new")
    expected = outputs[:7].softmax(dim=1).max(dim=1)
    assert [int(row["predicted"]) for row in rows] == expected.indices.tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(expected.values.tolist())
    np.save(tmp_path / "objects.npy", np.array([None]))  # Reading them may run any code.
    with pytest.raises(ConfigurationError, match=r"cannot read .*objects.npy: Object arrays"):
        read_samples(str(tmp_path / "objects.npy"))
    write_outputs(tmp_path / "own.csv", Task(loss=nn.MSELoss()), torch.tensor([[1.0, 2.0]]))
    assert (tmp_path / "own.csv").read_text() == "sample,output_0,output_1\n0,1.0,2.0\n"

    # As training would evaluate.
    words = [*SMALL, "--evaluate-only", "--weights", "first.pt", "--compile", "--name", "narrow"]
    called = pool("openmpi", 2).call(
        trainings.evaluate_compiled, [*words, "--precision", "bf16"], cwd=tmp_path
    )
    assert [each[1:] for each in called.values] == [["Sequential"]] * 2
    narrow = [float(row["loss"]) for row in read_predictions(tmp_path / "runs" / "narrow")]
    assert narrow == pytest.approx(losses, abs=0.05)
    assert max(abs(one - other) for one, other in zip(narrow, losses, strict=True)) > 1e-4


def test_samples_that_cannot_be_read_have_no_row_and_others_keep_their_numbers(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Torn:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, position: int) -> tuple[torch.Tensor, int]:
            if position == 1:
                raise OSError(5, "Input/output error")
            return torch.eye(5)[position], position

    task = Task(lambda: nn.Linear(5, 5), lambda: DataSet(Torn(), Torn(), 5))
    configuration = Configuration(on_bad_sample="skip").resolve()
    average, parts = predict_all(configuration, task, session)
    write_predictions(tmp_path / "found.csv", parts)
    rows = list(csv.DictReader((tmp_path / "found.csv").read_text().splitlines()))
    assert [row["sample"] for row in rows] == [row["class"] for row in rows] == list("0234")
    assert average.samples == 4
    # What no weights are given for follows the seed, as in training.
    assert predict_all(configuration, task, session) == (average, parts)
    assert "test sample 1 cannot be read" in capsys.readouterr().err


# With so small a rate no weight changes.
STILL = (*SMALL, "--learning-rate", "1e-30", "--momentum", "0")
WAYS = {
    "ddp": (), "fsdp": ("--parallel", "fsdp", "--wrap-parameters", "500"),
    "served": ("--sync", "parameter-server"), "averaged": ("--ema", "0.9", "--save-every", "never"),
}  # fmt: skip


def read(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def test_a_training_begins_with_given_weights(pool: Pools, tmp_path: Path) -> None:
    torch.manual_seed(5)
    given = {name: torch.randn_like(each) for name, each in make_mlp().items()}
    state = {f"module.{name}": each for name, each in given.items()}
    torch.save({"model_state_dict": state}, tmp_path / "given.pt")
    lines = [
        [*STILL, *options, "--name", name, "--export", f"{name}.pt", "--weights", "given.pt"]
        for name, options in WAYS.items()
    ]
    lines.append([*STILL, "--name", "of-run", "--export", "of-run.pt", "--weights", "runs/fsdp"])
    head = ["--weights", "given.pt", "--weights-except", "3.*"]
    lines.append([*STILL, "--name", "new-head", "--export", "new-head.pt", *head])
    lines.append([*STILL, "--name", "new", "--export", "new.pt"])
    called = pool("openmpi", 2).call(trainings.run, *lines, cwd=tmp_path, timeout=120)
    assert called.printed.count("Weights taken from given.pt: 4 tensors\n") == 4
    for name in [*WAYS, "of-run"]:
        assert_equal(read(tmp_path / f"{name}.pt"), given)
    assert "Weights taken from runs/fsdp/checkpoints/step-6: 4 tensors\n" in called.printed
    new = read(tmp_path / "new.pt")
    expected = {name: (new if name.startswith("3") else given)[name] for name in given}
    assert_equal(read(tmp_path / "new-head.pt"), expected)
    assert "given.pt: 2 tensors; as the model has them: 3.weight, 3.bias\n" in called.printed


def make_mlp() -> dict[str, torch.Tensor]:
    return models.build("mlp", (10,), 2).state_dict()


def test_a_run_that_resumes_does_not_read_the_weights_again(pool: Pools, tmp_path: Path) -> None:
    torch.save(make_mlp(), tmp_path / "given.pt")
    words = [*SMALL, "--name", "run", "--weights", "given.pt"]
    pool("openmpi", 2).call(trainings.run, words, cwd=tmp_path)
    (tmp_path / "runs/run/outcome.json").unlink()
    (tmp_path / "given.pt").unlink()
    words = [*words, "--epochs", "2", "--weights", "other.pt"]
    called = pool("openmpi", 2).call(trainings.run, words, cwd=tmp_path)
    assert re.search("changed since then: (weights, epochs|epochs, weights)\n", called.printed)
    assert "The weights are the checkpoint's: --weights is not read again\n" in called.printed
    # A new run does read them.
    words = [*words, "--resume", "never", "--name", "another"]
    for said in pool("openmpi", 2).call(trainings.refuse, *words, cwd=tmp_path).values:
        assert said == "2: weights: cannot read other.pt: No such file or directory"
    assert not (tmp_path / "runs/another").exists()


def test_each_checkpoint_leaves_weights_where_asked(pool: Pools, tmp_path: Path) -> None:
    words = [*SMALL, "--epochs", "3", "--save-every", "1epoch", "--ema", "0.5", "--keep", "3"]
    fsdp = [*words, "--parallel", "fsdp", "--name", "run", "--export", "w-{epoch}-{step}.pt"]
    # Nothing can take the place of a directory.
    (tmp_path / "w-2-12.pt").mkdir()
    called = pool("openmpi", 2).call(trainings.run, fsdp, cwd=tmp_path)
    problem = "mpiddp: export: cannot write w-2-12.pt: Is a directory; training goes on\n"
    names = {6: "w-1-6.pt", 18: "w-3-18.pt"}
    written = [f"Weights written: {name}, also as latest.pt\n" for name in names.values()]
    assert [called.printed.count(each) for each in (*written, problem)] == [1, 1, 1]
    checkpoints = tmp_path / "runs/run/checkpoints"
    assert {path.name for path in checkpoints.glob("step-*")} == {"step-6", "step-12", "step-18"}
    assert (tmp_path / "latest.pt").readlink() == Path("w-3-18.pt")
    for step, name in names.items():
        model = nn.Sequential(nn.Flatten(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))
        said = load_weights(model, checkpoints / f"step-{step}", WeightSelection())
        assert said == f"Weights taken from {checkpoints}/step-{step}: 4 tensors"
        assert_equal(read(tmp_path / name), model.state_dict())
        export(checkpoints / f"step-{step}", tmp_path / "again.safetensors", is_raw=False)
        assert_equal(load_file(tmp_path / "again.safetensors"), model.state_dict())
    (tmp_path / "w-18.pt").mkdir()
    words = [*SMALL, "--epochs", "3", "--name", "last", "--export", "w-{step}.pt"]
    for said in pool("openmpi", 2).call(trainings.refuse, *words, cwd=tmp_path).values:
        assert said == "2: export: cannot write w-18.pt: Is a directory"
    # The checkpoint is there: when there is room, the same command writes the weights.
    (tmp_path / "w-18.pt").rmdir()
    # What another has put there stays.
    (tmp_path / "latest.pt").unlink()
    (tmp_path / "latest.pt").write_text("theirs")
    called = pool("openmpi", 2).call(trainings.run, words, cwd=tmp_path)
    assert "Resumed from runs/last/checkpoints/step-18: step 18" in called.printed
    alone = "Weights written: w-18.pt (latest.pt is a file of its own, and left alone)\n"
    assert alone in called.printed and (tmp_path / "latest.pt").read_text() == "theirs"


def test_the_newest_file_is_the_latest_whoever_is_ready_first(tmp_path: Path) -> None:
    exports = Exports(tmp_path / "checkpoint_epoch_{epoch}.safetensors")
    steps = {3: Position(epoch=2, step=3), 2: Position(epoch=1, samples=4, step=2)}
    paths = {step: exports.name_file(position) for step, position in steps.items()}
    assert [path.name for path in paths.values()] == ["checkpoint_epoch_1.safetensors"] * 2
    latest = tmp_path / "latest.safetensors"
    end = exports.name_file(Position(epoch=4, step=9))
    assert exports.describe(end, 9) == f"Weights written: {end}, also as {latest}"
    assert exports.describe(paths[3], 3) == f"Weights written: {paths[3]}"
    assert latest.readlink() == Path("checkpoint_epoch_3.safetensors")


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
