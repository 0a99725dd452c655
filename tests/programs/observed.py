"""Trainings on the ranks of a pool, and what their steps did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from mpiddp.launch.session import Session
from mpiddp.sync.ddp_hook import ScheduleHook
from mpiddp.training.config import parse
from mpiddp.training.trainer import train

LAYERS = (nn.Linear, nn.Conv2d)


@dataclass
class Observation:
    """Of one rank, over a whole training."""

    types: set[torch.dtype] = field(default_factory=set)
    """Of layers' outputs while training."""
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

    def count(self, average: Callable[..., Any]) -> Callable[..., Any]:
        """The schedules' function that averages a bucket, with its calls counted."""

        def average_and_count(*arguments: Any) -> Any:
            self.buckets += 1
            return average(*arguments)

        return average_and_count


def observe(session: Session, *command_lines: Sequence[str]) -> list[Observation]:
    """Train with each of the trainer's command lines."""
    torch.set_num_threads(1)
    found = []
    for words in command_lines:
        observation = Observation()
        hook = register_module_forward_hook(observation.note)
        with mock.patch.object(ScheduleHook, "_average", observation.count(ScheduleHook._average)):
            try:
                handler = session._resources.failure_handler
                observation.row = vars(train(parse(list(words)), session, handler))
            finally:
                hook.remove()
        found.append(observation)
    return found
