"""Optimizers, schedules and algorithms that users bring."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

import trainings
from mpiddp.checkpoints.optimizer_state import CHANGED, OptimizerState
from mpiddp.checkpoints.packing import pack, unpack
from mpiddp.errors import ConfigurationError
from mpiddp.sync.parameter_server.server import LR_SHARE
from mpiddp.training.options.config import Configuration, parse, to_toml
from mpiddp.training.preparation import agree
from mpiddp.training.step.optimizer_step import LocalUpdate, make_optimizer
from mpiddp.training.task.task import Task, find_task
from own_algorithm import STAR

TOY = ("--data", "toy", "--samples", "200", "--warmup-epochs", "0", "--learning-rate", "0.05")
OWN = ("--optimizer", "trainings:make_sgd", "--schedule", "trainings:fall")


@pytest.mark.mpi
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


# ---- algorithms of one's own ---------------------------------------------------------------------


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
        any=bool,
        broadcast=lambda value: value,
        agree=lambda value, what: asked.append((value, what)),
        world=types.SimpleNamespace(size=2),
    )
    agree(configuration, session)
    star.write_text(STAR.replace("owners=[0]", ""))
    agree(configuration, session)
    (first, what), (second, _) = asked
    assert what == f"contents of {star}"
    assert first != second
