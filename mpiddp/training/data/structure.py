"""Inputs and targets: one tensor, or several of them in tuples, lists and dicts.

One tensor is the usual case: it costs a look at its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from mpiddp.errors import MpiddpError

TARGETS = ("labels", "label", "targets", "target")
"""Names of the target in a sample that is a dict."""
SAMPLE = (
    "a sample is (inputs, target), each a tensor, an array, a number, or a tuple, list or dict of "
    f"these; or (first, second, …, target); or a dict with one of {', '.join(TARGETS)}"
)


class FormError(MpiddpError):
    """Samples are not what the trainer takes."""


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to each tensor, array or number in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_leaves(function, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_leaves(function, each) for each in value]
    return function(value)


def list_leaves(value: Any) -> list[Any]:
    """The tensors, arrays and numbers in ``value``, in their order."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return found


def split_leaves(value: Any, parts: int) -> list[Any]:
    """``value`` in so many parts, each with a share of the samples."""
    if isinstance(value, torch.Tensor):
        return list(torch.tensor_split(value, parts))
    columns = [torch.tensor_split(each, parts) for each in list_leaves(value)]
    return [_fill(value, leaves) for leaves in zip(*columns, strict=True)]


def join_leaves(parts: Sequence[Any]) -> Any:
    """Parts of the same form as one, with the samples of all."""
    return _fill(parts[0], map(torch.cat, zip(*map(list_leaves, parts), strict=True)))


def _fill(form: Any, leaves: Iterable[Any]) -> Any:
    found = iter(leaves)
    return map_leaves(lambda _: next(found), form)


def count_samples(value: Any) -> int:
    """Of inputs or targets of a batch."""
    # len() of a tensor is a function in Python.
    return value.shape[0] if isinstance(value, torch.Tensor) else len(list_leaves(value)[0])


def find_shape(inputs: Any) -> Any:
    """The shape of one sample of a batch; of several tensors their shapes, in the same places."""
    return map_leaves(lambda each: tuple(each.shape[1:]), inputs)


def find_sample_shape(sample: Any) -> Any:
    """The shape of a sample's inputs. Raises FormError."""
    return find_shape(separate_one(sample)[0])


def separate_one(sample: Any) -> tuple[Any, Any]:
    """Inputs and targets of a batch of one sample. Raises FormError."""
    try:
        batch = default_collate([sample])
    except TypeError:
        raise FormError(f"{SAMPLE}; found {_name(sample)}") from None
    return separate(batch)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Give a model its inputs: a tensor alone, those of a tuple or list by position, those of a
    dict by their names."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def separate(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of what torch's ``default_collate`` makes of samples.

    Raises FormError.
    """
    inputs = targets = None
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        *first, targets = batch
        inputs = first if len(first) > 1 else first[0]
        if isinstance(inputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            return inputs, targets
    elif (
        isinstance(batch, Mapping)
        and len(names := [each for each in TARGETS if each in batch]) == 1
    ):
        inputs = {key: each for key, each in batch.items() if key != names[0]}
        targets = batch[names[0]]
    for part in (inputs, targets):
        leaves = list_leaves(part)
        if not leaves or not all(isinstance(each, torch.Tensor) for each in leaves):
            raise FormError(f"{SAMPLE}; found {_name(batch)}")
    return inputs, targets


def find_form(inputs: Any) -> Any:
    """What two samples have in common if a model takes both: all but the tensors themselves."""
    return map_leaves(lambda _: None, inputs)


def take_inputs(sample: Any, form: Any) -> Any:
    """The inputs of a sample with or without a target, of this form. Raises FormError."""
    candidates = [sample]
    if isinstance(sample, list | tuple) and sample:
        first = sample[:-1] if len(sample) > 2 else sample[0]
        candidates.append(first)
    elif isinstance(sample, Mapping):
        candidates.append({key: each for key, each in sample.items() if key not in TARGETS})
    for each in candidates:
        if find_form(each) == form:
            return each
    raise FormError(
        f"expected samples with the inputs of the training data, with or without a target, found "
        f"{_name(sample)}"
    )


def _name(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a dict of {', '.join(f'{key} ({_name(each)})' for key, each in found.items())}"
    if isinstance(found, list | tuple):
        listed = [_name(each) for each in found[:4]]
        return f"a {type(found).__name__} of {', '.join(listed)}{', …' * (len(found) > 4)}"
    return type(found).__name__
