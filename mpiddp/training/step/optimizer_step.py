"""Updates the weights after a backward pass, with this rank's optimizer or parameter servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from mpiddp.checkpoints.ddp_buckets import list_sparse
from mpiddp.checkpoints.optimizer_state import OptimizerState
from mpiddp.errors import ConfigurationError
from mpiddp.sync.parameter_server.server import LR_SHARE
from mpiddp.training.data.factories import Factory, call_factory, describe
from mpiddp.training.options.groups.optimisation import OptimisationOptions
from mpiddp.training.step.moving_average import MovingAverage
from mpiddp.training.step.sharded_tensors import collect, is_sharded


class Update(Protocol):
    """How a rank updates; ``mpiddp.sync.parameter_server.serving.Serving`` is the other way."""

    def begin_step(self) -> None:
        """Before a backward pass."""

    def finish_step(self) -> object:
        """After it: the weights are new."""

    def finish_epoch(self) -> None:
        """This rank has no more steps. Collective."""

    def settle(self) -> None:
        """Give all ranks the same weights. Collective, between two steps."""

    def close(self) -> None:
        """There are no more steps. Collective."""


class GuardedUpdate(Update, Protocol):
    """An update that can leave out a step, and whose state can be stored."""

    averages_weights: bool
    """Whether `exchange_weights` may have something to do after a step."""

    @property
    def staleness(self) -> dict[int, int] | None:
        """How many gradients were how many updates late, on this rank; None if none can be."""

    def finish_step(self, *, is_bad: bool = False) -> bool:
        """After a backward pass: whether its gradients were applied.

        ``is_bad``: this rank's loss is not finite.
        """

    def exchange_weights(self, *, is_due: bool = False) -> None:
        """After a step, or with ``is_due`` at the end of an epoch: average the ranks' weights, if
        they have their own. Collective then."""

    def list_parts(self, step: int) -> dict[str, Any]:
        """What this rank holds beside the weights, as parts of a checkpoint by name.

        ``step``: which one is next when they are loaded, for the learning rate.
        """

    def begin_at(self, step: int) -> None:
        """All parts were loaded, and the module has its weights; ``step`` is next."""


class Refusal(Protocol):
    """How ranks agree that a step is left out."""

    def begin_step(self) -> None:
        """Before a forward pass."""

    def is_refused(self, *, is_bad: bool) -> bool:
        """After a backward pass: whether any rank's loss was not finite; the same on all ranks.

        ``is_bad``: this rank's was not. Collective.
        """


@dataclass(frozen=True)
class Treatment:
    """What is done with gradients before the optimizer's step, and with the weights after it."""

    refusal: Refusal | None = None
    """Says which steps are left out; None if this rank alone decides."""
    scaler: torch.amp.GradScaler | None = None
    """What the loss was multiplied with; it leaves out steps whose gradients are not finite."""
    clip_norm: float | None = None
    """Longest gradient, in the 2-norm over all parameters."""
    average: MovingAverage | None = None
    keeps_sparse: bool = False
    """Whether the optimizer is given sparse gradients as they are; they become dense otherwise."""


