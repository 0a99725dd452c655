"""An optimizer's state, stored by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mpiddp.checkpoints.state import clean_name, find_module
from mpiddp.checkpoints.storage.shards import Stored
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
            is_replicated: whether it is the same on all ranks, or parts of sharded tensors.

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
        self._keeps_options, self.is_replicated = keeps_options, is_replicated
        self._first = [
            {name: repr(each) for name, each in group.items() if name not in _RATES}
            for group in optimizer.param_groups
        ]
        """Options of its groups at the beginning."""
        self._waiting: dict[str, Any] = {}
        """State of parameters that the optimizer does not have, by name."""
        self._known: frozenset[int] = frozenset()
        """Ids of the optimizer's parameters when it was last looked for those of ``_waiting``."""
        self._is_hooked = False
        self._list_names()

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
        return {
            "state": {
                **self._waiting,
                **{names[key]: each for key, each in found["state"].items() if key in names},
            },
            "others": {key: each for key, each in found["state"].items() if key not in names},
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
        found, parameters = state["state"], self._find_parameters()
        strangers = [name for name in found if name not in parameters]
        if strangers:
            raise ValueError(f"the optimizer's {strangers[0]} is no parameter of the model")
        own, listed = self._optimizer.state_dict(), self._list_names()
        numbers = _pair(listed, own)
        groups = zip(listed, own["param_groups"], strict=True)
        self._optimizer.load_state_dict(
            {
                **own,
                "state": state["others"]
                | {number: found[name] for name, number in numbers.items() if name in found},
                "param_groups": [
                    self._fit_options(names, group, state["groups"]) for names, group in groups
                ],
            }
        )
        for name in numbers.keys() & found.keys():
            self._keep_types(parameters[name], found[name])
        self._waiting = {name: each for name, each in found.items() if name not in numbers}
        if self._waiting:
            self._known = _list_ids(self._optimizer)
            if not self._is_hooked:
                self._is_hooked = True
                self._optimizer.register_step_pre_hook(self._hand_over)

    def _fit_options(
        self, names: list[str], group: dict[str, Any], stored: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """A group with the options of the stored group that its first parameter was in."""
        for each in stored:
            if set(names[:1]) & set(each["params"]):
                taken = each.get(CHANGED, []) if self._keeps_options else each.keys() - _MEMBERS
                return {**group, **{name: each[name] for name in taken if name in each}}
        return group

    def _keep_types(self, parameter: nn.Parameter, stored: Mapping[str, Any]) -> None:
        """``Optimizer.load_state_dict`` casts state to the parameter's type; undo that."""
        own = self._optimizer.state[parameter]
        for key, value in stored.items():
            now = own.get(key)
            are_tensors = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            if are_tensors and value.dtype != now.dtype:
                own[key] = value.to(now.device)

    def _hand_over(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before a step: give parameters that were added the state that waits for them."""
        if not self._waiting or (found := _list_ids(optimizer)) == self._known:
            return
        self._known = found
        parameters = self._find_parameters()
        for name in {name for names in self._list_names() for name in names}:
            state = self._waiting.pop(name, None)
            if state is not None and parameters[name] not in optimizer.state:
                device = parameters[name].device
                optimizer.state[parameters[name]] = {
                    key: _move(value, device) for key, value in state.items()
                }


CHANGED = "changed"
"""Key of a stored group: the names of options that the optimizer has changed."""
_MEMBERS = frozenset({"params", "param_names", CHANGED})
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


def _move(value: Any, device: torch.device) -> Any:
    """State on the parameter's device; counters without dimensions stay on the CPU."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.to(device)
    return value
