"""A small training whose state follows from its history alone, on any number of ranks.

A history is a tuple of events. ``body`` and ``head`` are steps, with and without the model's head;
``freeze`` and ``thaw`` are of the head's gradients; ``add`` gives the head to the optimizer, and
``leave`` is a restart whose optimizer does not have it; ``slow`` halves the rate; ``world-<n>`` is
a restart on another number of ranks.
"""

import copy
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from mpiddp.training.data.seeding import seed_generators

History: TypeAlias = tuple[str, ...]
Gradients: TypeAlias = list[torch.Tensor | None]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.02, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.02, weight_decay=0.1),
}
BODY, HEAD = "body", "head"
STEPS = (BODY, HEAD)
HEAD_RATE = 0.03


class Net(nn.Module):
    """With state of each kind: drawn numbers, buffers, a head, a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)
        )
        self.head = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, samples: torch.Tensor, *, uses_head: bool) -> torch.Tensor:
        found: torch.Tensor = self.body(samples)
        return self.head(found) if uses_head else found


class Trainee:
    """One rank's model and optimizer."""

    def __init__(self, kind: str, rank: int, *, has_head: bool) -> None:
        torch.manual_seed(3)
        self.rank = rank
        self.net = Net()
        self.optimizer = OPTIMIZERS[kind]([*self.net.body.parameters(), self.net.unused])
        self.has_head = False
        if has_head:
            self.add_head()
        seed_generators(100 + rank)

    def add_head(self) -> None:
        parameters = list(self.net.head.parameters())
        self.optimizer.add_param_group({"params": parameters, "lr": HEAD_RATE})
        self.has_head = True

    def freeze(self, is_frozen: bool) -> None:
        self.net.head.requires_grad_(not is_frozen)

    def slow_down(self) -> None:
        self.optimizer.param_groups[0]["lr"] /= 2

    def find_gradients(self, event: str, step: int) -> Gradients:
        data = torch.Generator().manual_seed(1000 * step + self.rank)
        factor = 1 + random.random() + float(np.random.rand())
        samples = factor * torch.randn(5, 4, generator=data)
        self.optimizer.zero_grad()
        # Not all of the head's parameters belong to the optimizer.
        self.net.zero_grad()
        torch.autograd.backward(self.net(samples, uses_head=event == HEAD).square().mean())
        return [each.grad for each in self.net.parameters()]

    def apply(self, gradients: Sequence[Gradients]) -> None:
        """Make a step with the mean of all ranks' gradients, added in their order."""
        for parameter, *each in zip(self.net.parameters(), *gradients, strict=True):
            found = [gradient for gradient in each if gradient is not None]
            parameter.grad = sum(found[1:], found[0]) / len(found) if found else None
        self.optimizer.step()

    def name_states(self) -> dict[str, Any]:
        """The optimizer's state by the names of its parameters."""
        names = {parameter: name for name, parameter in self.net.named_parameters()}
        return {names[each]: state for each, state in self.optimizer.state.items()}

    def digest(self, states: dict[str, Any]) -> str:
        """Of all that a checkpoint must hold; ``states``: by the names of parameters."""
        names = {id(parameter): name for name, parameter in self.net.named_parameters()}
        groups = [
            {**group, "params": [names[id(each)] for each in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        kinds = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        found = hashlib.sha256()
        for each in (self.net.state_dict(), states, groups, kinds):
            _digest(each, found)
        return found.hexdigest()


def _digest(value: Any, found: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, np.ndarray):
        found.update(value.tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            found.update(f"{key}:".encode())
            _digest(value[key], found)
    elif isinstance(value, list | tuple):
        for each in value:
            _digest(each, found)
    else:
        found.update(f"{value!r};".encode())


def count_steps(history: History) -> int:
    return sum(event in STEPS for event in history)


def is_frozen(history: History) -> bool:
    return next((each for each in reversed(history) if each in ("freeze", "thaw")), "") == "freeze"


def has_head(history: History) -> bool:
    return next((each for each in reversed(history) if each in ("add", "leave")), "") == "add"


def find_world(history: History) -> int:
    worlds = [each for each in history if each.startswith("world-")]
    return int(worlds[-1].removeprefix("world-")) if worlds else 1


class Twin:
    """A training that nobody interrupts: all ranks in this process, which never saves."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._trainees = [Trainee(kind, 0, has_head=False)]
        self._generators = [_read_generators()]
        self._left = [dict[str, Any]()]
        """Of each rank, state of parameters that its optimizer does not have."""
        self._step = 0
        self._is_frozen = False

    def digest(self) -> list[str]:
        """Of each rank."""
        digests = []
        for rank, trainee in enumerate(self._trainees):
            _set_generators(self._generators[rank])
            digests.append(trainee.digest({**self._left[rank], **trainee.name_states()}))
        return digests

    def follow(self, event: str) -> None:
        if event in STEPS:
            self._step += 1
            gradients = []
            for rank, trainee in enumerate(self._trainees):
                _set_generators(self._generators[rank])
                gradients.append(trainee.find_gradients(event, self._step))
                self._generators[rank] = _read_generators()
            # Each rank's gradients are replaced when it makes its step.
            kept = [[None if g is None else g.clone() for g in each] for each in gradients]
            for trainee in self._trainees:
                trainee.apply(kept)
        elif event.startswith("world-"):
            self._restart(int(event.removeprefix("world-")), self._trainees[0].has_head)
        elif event == "leave":
            self._restart(len(self._trainees), False)
        elif event == "add":
            for trainee, left in zip(self._trainees, self._left, strict=True):
                trainee.add_head()
                _set_states(trainee, left)
                left.clear()
        elif event == "slow":
            for trainee in self._trainees:
                trainee.slow_down()
        else:
            self._is_frozen = event == "freeze"
            for trainee in self._trainees:
                trainee.freeze(self._is_frozen)

    def _restart(self, world: int, has_head: bool) -> None:
        """Other ranks begin where rank 0 was; as many of them, each where it was."""
        is_same = world == len(self._trainees)
        old, left, generators = self._trainees, self._left, self._generators
        self._trainees, self._left, self._generators = [], [], []
        for rank in range(world):
            source = rank if is_same else 0
            trainee = Trainee(self._kind, rank, has_head=has_head)
            self._generators.append(generators[rank] if is_same else _read_generators())
            trainee.net.load_state_dict(old[source].net.state_dict())
            states = copy.deepcopy({**left[source], **old[source].name_states()})
            for group, before in zip(
                trainee.optimizer.param_groups, old[source].optimizer.param_groups, strict=False
            ):
                group.update({key: each for key, each in before.items() if key != "params"})
            trainee.freeze(self._is_frozen)
            self._left.append(_set_states(trainee, states))
            self._trainees.append(trainee)


def _set_states(trainee: Trainee, states: dict[str, Any]) -> dict[str, Any]:
    """Give the optimizer its parameters' states; returns the others."""
    parameters = dict(trainee.net.named_parameters())
    own = {id(each) for group in trainee.optimizer.param_groups for each in group["params"]}
    others = {}
    for name, state in states.items():
        if id(parameters[name]) in own:
            trainee.optimizer.state[parameters[name]] = state
        else:
            others[name] = state
    return others


def _read_generators() -> Any:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_generators(states: Any) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
