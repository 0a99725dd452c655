"""Trainings on the ranks of a pool, and what their steps did."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from mpiddp.launch.session import Session
from mpiddp.sync.ddp_hook import ScheduleHook
from mpiddp.training import buckets
from mpiddp.training.config import parse
from mpiddp.training.trainer import train

SIZES = (0.0002, 0.0005)
"""MB of DDP's buckets to choose from. Either makes two buckets of the mlp for the toy data."""
LAYERS = (nn.Linear, nn.Conv2d)


@dataclass
class Observation:
    """Of one rank, over a whole training."""

    types: set[torch.dtype] = field(default_factory=set)
    """Of layers' outputs while training."""
    computed: int = 0
    """Linear layers, in forward passes and for gradients."""
    layers: int = 0
    """Calls of layers while training."""
    predictions: int = 0
    """Calls of layers otherwise."""
    samples: set[int] = field(default_factory=set)
    """In a layer's inputs while training."""
    channels_last: bool = False
    """Whether some images were stored channel by channel in the last place."""
    buckets: int = 0
    """That a schedule averaged."""
    is_deterministic: bool = False
    row: dict[str, Any] = field(default_factory=dict)
    """The last one of the metrics."""

    def note(self, module: nn.Module, inputs: Any, outputs: torch.Tensor) -> None:
        """As a forward hook."""
        if not isinstance(module, LAYERS):
            return
        if not module.training:
            self.predictions += 1
            return
        self.layers += 1
        self.types.add(outputs.dtype)
        self.samples.add(len(inputs[0]))
        self.is_deterministic = torch.are_deterministic_algorithms_enabled()
        if outputs.dim() == 4 and outputs.shape[1] > 1:
            self.channels_last |= outputs.is_contiguous(memory_format=torch.channels_last)

    def count(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are counted in the attribute."""

        def count_and_call(*arguments: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return function(*arguments)

        return count_and_call


def observe_on_nodes(
    session: Session, size: int, *command_lines: Sequence[str]
) -> list[Observation]:
    """As ``observe``, where ``size`` ranks each are said to be a node."""
    world = session.world
    session.world = replace(
        world,
        node_rank=world.rank // size,
        local_rank=world.rank % size,
        local_size=size,
        node_count=-(-world.size // size),
    )
    try:
        return observe(session, *command_lines)
    finally:
        session.world = world


def observe_compiled(session: Session, *command_lines: Sequence[str]) -> list[Observation]:
    """As ``observe``, without the warnings that torch's compiler has about its own modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return observe(session, *command_lines)


def observe(session: Session, *command_lines: Sequence[str]) -> list[Observation]:
    """Train with each of the trainer's command lines."""
    torch.set_num_threads(1)
    found = []
    for words in command_lines:
        observation = Observation()
        hook = register_module_forward_hook(observation.note)
        average = observation.count("buckets", ScheduleHook._average)
        forward = observation.count("computed", nn.Linear.forward)
        with (
            mock.patch.object(ScheduleHook, "_average", average),
            mock.patch.object(nn.Linear, "forward", forward),
            mock.patch.object(buckets, "SIZES", SIZES),
        ):
            try:
                handler = session._resources.failure_handler
                observation.row = vars(train(parse(list(words)), session, handler))
            finally:
                hook.remove()
        found.append(observation)
    return found
