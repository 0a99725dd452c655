"""Tasks, models and data that users bring."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.training.data.data_sets import DataSet, Split
from mpiddp.training.data.samples import Batch, Samples
from mpiddp.training.options.config import Configuration, parse
from mpiddp.training.records.metrics import Average
from mpiddp.training.task.loading import load_data, read_first
from mpiddp.training.task.task import (
    Task,
    add_perplexity,
    build_model,
    check_task,
    choose_loss,
    count_correct,
    count_top5,
    find_task,
)
from mpiddp.training.trainer import train
from trainings import read_rows

MINE = """
import numpy as np, torch
import mpiddp
from mpiddp.training.data.data_sets import DataSet, split_by_hash

class Net(torch.nn.Module):
    def __init__(self, shape, width=4):
        super().__init__()
        self.layer = torch.nn.Linear(shape[0], 1)
    def forward(self, inputs):
        return self.layer(inputs).flatten()

def load(seed):
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(200, 3)).astype(np.float32)
    return split_by_hash(features, (features @ [1, 2, 3]).astype(np.float32), 0)

def gap(outputs, targets):
    return (outputs - targets).abs().sum()

def make():
    return mpiddp.training.Task(
        model=Net, data=load, loss=torch.nn.functional.mse_loss, metrics={"gap": gap}
    )

