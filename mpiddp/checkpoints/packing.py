"""Nested state as tensors alone: what is no tensor becomes JSON, and its bytes a tensor.

What the numbers of a tensor do not say stands in the JSON: how it lies in memory
(`mpiddp.checkpoints.tensor_memory`), and what autograd must know of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mpiddp.checkpoints import tensor_memory
from mpiddp.checkpoints.tensor_memory import TENSOR
from mpiddp.errors import ConfigurationError

_SKELETON = ":structure"
_DICT, _TUPLE, _LIST = "dict", "tuple", "list"
_TRAINED, _PARAMETER = "requires_grad", "parameter"
"""Said of a tensor, if it is so."""


def pack(state: Any, *, is_copied: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of ``state`` by name, and one with the structure around them.

    ``state``: tensors, numbers, strings, bools and None in dicts, lists and tuples. Raises
    ConfigurationError for anything else.

    ``is_copied``: whether its tensors will be copied into others, which are there already and keep
    their types, strides and memory. Each is then stored by its name, and its numbers alone.
    """
    tensors: dict[str, torch.Tensor] = {}
    found: list[dict[str, Any]] = []
    skeleton = _Packer(tensors, found, is_copied).take_apart(state, "")
    if not is_copied:
        tensors, said = tensor_memory.describe(tensors)
        for each in found:
            each |= said[each[TENSOR]]
    text = json.dumps(skeleton).encode()
    return {**tensors, _SKELETON: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def is_structure(name: str) -> bool:
    """Whether it is the structure that ``pack`` gave this name."""
    return name == _SKELETON


def unpack(tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was packed. Raises KeyError or ValueError if a part is missing."""
    skeleton = json.loads(bytes(tensors[_SKELETON].numpy()))
    return _put_together(skeleton, tensors, {})


@dataclass(frozen=True)
class _Packer:
    """Takes a state apart."""

    tensors: dict[str, torch.Tensor]
    """Gets all tensors, by name."""
    found: list[dict[str, Any]]
    """Gets what the structure says of each."""
    is_copied: bool

    def take_apart(self, value: Any, path: str) -> Any:
        """The structure of a part of the state."""
        if isinstance(value, torch.Tensor):
            return self._take(value, path)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        prefix = f"{path}." if path else ""
        if isinstance(value, Mapping):
            pairs = [[key, self.take_apart(each, f"{prefix}{key}")] for key, each in value.items()]
            for key, _ in pairs:
                if not isinstance(key, str | int):
                    raise _refuse(path, key)
            return {_DICT: pairs}
        if isinstance(value, list | tuple):
            parts = [self.take_apart(each, f"{prefix}{i}") for i, each in enumerate(value)]
            return {_TUPLE if isinstance(value, tuple) else _LIST: parts}
        raise _refuse(path, value)

    def _take(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        name = path or TENSOR
        while name in self.tensors or name == _SKELETON:
            # Two paths may read alike: {"a.b": …} and {"a": {"b": …}}.
            name += "'"
        self.tensors[name] = _make_plain(tensor, path, self.is_copied)
        said: dict[str, Any] = {TENSOR: name}
        if not self.is_copied:
            if tensor.requires_grad and tensor.is_leaf:
                said[_TRAINED] = True
            # isinstance takes longer here than all else.
            if type(tensor) is nn.Parameter:
                said[_PARAMETER] = True
        self.found.append(said)
        return said


def _make_plain(tensor: torch.Tensor, path: str, is_copied: bool) -> torch.Tensor:
    """The same memory as a tensor of torch's own types: of other types nothing could be read."""
    if tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
        raise ConfigurationError(
            f"state {path or 'itself'}: expected a dense tensor of plain numbers, found {kind} one"
        )
    plain = tensor.detach()
    if is_copied and 0 in plain.stride() and tensor_memory.narrow(plain).shape != plain.shape:
        raise ConfigurationError(
            f"state {path or 'itself'}: expected a tensor that a module can load, found an "
            "expanded one, whose elements share memory: give tensor.clone()"
        )
    if type(plain) is torch.Tensor or isinstance(plain, DTensor):
        return plain
    has_parts = is_traceable_wrapper_subclass(plain)
    if has_parts:
        raise _refuse(path, tensor)
    if not is_copied:
        raise ConfigurationError(
            f"state {path or 'itself'}: expected a tensor of torch's own type, found "
            f"{type(tensor).__name__}, which could not come back as one: give "
            "tensor.as_subclass(torch.Tensor)"
        )
    return plain.as_subclass(torch.Tensor)


def _refuse(path: str, value: object) -> ConfigurationError:
    return ConfigurationError(
        f"state {path or 'itself'}: expected tensors, numbers, strings, bools and None in dicts, "
        f"lists and tuples, found {type(value).__name__}"
    )


def _put_together(
    skeleton: Any, tensors: Mapping[str, torch.Tensor], made: dict[str, torch.Tensor]
) -> Any:
    """``made``: tensors by what is said of them, which may be in several places."""
    if not isinstance(skeleton, dict):
        return skeleton
    if TENSOR in skeleton:
        key = json.dumps(skeleton)
        if key not in made:
            made[key] = _make(skeleton, tensors)
        return made[key]
    ((kind, inside),) = skeleton.items()
    if kind == _DICT:
        return {key: _put_together(each, tensors, made) for key, each in inside}
    parts = [_put_together(each, tensors, made) for each in inside]
    return tuple(parts) if kind == _TUPLE else parts


def _make(said: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    tensor = tensor_memory.make(said, tensors[said[TENSOR]])
    if _PARAMETER in said:
        return nn.Parameter(tensor, requires_grad=_TRAINED in said)
    return tensor.requires_grad_() if _TRAINED in said else tensor
