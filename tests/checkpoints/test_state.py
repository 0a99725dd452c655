"""What a checkpoint holds of a training, and that saving changes nothing in it."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import mpiddp
from mpiddp.errors import CheckpointError, ConfigurationError

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
"""All of torch's."""
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "LBFGS": {"lr": 0.1, "max_iter": 3, "history_size": 4},
    "Muon": {"lr": 0.01},
    "SparseAdam": {"lr": 0.01},
}
STEPS = 4
expect_equal = partial(assert_close, rtol=0, atol=0)
"""Bit for bit, types included."""


class Net(nn.Module):
    """With a head that is not always used, and weights that Muon and SparseAdam take."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.is_sparse = name == "SparseAdam"
        self.first = nn.Embedding(5, 4, sparse=self.is_sparse)
        has_bias = name not in ("Muon", "SparseAdam")
        self.second = nn.Linear(4, 3, bias=has_bias)
        self.head = nn.Linear(4, 3, bias=has_bias)
        if self.is_sparse:
            self.second.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, numbers: torch.Tensor, *, uses_head: bool = False) -> torch.Tensor:
        hidden = self.first(numbers)
        return self.second(hidden) + (self.head(hidden) if uses_head else 0)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [each for each in model.parameters() if each.requires_grad]
    return OPTIMIZERS[name](parameters, **OPTIONS.get(name, {}))


def take_step(model: Net, optimizer: torch.optim.Optimizer, step: int, **options: bool) -> None:
    numbers = torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(step))

    def find_loss() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(numbers, **options) - step).square().mean()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(find_loss)


def read_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of all state, in a form that can be compared."""
    return [
        [each.detach().clone() for each in model.parameters()],
        copy.deepcopy(optimizer.state_dict()),
        torch.get_rng_state(),
    ]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_saves_change_nothing_and_each_can_be_gone_on_from(name: str, tmp_path: Path) -> None:
    plain = Net(name)
    optimizer = make_optimizer(name, plain)
    expected = [read_all(plain, optimizer)]
    for step in range(STEPS):
        take_step(plain, optimizer, step)
        expected.append(read_all(plain, optimizer))
    model = Net(name)
    optimizer = make_optimizer(name, model)
    with mpiddp.Checkpointer(tmp_path, model, optimizer, keep=STEPS + 1) as checkpointer:
        for step in range(STEPS):
            checkpointer.save(step)
            take_step(model, optimizer, step)
            expect_equal(read_all(model, optimizer), expected[step + 1])
    for step in range(STEPS):
        model = Net(name)
        optimizer = make_optimizer(name, model)
        with mpiddp.Checkpointer(tmp_path / "other", model, optimizer) as checkpointer:
            state = checkpointer.restore(tmp_path / f"step-{step}")
        assert state == {"step": step}
        expect_equal(read_all(model, optimizer), expected[step])
        for each in range(step, STEPS):
            take_step(model, optimizer, each)
        expect_equal(read_all(model, optimizer), expected[STEPS])


def test_a_parameter_without_a_gradient_has_no_state_yet(tmp_path: Path) -> None:
    models = [Net(), Net()]
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in models]
    for step in range(2):
        take_step(models[0], optimizers[0], step)
    with mpiddp.Checkpointer(tmp_path, models[0], optimizers[0]) as checkpointer:
        checkpointer.save(2)
    with mpiddp.Checkpointer(tmp_path, models[1], optimizers[1]) as checkpointer:
        assert checkpointer.restore() == {"step": 2}
    assert models[1].head.weight not in optimizers[1].state
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(2, 5):
            take_step(model, optimizer, step, uses_head=True)
    expect_equal(read_all(models[0], optimizers[0]), read_all(models[1], optimizers[1]))


def freeze(model: Net) -> torch.optim.Optimizer:
    """An optimizer that does not have the head, as one that is tuned later."""
    parts = [*model.first.parameters(), *model.second.parameters()]
    return torch.optim.Adam(parts, 0.1)


def freeze_gradients(model: Net) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model.head.requires_grad_(False)
    return optimizer


def add_head(model: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.1})


def exchange(model: Net, optimizer: torch.optim.Optimizer) -> None:
    """The head in place of another part: the optimizer has as many parameters as before."""
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [*model.first.parameters(), *model.head.parameters()]})


@pytest.mark.parametrize(
    ("begin", "unfreeze"),
    [
        (freeze, add_head),
        (freeze, exchange),
        (freeze_gradients, lambda model, _: model.head.requires_grad_(True)),
    ],
)
def test_state_of_a_frozen_parameter_waits_until_it_is_trained_again(begin, unfreeze, tmp_path):
    model = Net()
    whole = torch.optim.Adam(model.parameters(), 0.1)
    for step in range(3):
        take_step(model, whole, step, uses_head=True)
    with mpiddp.Checkpointer(tmp_path, model, whole) as checkpointer:
        checkpointer.save(3)
    for _ in range(2):
        model = Net()
        optimizer = begin(model)
        with mpiddp.Checkpointer(tmp_path, model, optimizer) as checkpointer:
            assert checkpointer.restore() == {"step": 3}
            checkpointer.save(3)
    unfreeze(model, optimizer)
    take_step(model, optimizer, 3, uses_head=True)
    found = optimizer.state[model.head.weight]
    assert int(found["step"]) == 4
    assert found["exp_avg"].abs().sum() > 0


def test_an_optimizer_with_parameters_of_nobody_is_refused(tmp_path: Path) -> None:
    model, head = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 0.1)
    with pytest.raises(ConfigurationError, match=r"group 0 as number 2 one of shape \(1, 2\)"):
        mpiddp.Checkpointer(tmp_path, model, optimizer)
    torch.autograd.backward(head(model(torch.ones(4, 3))).sum())
    optimizer.step()
    with mpiddp.Checkpointer(tmp_path, model, optimizer, head=head) as checkpointer:
        checkpointer.save(1)
    expected = copy.deepcopy((head.state_dict(), optimizer.state_dict()))
    optimizer.step()
    with mpiddp.Checkpointer(tmp_path, model, optimizer, head=head) as checkpointer:
        checkpointer.restore()
    expect_equal(expected, (head.state_dict(), optimizer.state_dict()))


def test_what_does_not_fit_is_named_with_what_to_do(tmp_path: Path) -> None:
    def make(features: int = 3, size: int = 3) -> nn.Module:
        model = nn.Linear(features, 2)
        model.register_buffer("seen", torch.arange(size), persistent=False)
        return model

    with mpiddp.Checkpointer(tmp_path, make()) as checkpointer:
        checkpointer.save(1)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make().parameters(), 0.1), 5)
    for other, more, problem in (
        (make(features=4), {}, r"weight: expected \(2, 4\), found \(2, 3\)"),
        (nn.Sequential(make()), {}, r"0\.\w+ is not in it"),
        (make(size=1), {}, r".*\b(size|shape)\b.*"),
        (make(), {"schedule": schedule}, "it has no state of 'schedule'"),
    ):
        with pytest.raises(CheckpointError) as caught:
            mpiddp.Checkpointer(tmp_path, other, **more).restore()
        said = str(caught.value)
        assert re.search(f"step-1 does not fit: {problem}; go on with the model", said), said
        assert "a directory of their own" in said and "\n" not in said
