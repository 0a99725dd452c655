"""``--summary``: the layers of a model, and the memory that its training takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpiddp.launch.session import Session
from mpiddp.training.data.structure import call_model
from mpiddp.training.options.config import Configuration
from mpiddp.training.preparation import agree
from mpiddp.training.task.loading import choose_samples, load_on_all, read_first
from mpiddp.training.task.task import build_model, check_task, find_task
from mpiddp.wording import print_text

STATES = {"sgd": 1, "adamw": 2}
"""Numbers that an optimizer keeps for each parameter; sgd without momentum keeps none."""


@dataclass(frozen=True)
class Layer:
    """A module without submodules, in one forward pass."""

    name: str
    kind: str
    shape: tuple[int, ...]
    """Of what it returns for one sample."""
    parameters: int
    bytes: int
    """Of what it returns for one sample."""


def summarise(configuration: Configuration, session: Session) -> None:
    """Print the model's layers, parameters and memory on rank 0; nothing is trained. Collective.

    Raises ConfigurationError.
    """
    task, configuration = find_task(configuration, None)
    agree(configuration, session)
    data = load_on_all(configuration, task, session)
    module = build_model(task, data).to(session.device)
    # One sample is read: the others are not worth moving.
    train, _ = choose_samples(configuration, data, torch.device("cpu"))
    batch = read_first(train, 1, session)
    check_task(task, module, batch, data.classes)
    if session.world.rank == 0:
        layers = list_layers(module, batch.inputs)
        print_text(*describe(module, layers, configuration))


def list_layers(module: nn.Module, sample: Any) -> list[Layer]:
    """The layers in the order in which they are called; ``sample``: inputs (1, …)."""
    found: list[Layer] = []
    hooks = []
    for name, part in module.named_modules():
        if next(part.children(), None) is None:

            def note(part: nn.Module, _: Any, output: Any, name: str = name) -> None:
                if isinstance(output, torch.Tensor):
                    size = sum(each.numel() for each in part.parameters(recurse=False))
                    shape, count = tuple(output.shape[1:]), output.numel() * output.element_size()
                    found.append(Layer(name, type(part).__name__, shape, size, count))

            hooks.append(part.register_forward_hook(note))
    module.eval()
    with torch.no_grad():
        call_model(module, sample)
    for hook in hooks:
        hook.remove()
    return found


def describe(module: nn.Module, layers: list[Layer], configuration: Configuration) -> Iterator[str]:
    """The lines of the console."""
    rows = [(each.name, each.kind, str(each.shape), f"{each.parameters:,}") for each in layers]
    rows.insert(0, ("layer", "kind", "output of a sample", "parameters"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, kind, shape, count in rows:
        yield (
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {shape:<{widths[2]}}  {count:>{widths[3]}}"
        )
    parameters = list(module.parameters())
    trained = [each for each in parameters if each.requires_grad]
    weights = sum(each.numel() * each.element_size() for each in parameters)
    gradients = sum(each.numel() * each.element_size() for each in trained)
    name = configuration.optimizer
    states = STATES.get(name)
    if name == "sgd" and configuration.momentum == 0:
        states = 0
    state = "without the optimizer's" if states is None else f"{name} {_show(states * gradients)}"
    outputs = configuration.batch_size * sum(each.bytes for each in layers)
    yield f"Parameters: {sum(each.numel() for each in parameters):,}"
    yield (
        f"Memory of a rank: parameters {_show(weights)}, gradients {_show(gradients)}, "
        f"{state}, layers' outputs "
        f"{_show(outputs)} for {configuration.batch_size} samples"
    )


def _show(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