class LocalUpdate:
    """Every rank makes the same step, with the average of all gradients."""

    is_replicated = True
    """Whether the optimizer's state is the same on all ranks."""
    averages_weights = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float],
        treatment: Treatment | None = None,
    ) -> None:
        """``optimizer``: of the module. ``rate``: the learning rate of a step, counted from 0."""
        self._module, self.optimizer = module, optimizer
        self._rate = rate
        self._treatment = treatment or Treatment()
        clear = getattr(optimizer.zero_grad, "__func__", None)
        self._has_own_clear = clear is not torch.optim.Optimizer.zero_grad
        """Whether the optimizer's class has its own zero_grad."""
        self._step = 0
        self._sparse = list(list_sparse(module).values())
        """Parameters with sparse gradients."""
        self._unseen = list(module.parameters())
        """All parameters; none once it is known which gradients are sparse."""

    @property
    def average(self) -> MovingAverage | None:
        """The moving average of the weights, if there is one."""
        return self._treatment.average

    def begin_step(self) -> None:
        if self._has_own_clear:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            # As torch's does within a record for its profiler, which costs 0.1 ms.
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        if self._treatment.refusal is not None:
            self._treatment.refusal.begin_step()

    def finish_step(self, *, is_bad: bool = False) -> bool:
        step, treatment = self._step, self._treatment
        self._step += 1
        refusal = treatment.refusal
        if is_bad if refusal is None else refusal.is_refused(is_bad=is_bad):
            return False
        rate, optimizer = self._rate(step), self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get(LR_SHARE, 1.0)
        if not treatment.keeps_sparse and (self._sparse or self._unseen):
            self._sparse += make_dense(self._unseen)
            self._unseen = []
            make_dense(self._sparse)
        scaler = treatment.scaler
        if scaler is not None:
            scaler.unscale_(optimizer)
        if treatment.clip_norm is not None:
            clip_gradients(optimizer, treatment.clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            step_scaled(optimizer, scaler)
        if treatment.average is not None:
            self._follow(treatment.average, step)
        return True

    def _follow(self, average: MovingAverage, step: int) -> None:
        average.update(step)

    staleness = None

    def exchange_weights(self, *, is_due: bool = False) -> None:
        """All ranks have the same weights."""

    def united(self) -> AbstractContextManager[object]:
        """Within it the module has the same weights on all ranks, also between two averages.

        Collective."""
        return nullcontext()

    def finish_epoch(self) -> None:
        """All ranks have equally many steps."""

    def settle(self) -> None:
        """All ranks have the same weights."""

    def close(self) -> None:
        """Nothing to end."""

    def list_parts(self, step: int) -> dict[str, Any]:
        modules, is_same = {"": self._module}, self.is_replicated
        parts: dict[str, Any] = {
            "optimizer": OptimizerState(
                self.optimizer, modules, keeps_options=True, is_replicated=is_same
            )
        }
        if self.average is not None:
            parts["average"] = self.average
        if self._treatment.scaler is not None:
            parts["scaler"] = _ScalerState(self._treatment.scaler, is_replicated=is_same)
        return parts

    def begin_at(self, step: int) -> None:
        self._step = step


class _ScalerState:
    """A loss scaler as a part of checkpoints; one that begins later has no state in them."""

    is_optional = True

    def __init__(self, scaler: torch.amp.GradScaler, *, is_replicated: bool) -> None:
        self._scaler, self.is_replicated = scaler, is_replicated

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._scaler.load_state_dict(state)


def make_dense(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Make sparse gradients dense; returns the parameters that had any."""
    found = [each for each in parameters if each.grad is not None and each.grad.is_sparse]
    for each in found:
        assert each.grad is not None
        each.grad = each.grad.to_dense()
    return found


def step_scaled(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Take an optimizer's step with unscaled gradients, unless they are not finite.

    A fused optimizer makes its state also in a first step that is left out, but does not write it:
    the momentum would be whatever was in memory. Such state is removed again.
    """
    known = len(optimizer.state)
    scaler.step(optimizer)
    new = list(optimizer.state)[known:]
    # Read then only, since on a GPU that waits for it.
    before = scaler.get_scale() if new else 0.0
    scaler.update()
    if new and scaler.get_scale() < before:
        for parameter in new:
            del optimizer.state[parameter]


def clip_gradients(optimizer: torch.optim.Optimizer, longest: float) -> None:
    """Scale all gradients alike if their 2-norm is above ``longest``. Collective with FSDP."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(parameters, longest, collect(norm))


def make_optimizer(
    options: OptimisationOptions,
    parameters: list[torch.Tensor],
    own: Factory | None = None,
    module: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """The one that the options name, for these parameters, or ``own`` makes.

    ``module``: whose they are, if this rank has them whole or in parts. Raises ConfigurationError.

    The fused form reads and writes each number once. With momentum and decay on a CPU it took a
    quarter of the plain form's time, which is longer than a large model's backward pass. torch has
    none for complex parameters, and no fused SGD for FSDP's.
    """
    rate, decay = options.learning_rate, options.weight_decay
    assert rate is not None
    if own is not None:
        return _make_own(own, rate, parameters, module)
    momentum, is_adamw = options.momentum, options.optimizer == "adamw"
    are_plain = is_adamw or not any(map(is_sharded, parameters))
    is_fused = are_plain and not any(each.is_complex() for each in parameters)
    form = {"fused": True} if is_fused else {"foreach": True}
    if is_adamw:
        return torch.optim.AdamW(parameters, rate, (momentum, 0.999), weight_decay=decay, **form)
    return torch.optim.SGD(
        parameters, rate, momentum, weight_decay=decay, nesterov=momentum > 0, **form
    )


def _make_own(
    factory: Factory, rate: float, parameters: list[torch.Tensor], module: nn.Module | None
) -> torch.optim.Optimizer:
    """Groups keep the ratio of their learning rate to ``rate``."""
    name = describe(factory)
    if not {"learning_rate", "lr"} & set(inspect.signature(factory).parameters):
        raise ConfigurationError(
            f"optimizer: expected a parameter learning_rate or lr of {name}, found none: the "
            "trainer's schedule begins with it"
        )
    offered = {"parameters": parameters, "learning_rate": rate, "params": parameters, "lr": rate}
    if module is not None:
        offered["model"] = module
    optimizer = call_factory("optimizer", factory, torch.optim.Optimizer, **offered)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"optimizer: expected one whose step() needs no closure, found "
            f"{type(optimizer).__name__} of {name}"
        )
    for group in optimizer.param_groups:
        group[LR_SHARE] = float(group["lr"]) / rate
    return optimizer
