"""An optimizer's state, stored by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from mpiddp.checkpoints.state import clean_name, find_module
from mpiddp.checkpoints.storage.shards import Stored
from mpiddp.checkpoints.tensor_memory import STRIDES
from mpiddp.errors import ConfigurationError


class OptimizerState:
    """An optimizer's state by the names of its parameters.

    A parameter without state has none yet: it never had a gradient. State of a parameter that the
    optimizer does not have is kept for the checkpoints to come, and given to the optimizer in the
    step in which the parameter has been added to it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        modules: Mapping[str, nn.Module],
        *,
        keeps_options: bool = False,
        is_replicated: bool = True,
    ) -> None:
        """
        Args:
            optimizer: whose parameters belong to ``modules``.
            modules: by the first part of their parameters' names; "" for the model.
            keeps_options: whether decay, betas and the like stay as they are in the optimizer, but
                for those that it changes itself, such as a number of steps that it counts there.
            is_replicated: whether that of the model's parameters is the same on all ranks, or parts
                of sharded tensors.

        Raises ConfigurationError if a parameter belongs to no module, or the optimizer keeps its
        state in parts on the ranks.
        """
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise ConfigurationError(
                "optimizer: expected one with its whole state on each rank, found "
                "ZeroRedundancyOptimizer: use the optimizer itself, and fully_shard to have state "
                "in parts"
            )
        self._optimizer, self._modules = optimizer, modules
        self._keeps_options, self._is_replicated = keeps_options, is_replicated
        self._first = [
            {name: repr(each) for name, each in group.items() if name not in _RATES}
            for group in optimizer.param_groups
        ]
        """The groups' options at the beginning, each as its ``repr``."""
        self._waiting: dict[str, Any] = {}
        """State of parameters that the optimizer does not have, by name."""
        self._known: frozenset[int] = frozenset()
        """Ids of the optimizer's parameters at the last search for those of ``_waiting``."""
        self._is_hooked = False
        self._list_names()

    @property
    def is_replicated(self) -> bool:
        """Whether all ranks have the same state; that of modules beside the model may differ."""
        own = {id(each) for each in find_module(self._modules[""]).parameters()}
        return self._is_replicated and _list_ids(self._optimizer) <= own

    def _find_parameters(self) -> dict[str, nn.Parameter]:
        """By name. Of a parameter in several modules, the first one names it."""
        return {
            f"{prefix}.{clean_name(name)}" if prefix else clean_name(name): parameter
            for prefix, module in self._modules.items()
            for name, parameter in find_module(module).named_parameters()
        }

    def _list_names(self) -> list[list[str]]:
        """Of each group's parameters."""
        names: dict[int, str] = {}
        for name, parameter in self._find_parameters().items():
            names.setdefault(id(parameter), name)
        groups = self._optimizer.param_groups
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise ConfigurationError(
                        f"optimizer: expected parameters of the model, found in group {number} as "
                        f"number {place} one of shape {tuple(parameter.shape)} that is not: give "
                        "the module that it belongs to by a name, as in "
                        "Checkpointer(directory, model, optimizer, head=module)"
                    )
        return [[names[id(each)] for each in group["params"]] for group in groups]

    def state_dict(self) -> dict[str, Any]:
        found, listed = self._optimizer.state_dict(), self._list_names()
        names = {number: name for name, number in _pair(listed, found).items()}
        parameters = self._find_parameters()
        own = {names[key]: each for key, each in found["state"].items() if key in names}
        held = {**self._waiting, **own}.items()
        return {
            "state": {name: _make_plain(parameters.get(name), each) for name, each in held},
            "others": {key: each for key, each in found["state"].items() if key not in names},
            STRIDES: {
                name: list(each.stride())
                for name, each in parameters.items()
                if not each.is_contiguous()
            },
            TYPED: {
                name: typed
                for name, each in held
                if (typed := _list_typed(parameters.get(name), each))
            },
            "groups": [
                {**group, "params": each, CHANGED: self._list_changed(number, group)}
                for number, (each, group) in enumerate(
                    zip(listed, found["param_groups"], strict=True)
                )
            ],
        }

    def _list_changed(self, number: int, group: Mapping[str, Any]) -> list[str]:
        first = self._first[number] if number < len(self._first) else {}
        return [
            name
            for name, each in first.items()
            if name not in _MEMBERS and repr(group.get(name)) != each
        ]

    def find_targets(self, stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        """Parts of sharded tensors, each sharded as its parameter is."""
        targets = {}
        for name, parameter in self._find_parameters().items():
            if not isinstance(parameter, DTensor):
                continue
            prefix = f"state.{name}."
            for each, found in stored.items():
                if each.startswith(prefix) and found.shape == parameter.shape:
                    targets[each] = torch.empty_like(parameter.detach(), dtype=found.dtype)
        return targets

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "param_groups" in state:
            state = self._name(state)
        parameters, strides = self._find_parameters(), state.get(STRIDES)
        typed = state.get(TYPED, {})
        strangers = [name for name in state["state"] if name not in parameters]
        if strangers:
            raise ValueError(f"the optimizer's {strangers[0]} is no parameter of the model")
        found = {
            name: _fit(
                parameters[name],
                each,
                None if strides is None else strides.get(name, []),
                typed.get(name, []),
            )
            for name, each in state["state"].items()
        }
        own, listed = self._optimizer.state_dict(), self._list_names()
        numbers = _pair(listed, own)
        groups = zip(listed, own["param_groups"], strict=True)
        load_uncast(
            self._optimizer,
            {
                **own,
                "state": state["others"]
                | {number: found[name] for name, number in numbers.items() if name in found},
                "param_groups": [
                    self._fit_options(names, group, state["groups"]) for names, group in groups
                ],
            },
        )
        self._waiting = {name: each for name, each in found.items() if name not in numbers}
        if self._waiting:
            self._known = _list_ids(self._optimizer)
            if not self._is_hooked:
                self._is_hooked = True
                self._optimizer.register_step_pre_hook(self._hand_over)

    def _name(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What ``state_dict`` returns, of an optimizer's own, as a checkpoint may hold it."""
        listed = self._list_names()
        names = {number: name for name, number in _pair(listed, state).items()}
        held = state["state"].items()
        return {
            "state": {names[key]: each for key, each in held if key in names},
            "others": {key: each for key, each in held if key not in names},
            "groups": [
                {**group, "params": each}
                for each, group in zip(listed, state["param_groups"], strict=True)
            ],
        }

    def _fit_options(
        self, names: list[str], group: dict[str, Any], stored: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """A group with the options of the stored group that its first parameter was in."""
        for each in stored:
            if set(names[:1]) & set(each["params"]):
                taken = each.get(CHANGED, []) if self._keeps_options else each.keys() - _MEMBERS
                return {**group, **{name: each[name] for name in taken if name in each}}
        return group

    def _hand_over(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before a step: give parameters that were added the state that waits for them."""
        if not self._waiting or (found := _list_ids(optimizer)) == self._known:
            return
        self._known = found
        parameters = self._find_parameters()
        for names, group in zip(self._list_names(), optimizer.param_groups, strict=True):
            on_device = any(group.get(each) for each in _COUNTING_ON_DEVICE)
            for name in names:
                state, parameter = self._waiting.pop(name, None), parameters[name]
                if state is not None and parameter not in optimizer.state:
                    move = partial(_move, device=parameter.device, moves_counters=on_device)
                    optimizer.state[parameter] = tree_map_only(torch.Tensor, move, state)


def load_uncast(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict``, but each tensor keeps its type.

    torch gives it the parameter's.
    """
    optimizer.load_state_dict(dict(state))
    for before, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for number, parameter in zip(before["params"], group["params"], strict=True):
            if number in state["state"]:
                found = _undo_cast(state["state"][number], optimizer.state[parameter])
                optimizer.state[parameter] = found


def _undo_cast(stored: Any, now: Any) -> Any:
    if isinstance(stored, torch.Tensor) and isinstance(now, torch.Tensor):
        return stored.to(now.device)
    if isinstance(stored, str):
        return stored
    if isinstance(stored, Mapping) and isinstance(now, Mapping):
        return {
            key: _undo_cast(stored[key], each) if key in stored else each
            for key, each in now.items()
        }
    if isinstance(stored, list | tuple) and isinstance(now, list | tuple):
        return type(stored)(map(_undo_cast, stored, now))
    return now


TYPED = "typed"
"""Key of a stored state, as STRIDES: the keys of state that is of its parameter's type, by name."""
CHANGED = "changed"
"""Key of a stored group: the names of options that the optimizer has changed."""
_MEMBERS = frozenset({"params", "param_names", CHANGED})
_COUNTING_ON_DEVICE = ("fused", "capturable")
"""Options with which torch's optimizers have their counters beside the parameter."""
_RATES = frozenset({"lr", "lr_share"})
"""Options that are set anew in each step."""


def _list_ids(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    return frozenset(id(each) for group in optimizer.param_groups for each in group["params"])


def _pair(listed: list[list[str]], found: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of an optimizer's parameters in its ``state_dict``, by their names."""
    return {
        name: number
        for names, group in zip(listed, found["param_groups"], strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }


def _move(value: torch.Tensor, device: torch.device, *, moves_counters: bool) -> torch.Tensor:
    """State on the parameter's device; counters without dimensions may stay where they are."""
    return value.to(device) if value.dim() > 0 or moves_counters else value


def _list_typed(parameter: torch.Tensor | None, state: Mapping[str, Any]) -> list[str]:
    """The keys of state that is of the parameter's own subclass of tensors."""
    kind = type(parameter)
    is_usual = kind in (torch.Tensor, nn.Parameter) or isinstance(parameter, DTensor)
    return [] if is_usual else [key for key, each in state.items() if type(each) is kind]


def _make_plain(parameter: torch.Tensor | None, state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without the type of its parameter.

    Raises ConfigurationError for sharded tensors that could not be read again.
    """
    for each in state.values():
        if (
            isinstance(parameter, DTensor)
            and isinstance(each, DTensor)
            and each.shape != parameter.shape
        ):
            raise ConfigurationError(
                "optimizer: expected sharded state of the shape of its parameter, "
                f"{tuple(parameter.shape)}, found {tuple(each.shape)}, which checkpoints cannot "
                "hold: use another optimizer"
            )
    typed = _list_typed(parameter, state)
    return {**state, **{key: state[key].as_subclass(torch.Tensor) for key in typed}}


def _fit(
    parameter: torch.Tensor, state: Any, strides: list[int] | None, typed: list[str]
) -> dict[str, Any]:
    """A parameter's state as the optimizer would have it for this parameter.

    ``strides``: the parameter's when it was saved, [] for those of a contiguous one, None if nobody
    knows. State that had them gets the parameter's present ones: torch's fused optimizers go
    through the memory of both alike. Other state keeps its own.
    ``typed``: the keys of state of the parameter's type.
    """
    like = parameter.detach().as_subclass(torch.Tensor)

    def fit(value: torch.Tensor) -> torch.Tensor:
        is_other = value.shape != like.shape or value.stride() == like.stride()
        if is_other or isinstance(parameter, DTensor):
            return value
        was_alike = list(value.stride()) == strides if strides else value.is_contiguous()
        if strides is not None and not was_alike:
            return value
        return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)

    fitted: dict[str, Any] = tree_map_only(torch.Tensor, fit, state)
    kind = type(parameter)
    return {**fitted, **{key: fitted[key].as_subclass(kind) for key in typed}}
