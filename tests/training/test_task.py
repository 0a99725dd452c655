"""Tasks, models and data that users bring."""

import math
import re
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import structured
import trainings
from mpiddp.checkpoints.optimizer_state import CHANGED, OptimizerState
from mpiddp.checkpoints.packing import pack, unpack
from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.sync.parameter_server.server import LR_SHARE
from mpiddp.training.data import device_data
from mpiddp.training.data.data_sets import DataSet, Split
from mpiddp.training.data.samples import Batch, Key, Samples
from mpiddp.training.data.structure import FormError, find_form, take_inputs
from mpiddp.training.options.config import Configuration, parse, to_toml
from mpiddp.training.preparation import agree
from mpiddp.training.records.metrics import Average
from mpiddp.training.step.optimizer_step import LocalUpdate, make_optimizer
from mpiddp.training.step.step import split_batch
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
from own_algorithm import STAR
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


OPTIONS = {
    "plain": [], "parts": ["--accumulation-steps", "4"], "skip": ["--on-nan", "skip"],
    "server": ["--sync", "parameter-server"],
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_numbers_train_the_same_model_in_any_structure(options, pool, tmp_path):
    words = ["--epochs", "2", "--batch-size", "8", *options]
    called = pool("openmpi", 2).call(structured.train_each, words, cwd=tmp_path, timeout=140)
    for rows in called.values:
        assert len(rows) == len(structured.FORMS) + len(structured.STREAMS)
        assert set(rows.values()) == {rows["one tensor"]}
    assert read_rows(tmp_path / "runs/a dict")[-1]["test_accuracy"] > 0.5


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
    read = [Samples(each).read(Key(1, [3, 1])) for each in (split, replace(split, augment=dict))]
    for found in (moved.read([3, 1]), *read):
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


TOY = ("--data", "toy", "--samples", "200", "--warmup-epochs", "0", "--learning-rate", "0.05")
OWN = ("--optimizer", "trainings:make_sgd", "--schedule", "trainings:fall")


def test_the_trainers_own_given_as_a_users_trains_the_same(pool, tmp_path):
    words, step = [*TOY, "--sync", "parameter-server"], "runs/own/checkpoints/step-6"
    lines = [
        [*words, "--epochs", "2", "--name", "usual"],
        [*words, *OWN, "--epochs", "2", "--name", "own", "--save-every", "3steps", "--keep", "9"],
        [*words, *OWN, "--epochs", "2", "--name", "again", "--resume", step],
    ]
    pool("openmpi", 2).call(trainings.run, *lines, cwd=tmp_path)
    rows = [trainings.read_rows(tmp_path / "runs" / name)[-1] for name in ("usual", "own", "again")]
    for name in ("parameters", "learning_rate", "test_loss"):
        assert len({row[name] for row in rows}) == 1, name


def test_groups_of_parameters_keep_the_ratio_of_their_rates() -> None:
    module = nn.Linear(2, 1)

    def make(model: nn.Linear, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [model.weight], "lr": lr / 4}, {"params": [model.bias]}], lr
        )

    options = Configuration(learning_rate=0.2)
    optimizer = make_optimizer(options, list(module.parameters()), make, module)
    update = LocalUpdate(module, optimizer, lambda step: 1.0 + step)
    for step in range(2):
        update.finish_step()
        assert [group["lr"] for group in optimizer.param_groups] == [(1 + step) / 4, 1 + step]
    assert [group[LR_SHARE] for group in optimizer.param_groups] == [0.25, 1]
    # torch's classes have other names for the same arguments.
    adam = make_optimizer(options, list(module.parameters()), torch.optim.Adam, module)
    assert isinstance(adam, torch.optim.Adam) and adam.param_groups[0]["lr"] == 0.2


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, and doubles a number there, as Prodigy and others do."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group |= {"steps": 0, "scale": torch.ones(())}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
            group["scale"] *= 2
        return super().step()


def test_what_an_optimizer_keeps_in_its_groups_goes_on() -> None:
    module = nn.Linear(2, 1)
    first, other = Counting(module.parameters(), 0.1), Counting(module.parameters(), 0.2, 0.5)
    saved, resumed = (
        OptimizerState(each, {"": module}, keeps_options=True) for each in (first, other)
    )
    first.step()
    for goal in (resumed, OptimizerState(first, {"": module}, keeps_options=True)):
        goal.load_state_dict(unpack(pack(saved.state_dict())))
    for each, decay in ((first, 0.0), (other, 0.5)):
        group = each.param_groups[0]
        assert (group["steps"], group["scale"], group["weight_decay"]) == (1, 2, decay)
    # What a resumed run saves has them, too.
    assert resumed.state_dict()["groups"][0][CHANGED] == ["steps", "scale"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, "step() needs no closure, found LBFGS"),
        (lambda parameters: torch.optim.SGD(parameters), "a parameter learning_rate or lr of"),
        (
            lambda model, lr: torch.optim.SGD(model.parameters(), lr),
            "a default for its parameter model",
        ),
    ],
    ids=["closure", "no rate", "model"],
)
def test_what_is_no_optimizer_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_optimizer(Configuration(learning_rate=0.2), [torch.ones(1)], make)
    assert str(caught.value).startswith("optimizer: ") and message in str(caught.value)


def test_options_and_a_task_do_not_contradict_each_other() -> None:
    task = Task(optimizer=trainings.make_sgd, schedule=trainings.fall)
    options: dict[str, Any] = {"learning_rate": 0.1, "task": "mine:make"}
    _, found = find_task(Configuration(**options), task)
    assert (found.optimizer, found.schedule) == ("trainings:make_sgd", "trainings:fall")
    assert find_task(found, task)[1] == found
    refused = {
        "momentum = 0.5 cannot": {"momentum": 0.5},
        "optimizer = 'adamw' cannot": {"optimizer": "adamw"},
        "schedule = 'constant' cannot": {"schedule": "constant"},
        "learning_rate: expected a number beside optimizer": {"learning_rate": None},
    }
    for message, more in refused.items():
        with pytest.raises(ConfigurationError, match=f"^{message}"):
            find_task(Configuration(**{**options, **more}), task)
    with pytest.raises(ConfigurationError, match=r"^optimizer: expected a function .* found a SGD"):
        Task(optimizer=torch.optim.SGD([torch.ones(1)]))  # type: ignore[arg-type]


def test_it_is_named_by_sync_and_stands_in_the_configuration(star, tmp_path):
    with pytest.raises(ConfigurationError, match="no algorithm is called 'star'"):
        parse(["--sync", "star"])
    configuration = parse(["--sync", "star:segments=2", "--load", str(star)]).resolve()
    text = to_toml(configuration)
    assert f'load = "{star}"' in text
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert parse(["--config", str(path)]).load == star


@pytest.mark.parametrize("sync", ["framework", "auto", "parameter-server"])
def test_a_file_that_nothing_is_taken_from(star, sync):
    with pytest.raises(ConfigurationError, match="name its algorithm: --sync NAME"):
        Configuration(sync=sync, load=star).resolve()


def test_ranks_agree_on_what_the_file_holds(star):
    """Each rank reads a file of that name; on another node it may be another one."""
    configuration = Configuration(sync="star", load=star).resolve()
    asked = []
    session = types.SimpleNamespace(
        any=bool, broadcast=lambda value: value,
        agree=lambda value, what: asked.append((value, what)), world=types.SimpleNamespace(size=2),
    )  # fmt: skip
    agree(configuration, session)
    star.write_text(STAR.replace("owners=[0]", ""))
    agree(configuration, session)
    (first, what), (second, _) = asked
    assert what == f"contents of {star}"
    assert first != second
