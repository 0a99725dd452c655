"""Parts of a model that are large enough to be handled on their own: by size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn


def find_groups(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules inside ``model`` whose own parameters reach ``least``, the inner ones first.

    Parameters of an inner group are not counted again. A parameter that several modules share
    belongs to the innermost module that contains all of them; a module that holds only one of its
    places is no group.
    """
    places = Counter(
        id(parameter) for each in model.modules() for parameter in each._parameters.values()
    )
    groups: list[nn.Module] = []
    _collect(model, least, places, groups)
    return [each for each in groups if each is not model]


def _collect(
    module: nn.Module, least: int, places: Counter[int], groups: list[nn.Module]
) -> dict[int, nn.Parameter]:
    """The parameters below ``module``, itself included, that are in no group; by identity."""
    own = {id(each): each for each in module._parameters.values() if each is not None}
    for child in module.children():
        own |= _collect(child, least, places, groups)
    below = Counter(
        id(parameter) for each in module.modules() for parameter in each._parameters.values()
    )
    is_closed = all(below[number] == places[number] for number in own)
    is_called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if is_closed and is_called and sum(each.numel() for each in own.values()) >= least:
        groups.append(module)
        return {}
    return own


def find_innermost(groups: list[nn.Module]) -> Iterator[nn.Module]:
    """Those of the groups that contain no other one."""
    for group in groups:
        inside = set(map(id, group.modules())) - {id(group)}
        if not any(id(each) in inside for each in groups):
            yield group


def list_parameters(model: nn.Module, groups: list[nn.Module]) -> list[list[nn.Parameter]]:
    """The parameters of each group, without those of groups inside it; last the rest.

    ``groups``: the inner ones first.
    """
    listed: set[int] = set()
    found = []
    for group in [*groups, model]:
        own = {id(each): each for each in group.parameters() if id(each) not in listed}
        listed |= own.keys()
        found.append(list(own.values()))
    return found


def count_parameters(model: nn.Module, groups: list[nn.Module]) -> list[int]:
    """The number of parameters in each of these lists that has any."""
    counts = (sum(each.numel() for each in own) for own in list_parameters(model, groups))
    return [count for count in counts if count]
