"""Functions, arguments and results as bytes, with the contents of tensors beside them.

Functions of ``__main__`` and of notebooks go by value (cloudpickle), those of other modules by
name. The contents of CPU tensors and numpy arrays are not copied into the pickle (PEP 574).
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

PROTOCOL = 5


@dataclass(frozen=True)
class Pickled:
    """An object as bytes."""

    body: bytes
    buffers: tuple[memoryview, ...] = field(default=(), repr=False)
    """Contents of its tensors and arrays, in the order in which the body refers to them. They are
    the objects' own memory, which must not change before they are sent."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.body) + sum(buffer.nbytes for buffer in self.buffers)


def _reduce_code(code: CodeType) -> Any:
    """With its file's name, which cloudpickle leaves out: tracebacks need it."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _rebuild_code, (make, arguments, code.co_filename)


def _rebuild_code(make: Callable[..., CodeType], arguments: Any, file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Has the contents of tensors go beside the pickle, as those of numpy arrays do."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
            return _reduce_tensor(torch, value)
        if torch is not None and isinstance(value, torch.storage.TypedStorage):
            return _rebuild_typed_storage, (value._untyped_storage, value.dtype)
        if torch is not None and type(value) is torch.UntypedStorage and value.device.type == "cpu":
            return _rebuild_storage, (pickle.PickleBuffer(_view_storage(torch, value)),)
        return super().reducer_override(value)


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    """On the CPU, and without the rest of a storage of which it is a part."""
    moved = tensor
    if tensor.layout is torch.strided and tensor.device.type != "meta":
        if tensor.device.type != "cpu":
            moved = tensor.detach().cpu()
        elif 2 * tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes():
            moved = tensor.detach().clone()
    if moved is tensor:
        return tensor.__reduce_ex__(PROTOCOL)
    if isinstance(tensor, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad).__reduce_ex__(PROTOCOL)


def _view_storage(torch: Any, storage: Any) -> Any:
    """Its bytes, as a numpy array that shares its memory."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _rebuild_storage(buffer: Any) -> Any:
    import torch

    view = memoryview(buffer)
    if not view.nbytes:
        return torch.UntypedStorage(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def _rebuild_typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def dump(value: Any) -> Pickled:
    """Raises whatever the pickling of ``value`` raises."""
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        _Pickler(file, PROTOCOL, buffer_callback=buffers.append).dump(value)
        return Pickled(file.getvalue(), tuple(buffer.raw() for buffer in buffers))


def load(body: bytes, buffers: Sequence[memoryview] = ()) -> Any:
    """The object. Its tensors and arrays use the memory of ``buffers``.

    Raises whatever the unpickling raises. Only for what has come from a process that knows the
    token.
    """
    return pickle.loads(body, buffers=buffers)


def describe_function(function: Callable[..., Any]) -> str:
    """The name by which messages call a function."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    named = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(named or type(function).__qualname__)
