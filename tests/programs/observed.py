"""Trainings on the ranks of a pool, and what their steps did."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.sync.ddp_hook import ScheduleHook
from mpiddp.training.options.config import parse
from mpiddp.training.step.step import Engine
from mpiddp.training.trainer import train

LAYERS = (nn.Linear, nn.Conv2d)
TAKE_STEP = Engine.take_step
ALL_REDUCE = dist.all_reduce
# As torch names them from 2.13 on, or before.
IS_NEW = hasattr(dist, "all_gather_single")
GATHER = "all_gather_single" if IS_NEW else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if IS_NEW else "reduce_scatter_tensor"


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
    sent: float = 0.0
    """Bytes of FSDP's calls, which name their group, in training steps."""
    is_stepping: bool = False
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
        may_choose = torch.backends.cudnn.benchmark
        self.is_deterministic = torch.are_deterministic_algorithms_enabled() and not may_choose
        if outputs.dim() == 4 and outputs.shape[1] > 1:
            self.channels_last |= outputs.is_contiguous(memory_format=torch.channels_last)

    def list_patches(self) -> Iterator[AbstractContextManager[object]]:
        def take_step(*arguments: Any) -> Any:
            self.is_stepping = True
            try:
                return TAKE_STEP(*arguments)
            finally:
                self.is_stepping = False

        average = self.count("buckets", ScheduleHook._average)
        forward = self.count("computed", nn.Linear.forward)
        yield mock.patch.object(ScheduleHook, "_average", average)
        yield mock.patch.object(nn.Linear, "forward", forward)
        yield mock.patch.object(Engine, "take_step", take_step)
        for name in (GATHER, SCATTER, "all_reduce"):
            yield mock.patch.object(dist, name, self.weigh(getattr(dist, name)))

    def weigh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose bytes are counted: the part of a rank to each other one."""

        def weigh_and_call(*arguments: Any, **named: Any) -> Any:
            if self.is_stepping and (group := named.get("group")) is not None:
                values = [*arguments, *named.values()]
                ranks = dist.get_world_size(group)
                part = min(each.nbytes for each in values if isinstance(each, torch.Tensor))
                # Reduced and gathered, by parts.
                twice = 2 / ranks if function is ALL_REDUCE else 1
                self.sent += twice * (ranks - 1) * part
            return function(*arguments, **named)

        return weigh_and_call

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
    node_rank, local_rank = divmod(world.rank, size)
    session.world = replace(
        world, node_rank=node_rank, local_rank=local_rank, local_size=size,
        node_count=-(-world.size // size),
    )  # fmt: skip
    try:
        return observe(session, *command_lines)
    finally:
        session.world = world


def observe_compiled(session: Session, *command_lines: Sequence[str]) -> list[Observation]:
    """As ``observe``, without dropout, and without the warnings that torch's compiler has about its
    own modules.

    A GPU may draw a mask by how numbers lie in memory. With another mask the test loss of a small
    training is another by 12 % (standard deviation of 16 masks on a CPU).
    """
    forward = mock.patch.object(nn.Dropout, "forward", lambda layer, inputs: inputs)
    with warnings.catch_warnings(), forward:
        warnings.simplefilter("ignore")
        return observe(session, *command_lines)


def observe(session: Session, *command_lines: Sequence[str]) -> list[Observation]:
    torch.set_num_threads(1)
    found = []
    for words in command_lines:
        observation = Observation()
        hook = register_module_forward_hook(observation.note)
        with ExitStack() as stack:
            for each in observation.list_patches():
                stack.enter_context(each)
            try:
                handler = find_failure_handler(session)
                observation.row = vars(train(parse(list(words)), session, handler))
            finally:
                hook.remove()
        found.append(observation)
    return found