def no_task(): return 3
def broken(): raise ValueError("the file is\\nnot there")
def picky(width): return None
def big(shape, classes): return torch.nn.Linear(7, classes)
constant = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that the test may import."""
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def configure(**options: str) -> Configuration:
    return Configuration(**options).resolve()  # type: ignore[arg-type]


def test_a_task_brings_model_data_loss_and_metrics(mine, session, tmp_path, capsys):
    words = ["--task", f"{mine}:make", "--name", "own", "--epochs", "6", "--learning-rate", "0.02"]
    train(parse([*words, "--runs-dir", str(tmp_path)]), session, FailureHandler())
    run, printed = tmp_path / "own", capsys.readouterr().out
    rows = read_rows(run)
    assert rows[-1]["test_gap"] < 0.5 < rows[0]["gap"]
    assert rows[-1]["loss"] < 0.1 * rows[0]["loss"]
    assert "accuracy" not in rows[0]
    assert f"Gap: {rows[-1]['gap']:.6g}, Test Gap: {rows[-1]['test_gap']:.6g}\n" in printed
    assert f"Training done: test gap {rows[-1]['test_gap']:.6g} after 6 epochs" in printed
    assert f'model = "{mine}:Net"\n' in (run / "config.toml").read_text()


def test_model_and_data_are_given_what_they_ask_for_by_name(mine: str) -> None:
    task, configuration = find_task(configure(data=f"{mine}:load", model=f"{mine}:Net"), None)
    data = load_data(task, seed=5)
    assert (len(data.train), data.shape) == (160, (3,))
    assert build_model(task, data).layer.weight.shape == (1, 3)
    assert (configuration.model, configuration.data) == (f"{mine}:Net", f"{mine}:load")


def refuse(options: dict[str, str]) -> str:
    try:
        task, _ = find_task(configure(**options), None)
        build_model(task, load_data(task, seed=0))
    except ConfigurationError as error:
        return str(error)
    raise AssertionError(f"{options} were accepted")


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"model": "absent_module:f"}, ["model", "absent_module cannot be imported", "No module"]),
        ({"model": "MINE:Nett"}, ["model", "a function Nett in MINE", "none", "mean Net?"]),
        ({"model": "MINE:gap"}, ["model", "MINE:gap", "shape and classes", "outputs"]),
        ({"model": "MINE:no_task"}, ["model", "MINE:no_task to return a Module, found int"]),
        ({"model": "torch.nn:Flatten"}, ["model", "parameters to train", "none in", "Flatten"]),
        (
            {"task": "MINE:broken"},
            ["task", "MINE:broken failed: ValueError: the file is not there", ".py:"],
        ),
        ({"task": "MINE:picky"}, ["task", "MINE:picky is given nothing", "width"]),
        ({"task": "MINE:no_task"}, ["task", "MINE:no_task to return a Task, found int"]),
        ({"task": "MINE:make", "data": "toy"}, ["data = 'toy'", "task", "MINE:load"]),
    ],
    ids=str,
)
def test_a_factory_that_cannot_be_used_is_refused(options, fragments, mine):
    given = {name: value.replace("MINE", mine) for name, value in options.items()}
    message = refuse(given)
    assert "\n" not in message and "<frozen" not in message
    assert [each for each in fragments if each.replace("MINE", mine) not in message] == []


class Unreadable(list[int]):
    def __getitem__(self, position: object) -> int:
        raise OSError("the file\nis gone")


def split(labels: list[int]) -> Split:
    return Split(np.zeros((len(labels), 3), dtype=np.float32), np.array(labels))


@pytest.mark.parametrize(
    ("train", "test", "fragments"),
    [
        ([(torch.ones(2), 0)], [], ["expected samples, found none in test of"]),
        ([], [(torch.ones(2), 0)], ["expected samples, found none in train of"]),
        (Unreadable([1]), [1], ["first sample", "OSError: the file is gone"]),
        (iter([1]), [1], ["samples of train", "iterated needs a __len__", "has no len()"]),
        (split([0, 1, 2]), [1], ["labels from 0 to 1 in train", "found 2"]),
        (Split(np.zeros((1, 2)), np.zeros(2, dtype=np.int64)), [1], ["found 1 and 2"]),
    ],
    ids=["no test", "no train", "unreadable", "iterable", "label", "lengths"],
)
def test_data_that_cannot_be_used_are_refused(train: Any, test: Any, fragments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"^data: ") as caught:
        load_data(Task(data=lambda: DataSet(train, test, classes=2)), seed=0)
    assert [each for each in fragments if each not in str(caught.value)] == []


class Rotten(list[int]):
    """Ten samples, of which the last four can be read."""

    def __getitem__(self, position: Any) -> Any:
        if position < 6:
            raise OSError(f"bad sector {position}")
        return torch.full((3,), float(position)), position


def test_the_first_readable_samples_stand_for_the_others() -> None:
    session: Any = SimpleNamespace(device=torch.device("cpu"))
    task = Task(data=lambda: DataSet(Rotten(range(10)), [1], classes=2))
    with pytest.raises(ConfigurationError, match=r"the first sample .* OSError: bad sector 0"):
        load_data(task, seed=0)
    data = load_data(task, seed=0, skips=True)
    assert data.shape == (3,)
    for count, expected in ((3, [6, 7, 8]), (8, [6, 7, 8, 9])):
        batch = read_first(Samples(data.train, skips=True), count, session)
        assert batch.targets.tolist() == expected
    empty = Task(data=lambda: DataSet(Unreadable([1]), [1], classes=2))
    with pytest.raises(ConfigurationError, match=r"no sample of .* can be read: OSError"):
        load_data(empty, seed=0, skips=True)
    with pytest.raises(ConfigurationError, match=r"the first sample of mine:load cannot be read"):
        load_data(empty, 0, "mine:load")


def named(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs["scores"], targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "digits"}, "data: .* found 'digits' (str): give a name as the option data"),
        ({"model": nn.Linear(1, 1)}, "model: .* returns a module, found a Linear: give a function"),
        ({"data": DataSet([1], [1], 2)}, "data: .* found a DataSet: give a function that makes"),
        ({"data": 3}, "data: expected a function that returns a DataSet, found 3 (int)"),
        ({"loss": "mse"}, "loss: expected a function of outputs and targets, found 'mse' (str)"),
        ({"loss": nn.MSELoss}, "loss: .* found the class MSELoss: give an instance"),
        ({"metrics": [named]}, "metrics: expected functions by name, .* found a list"),
        ({"metrics": {"a": 1}}, "metric a: expected a function of .* found 1 (int)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_task_of_other_things_is_refused(options: dict[str, Any], message: str) -> None:
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(ConfigurationError, match=f"^{pattern}") as caught:
        Task(**options)
    assert "\n" not in str(caught.value)


def scalar(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.sum() - targets.sum()).square()


@pytest.mark.parametrize(
    ("task", "fragments"),
    [
        (Task(model=lambda: nn.Linear(7, 2)), ["model", "a sample of shape (3,)", "7x2"]),
        (Task(model=lambda: nn.Linear(3, 1)), ["loss", "outputs of shape (1, 1)"]),
        (Task(loss=lambda outputs, targets: outputs), ["loss", "one number", "(1, 2)"]),
        (Task(loss=scalar, metrics={"a": lambda o, t: 3.0}), ["metric a", "one number", "float"]),
        (Task(metrics={"seconds": scalar}), ["metrics", "'seconds'"]),
        (Task(loss=lambda outputs, targets: targets.sum()), ["loss", "without a gradient"]),
        (Task(model=lambda: nn.Linear(3, 3)), ["model", "each of 4 classes", "found 3"]),
    ],
    ids=["model", "loss", "no number", "metric", "name", "detached", "classes"],
)
def test_what_does_not_fit_together_is_refused(task: Task, fragments: list[str]) -> None:
    batch = Batch(torch.zeros(4, 3), torch.full((4,), 1))
    module = task.model() if task.model is not None else nn.Linear(3, 2)
    with pytest.raises(ConfigurationError) as caught:
        check_task(task, module, batch, classes=4)
    assert [each for each in fragments if each not in str(caught.value)] == []


def test_a_check_leaves_nothing_behind() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
    before = {name: each.clone() for name, each in module.state_dict().items()}
    batch = Batch(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    state = torch.get_rng_state()
    check_task(Task(), module, batch)
    assert module.training
    assert all(torch.equal(before[name], each) for name, each in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_only_the_cross_entropy_can_be_smoothed() -> None:
    scores, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    found = choose_loss(Task(), 0.3)(scores, labels)
    logs = scores.log_softmax(dim=1)
    expected = -(0.7 * logs[range(4), labels] + 0.3 * logs.mean(dim=1)).mean()
    torch.testing.assert_close(found, expected)
    assert choose_loss(Task(loss=scalar), 0) is scalar
    with pytest.raises(ConfigurationError, match=r"label_smoothing = 0\.3 .* loss"):
        choose_loss(Task(loss=scalar), 0.3)


def test_correct_labels_are_counted_per_sample() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert count_correct(scores, torch.tensor([1, 1])).item() == 1
    # Two samples of two labels each: all of the first are right, and one of the second.
    tokens = scores.T.expand(2, 2, 2)
    assert count_correct(tokens, torch.tensor([[1, 0], [0, 0]])).item() == 1.5


def test_the_five_highest_scores_are_looked_at() -> None:
    scores = torch.arange(7.0).repeat(4, 1)
    labels = torch.tensor([6, 2, 1, 0])
    assert count_top5(scores, labels) == 2
    # Sequences: (samples, classes, length), each sample's share.
    assert count_top5(scores.T.unsqueeze(0), labels.unsqueeze(0)) == 0.5


def test_sequences_have_a_perplexity() -> None:
    average = Average(math.log(50.0), {"accuracy": 0.1}, 8)
    labels = torch.zeros(2, dtype=torch.int64)
    assert add_perplexity(Task(), labels, average) == average
    found = add_perplexity(Task(), labels.unsqueeze(0), average)
    assert found.metrics == {"accuracy": 0.1, "perplexity": pytest.approx(50.0)}
    found = add_perplexity(Task(), labels.unsqueeze(0), replace(average, loss=1e9))
    assert math.isfinite(found.metrics["perplexity"])
