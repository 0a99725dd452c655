"""Nested state as tensors alone: what is no tensor becomes JSON, and its bytes a tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mpiddp.errors import ConfigurationError

_SKELETON = ":structure"
_TENSOR, _DICT, _TUPLE, _LIST = "tensor", "dict", "tuple", "list"


def pack(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of ``state`` by name, and one with the structure around them.

    ``state``: tensors, numbers, strings, bools and None in dicts, lists and tuples. Raises
    ConfigurationError for anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _take_apart(state, "", tensors)
    text = json.dumps(skeleton).encode()
    return {**tensors, _SKELETON: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def is_structure(name: str) -> bool:
    """Whether it is the structure that ``pack`` gave this name."""
    return name == _SKELETON


def unpack(tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was packed. Raises KeyError or ValueError if a part is missing."""
    skeleton = json.loads(bytes(tensors[_SKELETON].numpy()))
    return _put_together(skeleton, tensors)


def _take_apart(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = path or _TENSOR
        while name in tensors or name == _SKELETON:
            # Two paths may read alike: {"a.b": …} and {"a": {"b": …}}.
            name += "'"
        tensors[name] = _make_plain(value, path)
        return {_TENSOR: name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping):
        pairs = [[key, _take_apart(each, f"{prefix}{key}", tensors)] for key, each in value.items()]
        for key, _ in pairs:
            if not isinstance(key, str | int):
                raise _refuse(path, key)
        return {_DICT: pairs}
    if isinstance(value, list | tuple):
        parts = [_take_apart(each, f"{prefix}{i}", tensors) for i, each in enumerate(value)]
        return {_TUPLE if isinstance(value, tuple) else _LIST: parts}
    raise _refuse(path, value)


def _make_plain(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The same memory as a tensor of torch's own types: of other types nothing could be read."""
    if tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
        raise ConfigurationError(
            f"state {path or 'itself'}: expected a dense tensor of plain numbers, found {kind} one"
        )
    plain = tensor.detach()
    if type(plain) is torch.Tensor or isinstance(plain, DTensor):
        return plain
    has_parts = is_traceable_wrapper_subclass(plain)
    if has_parts:
        raise _refuse(path, tensor)
    return plain.as_subclass(torch.Tensor)


def _refuse(path: str, value: object) -> ConfigurationError:
    return ConfigurationError(
        f"state {path or 'itself'}: expected tensors, numbers, strings, bools and None in dicts, "
        f"lists and tuples, found {type(value).__name__}"
    )


def _put_together(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, inside),) = skeleton.items()
    if kind == _TENSOR:
        return tensors[inside]
    if kind == _DICT:
        return {key: _put_together(each, tensors) for key, each in inside}
    parts = [_put_together(each, tensors) for each in inside]
    return tuple(parts) if kind == _TUPLE else parts
