"""How tensors lie in memory, beyond their values: strides, and which of them share memory.

Tensors that share memory, and those whose elements do, are stored as that memory, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

TENSOR = "tensor"
"""The name of what is stored; it is all that is said of a contiguous tensor."""
STRIDES = "strides"
"""In elements; said of others."""
OFFSET, SHAPE, DTYPE, CONJUGATE, NEGATIVE = "offset", "shape", "dtype", "conjugate", "negative"
"""Said of a part of stored memory, which begins after so many bytes, and how it is read."""
ALIGNMENT = 16
"""Bytes of the largest number."""


def describe(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors to store, and how each of ``tensors`` lies in them. Nothing is copied.

    A sharded tensor is stored as it is.
    """
    stored, said = dict[str, torch.Tensor](), dict[str, dict[str, Any]]()
    for names in _group_by_memory(tensors):
        first, group = tensors[names[0]], [tensors[name] for name in names]
        if isinstance(first, DTensor) or _are_one(group):
            stored[names[0]] = first
            about = {} if _is_usual(first) else {STRIDES: list(first.stride())}
            for name in names:
                said[name] = {TENSOR: names[0], **about}
            continue
        begin = min(_find_range(each)[0] for each in group) // ALIGNMENT * ALIGNMENT
        end = max(_find_range(each)[1] for each in group)
        stored[names[0]] = _view(first.untyped_storage(), torch.uint8, begin, (end - begin,), (1,))
        said |= {
            name: {TENSOR: names[0], **_describe_part(each, begin)}
            for name, each in zip(names, group, strict=True)
        }
    return stored, said


def make(said: Mapping[str, Any], stored: torch.Tensor) -> torch.Tensor:
    """The tensor that ``describe`` has described, made from what was stored.

    Raises ValueError if that has too few bytes.
    """
    if OFFSET in said:
        return _make_part(said, stored)
    if STRIDES not in said or isinstance(stored, DTensor):
        return stored
    return torch.empty_strided(stored.shape, said[STRIDES], dtype=stored.dtype).copy_(stored)


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an expanded tensor that have memory of their own."""
    for place, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(place, 0, min(1, tensor.shape[place]))
    return tensor


def _group_by_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names of tensors that share memory, in the order of their first ones."""
    places: dict[tuple[torch.device, int], list[str]] = {}
    for name, each in tensors.items():
        # The address is 0 if a tensor is empty, or has no memory here.
        address = 0 if isinstance(each, DTensor) else each.untyped_storage().data_ptr()
        if address:
            places.setdefault((each.device, address), []).append(name)
        else:
            yield [name]
    for names in places.values():
        yield from _split_apart(names, tensors) if len(names) > 1 else [names]


def _split_apart(names: list[str], tensors: Mapping[str, torch.Tensor]) -> Iterable[list[str]]:
    """Of tensors in one storage, those that share a part of it."""
    ranges = sorted((*_find_range(tensors[name]), number) for number, name in enumerate(names))
    groups, last = list[list[int]](), 0
    for begin, end, number in ranges:
        if begin >= last:
            groups.append([])
        groups[-1].append(number)
        last = max(last, end)
    return [[names[number] for number in sorted(group)] for group in groups]


def _find_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Where it begins and ends in its storage, in bytes."""
    begin = tensor.storage_offset() * tensor.itemsize
    return int(begin), int(begin + _measure(tensor.shape, tensor.stride()) * tensor.itemsize)


def _measure(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from the first to the last one, of a tensor that has some."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _are_one(group: list[torch.Tensor]) -> bool:
    """Whether they are one and the same tensor, with memory for each of its elements."""
    first = group[0]
    if first.is_conj() or first.is_neg():
        return False
    if not first.is_contiguous() and _measure(first.shape, first.stride()) < first.numel():
        return False
    return all(_identify(each) == _identify(first) for each in group[1:])


def _identify(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return *kind, tensor.storage_offset(), tensor.shape, tensor.stride()


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether its strides are those of a new tensor, those of dimensions of one element too."""
    if isinstance(tensor, DTensor):
        return True
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(1, size)
    return True


def _describe_part(tensor: torch.Tensor, begin: int) -> dict[str, Any]:
    said = {
        OFFSET: _find_range(tensor)[0] - begin,
        SHAPE: list(tensor.shape),
        STRIDES: list(tensor.stride()),
        DTYPE: str(tensor.dtype).removeprefix("torch."),
    }
    flags = {CONJUGATE: tensor.is_conj(), NEGATIVE: tensor.is_neg()}
    return said | {name: True for name, is_set in flags.items() if is_set}


def _make_part(said: Mapping[str, Any], memory: torch.Tensor) -> torch.Tensor:
    dtype, shape, strides = getattr(torch, said[DTYPE], None), said[SHAPE], said[STRIDES]
    begin = memory.storage_offset() + said[OFFSET]
    storage = memory.untyped_storage()
    if not isinstance(dtype, torch.dtype) or (
        begin + _measure(shape, strides) * dtype.itemsize > storage.nbytes()
    ):
        raise ValueError(f"{memory.numel()} bytes hold no tensor of {said}")
    tensor = _view(storage, dtype, begin, shape, strides)
    tensor = torch._neg_view(tensor) if NEGATIVE in said else tensor
    return tensor.conj() if CONJUGATE in said else tensor


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, begin: int, shape: Any, strides: Any
) -> torch.Tensor:
    """A tensor in a storage, from so many bytes on."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, begin // tensor.itemsize, shape, strides)
