"""Functions, arguments and results as bytes, with the contents of tensors beside them.

Functions of ``__main__`` and of notebooks go by value (cloudpickle), those of other modules by
name. The contents of CPU tensors and numpy arrays are not copied into the pickle (PEP 574).
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

PROTOCOL = 5
SMALL_BYTES = 1 << 12
"""Contents up to this size are copied into the pickle: a buffer of its own takes longer."""


def _reduce_code(code: CodeType) -> Any:
    """Add the file's name, which cloudpickle leaves out: tracebacks need it."""
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
        if torch is not None and type(value) is torch.UntypedStorage and value.device.type == "cpu":
            return _rebuild_storage, (pickle.PickleBuffer(_view_storage(torch, value)),)
        if isinstance(value, BaseException) and type(value).__reduce__ is BaseException.__reduce__:
            content = type(value), value.args
            return _rebuild_error, content, value.__dict__ or None, None, None, _set_attributes
        return super().reducer_override(value)


def _rebuild_error(kind: Any, arguments: tuple[Any, ...]) -> BaseException:
    """Make an exception without its own ``__init__``, whose arguments may differ from ``args``."""
    base = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    error: BaseException = base.__new__(kind, *arguments)
    base.__init__(error, *arguments)
    return error


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    """Move a tensor to the CPU, without the rest of a storage if it is a small part of it.

    Tensors that share a storage share it again, unless they have less than half of it.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.__reduce_ex__(PROTOCOL)
    if tensor.device.type == "meta":
        return tensor.__reduce_ex__(PROTOCOL)
    moved = tensor.detach().cpu().resolve_conj().resolve_neg()
    if 2 * moved.numel() * moved.element_size() <= moved.untyped_storage().nbytes():
        moved = moved.clone()
    place = moved.storage_offset(), tuple(moved.shape), moved.stride()
    content = type(tensor), moved.untyped_storage(), moved.dtype, place, tensor.requires_grad
    return _rebuild_tensor, content, tensor.__dict__ or None, None, None, _set_attributes


def _rebuild_tensor(kind: Any, storage: Any, dtype: Any, place: Any, needs_grad: bool) -> Any:
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, *place)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, needs_grad)
    return tensor.requires_grad_(needs_grad)


def _set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Set them directly: the class may refuse assignments, as a frozen dataclass does."""
    value.__dict__.update(attributes)


def _view_storage(torch: Any, storage: Any) -> Any:
    """Its bytes, as a numpy array that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def _rebuild_storage(buffer: Any) -> Any:
    import torch

    view = memoryview(buffer)
    if not view.nbytes:
        return torch.UntypedStorage(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def dump(value: Any) -> tuple[bytes, tuple[memoryview, ...]]:
    """A pickle, and the contents of tensors and arrays in the order in which it refers to them.

    Those are the objects' own memory, which must not change before it is sent. Raises whatever the
    pickling of ``value`` raises.
    """
    buffers: list[memoryview] = []

    def add(buffer: pickle.PickleBuffer) -> bool:
        """Whether it is copied into the pickle."""
        content = buffer.raw()
        if content.nbytes > SMALL_BYTES:
            buffers.append(content)
        return content.nbytes <= SMALL_BYTES

    with io.BytesIO() as file:
        _Pickler(file, PROTOCOL, buffer_callback=add).dump(value)
        return file.getvalue(), tuple(buffers)


class ResultUnpickler(pickle.Unpickler):
    """Keeps this process's own classes unchanged if the pickle holds them by value as well.

    cloudpickle would set their attributes to those of the rank: methods would no longer see the
    variables of this process.
    """

    def __init__(self, body: bytes, buffers: Sequence[memoryview]) -> None:
        super().__init__(io.BytesIO(body), buffers=buffers)
        self._own = set(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found is cloudpickle.cloudpickle._class_setstate:
            return lambda kind, state: kind if kind in self._own else found(kind, state)
        return found


def load(body: bytes, buffers: Sequence[memoryview] = ()) -> Any:
    """The object. Its tensors and arrays use the memory of ``buffers``.

    Raises whatever the unpickling raises. Only for what has come from a process that knows the
    token.
    """
    return pickle.loads(body, buffers=buffers)


def describe_function(function: Callable[..., Any]) -> str:
    """The name by which messages call a function."""
    while isinstance(function, functools.partial):
        function = function.func
    named = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(named or type(function).__qualname__)
