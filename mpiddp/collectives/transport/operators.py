"""Memory as elements of a type, and operators on it: in which type, with which library.

NumPy adds if it can, since its calls cost less than torch's. torch adds float16, for which NumPy
has no vector code, bfloat16, which NumPy lacks, and everything on a GPU.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from mpiddp.errors import ConfigurationError

Action = Callable[[], object]
View = Any
"""Part of a buffer: a numpy array, or a torch tensor."""


class Operator(enum.Enum):
    SUM = "sum"
    AVERAGE = "average"
    """The complete sum, divided by the number of contributions."""
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


OPERATORS: dict[Any, str] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "average",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}
"""mpiddp's names of torch's operators."""

_KINDS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float64: np.dtype("f8"),
    torch.float32: np.dtype("f4"),
    torch.int64: np.dtype("i8"),
    torch.int32: np.dtype("i4"),
    torch.float16: np.dtype("u2"),
    torch.bfloat16: np.dtype("u2"),
    torch.uint8: np.dtype("u1"),
}
"""The types as NumPy copies them; bytes are never added."""
NARROW = (torch.float16, torch.bfloat16)
"""Types that torch adds, and in which sums are made only on request."""
TYPES = tuple(dtype for dtype in _KINDS if dtype is not torch.uint8)

_FUNCTIONS: dict[Operator, tuple[np.ufunc, Callable[..., torch.Tensor]]] = {
    Operator.SUM: (np.add, torch.add),
    Operator.AVERAGE: (np.add, torch.add),
    Operator.PRODUCT: (np.multiply, torch.mul),
    Operator.MIN: (np.minimum, torch.minimum),
    Operator.MAX: (np.maximum, torch.maximum),
}
"""NumPy's and torch's."""


def find_operator(name: str) -> Operator:
    """Raises ConfigurationError if there is none."""
    try:
        return Operator(name)
    except ValueError:
        names = ", ".join(each.value for each in Operator)
        raise ConfigurationError(f"no operator is called {name!r}; there are {names}") from None


def name_operator(op: Any) -> Any:
    """mpiddp's name of one of torch's operators; anything else as it is.

    Raises ConfigurationError for an operator that mpiddp lacks.
    """
    if not isinstance(op, ReduceOp | ReduceOp.RedOpType):
        return op
    kind: Any = getattr(op, "op", op)
    if kind not in OPERATORS:
        names = ", ".join(each.name for each in OPERATORS)
        raise ConfigurationError(f"op: expected ReduceOp.{names}, found ReduceOp.{kind.name}")
    return OPERATORS[kind]


def name_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_accumulation(
    operator: Operator, dtype: torch.dtype, wish: torch.dtype | None
) -> torch.dtype:
    """The type in which contributions of type ``dtype`` are added.

    Raises ConfigurationError for a type that cannot be reduced, an average of integers, and a wish
    that is neither the buffer's own type nor a wider floating-point type.
    """
    if dtype not in TYPES:
        names = ", ".join(map(name_type, TYPES))
        raise ConfigurationError(f"expected a tensor of {names}, found {name_type(dtype)}")
    if operator is Operator.AVERAGE and not dtype.is_floating_point:
        raise ConfigurationError(
            f"an average of {name_type(dtype)} is no integer: use sum, or a floating-point tensor"
        )
    # Minimum and maximum round nothing.
    exact = operator in (Operator.MIN, Operator.MAX)
    if wish is None:
        return torch.float32 if dtype in NARROW and not exact else dtype
    wider = dtype.is_floating_point and wish in (torch.float32, torch.float64)
    if wish != dtype and not (wider and wish.itemsize >= dtype.itemsize):
        raise ConfigurationError(
            f"reduction_dtype must be {name_type(dtype)} or a wider floating-point type, "
            f"found {name_type(wish)}"
        )
    return wish


def map_memory(address: int, count: int, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """``count`` elements at ``address`` as a NumPy array; the memory must outlive it."""
    kind = _KINDS[dtype]
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    # NumPy's stub does not know that arrays of ctypes are buffers.
    mapped: np.ndarray[Any, Any] = np.frombuffer(memory, kind)  # type: ignore[call-overload]
    return mapped


@dataclass(frozen=True)
class MemorySpan:
    """Memory at an address, as elements of one type; it does not keep the memory alive."""

    memory: View
    """A numpy array (``map_memory``) on the CPU, a flat tensor on a GPU."""
    dtype: torch.dtype
    owner: object = None
    """An object that keeps the memory alive, if the caller does not."""

    @property
    def address(self) -> int:
        memory = self.memory
        return memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr()

    def slice(self, lo: int, hi: int) -> View:
        """Elements ``lo`` to ``hi``, as they are copied or sent."""
        return self.memory[lo:hi]

    def operand(self, lo: int, hi: int) -> View:
        """Elements ``lo`` to ``hi``, as they are added."""
        part = self.memory[lo:hi]
        if self.dtype in NARROW and isinstance(part, np.ndarray):
            return torch.from_numpy(part.view(np.int16)).view(self.dtype)
        return part


class _GpuMemory:
    """Bytes on a GPU, for libraries that know the CUDA array interface.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3.
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def make_span(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> MemorySpan:
    """The memory of a contiguous tensor, flat; the caller keeps the tensor alive.

    ``dtype``: of the span's elements, by default the tensor's.
    """
    count, dtype = tensor.numel(), dtype or tensor.dtype
    if tensor.device.type == "cpu":
        return MemorySpan(map_memory(tensor.data_ptr(), count, dtype), dtype)
    if count == 0:
        return MemorySpan(torch.empty(0, dtype=dtype, device=tensor.device), dtype)
    memory = _GpuMemory(tensor.data_ptr(), count * dtype.itemsize)
    return MemorySpan(torch.as_tensor(memory, device=tensor.device).view(dtype), dtype)


def allocate(count: int, dtype: torch.dtype, like: MemorySpan) -> MemorySpan:
    """New memory on the device of ``like``; the views of a span keep it alive."""
    if isinstance(like.memory, torch.Tensor):
        return MemorySpan(torch.empty(count, dtype=dtype, device=like.memory.device), dtype)
    memory = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
    return MemorySpan(memory.numpy().view(_KINDS[dtype]), dtype)


def copy(target: View, source: View) -> Action:
    """Copies one view into another of the same type and length."""
    if not isinstance(target, np.ndarray):
        return partial(target.copy_, source)
    if target.size == 0:
        return lambda: None
    # A memoryview is as quick as NumPy for long copies, and starts in a third of the time.
    into, out_of = (memoryview(view.data).cast("B") for view in (target, source))
    return partial(into.__setitem__, slice(None), out_of)


def convert(target: MemorySpan, source: MemorySpan, count: int) -> Action:
    """Copies ``count`` elements into memory of any type."""
    if target.dtype == source.dtype:
        return copy(target.slice(0, count), source.slice(0, count))
    into, out_of = (_as_tensor(span.operand(0, count)) for span in (target, source))
    return partial(into.copy_, out_of)


@dataclass(frozen=True)
class Arithmetic:
    """An operator on buffers of one type, with results made in one type."""

    operator: Operator
    dtype: torch.dtype
    """Of the buffers that are added and sent."""
    accumulation: torch.dtype
    """In which several contributions are added before the result is rounded to ``dtype``."""
    contributions: int
    """By which an average divides."""

    @property
    def widens(self) -> bool:
        """Whether every result needs a workspace of a wider type."""
        return self.accumulation != self.dtype

    def needs_workspace(self, own: int | None, operands: int) -> bool:
        """Whether ``reduce`` needs one; ``own``: position of the own operand, if it is one."""
        return self.widens or (own is not None and own >= 2 and operands > 2)

    def reduce(
        self, out: View, operands: Sequence[View], own: int | None, final: bool, workspace: View
    ) -> list[Action]:
        """Combines the operands, from the left, into ``out``; divides if the result is final.

        Args:
            out: for the result; operand number ``own`` is the same memory.
            workspace: as long as ``out``, of type ``accumulation``; see ``needs_workspace``.
        """
        if len(operands) == 1 and not self.widens:
            actions = [] if own == 0 else [copy(out, operands[0])]
        elif self.widens:
            return self._reduce_wide(out, operands, final, workspace)
        else:
            actions = self._chain(out, operands, own, workspace)
        return actions + self._divide(out, final)

    def _chain(
        self, out: View, operands: Sequence[View], own: int | None, workspace: View
    ) -> list[Action]:
        combine, function = _FUNCTIONS[self.operator]
        actions: list[Action] = []
        # ``out`` may be written once own's value in it has been used.
        total = operands[0]
        for place, operand in enumerate(operands[1:], 1):
            target = workspace if own is not None and own > place else out
            if isinstance(out, np.ndarray) and combine in (np.add, np.multiply):
                # By position it takes two thirds of the time; the others want it by name.
                actions.append(partial(combine, total, operand, target))
            elif isinstance(out, np.ndarray):
                actions.append(partial(combine, total, operand, out=target))
            else:
                actions.append(partial(function, total, operand, out=target))
            total = target
        return actions

    def _reduce_wide(
        self, out: View, operands: Sequence[View], final: bool, workspace: View
    ) -> list[Action]:
        views = [_as_tensor(view) for view in (workspace, out, *operands)]
        wide, result, first, *others = views
        _, function = _FUNCTIONS[self.operator]
        actions: list[Action] = [partial(wide.copy_, first)]
        actions += [partial(function, wide, other, out=wide) for other in others]
        return [*actions, *self._divide(wide, final), partial(result.copy_, wide)]

    def _divide(self, view: View, final: bool) -> list[Action]:
        if self.operator is not Operator.AVERAGE or not final or self.contributions == 1:
            return []
        if isinstance(view, np.ndarray):
            return [partial(np.divide, view, self.contributions, out=view)]
        return [partial(view.div_, self.contributions)]


def _as_tensor(view: View) -> torch.Tensor:
    return torch.from_numpy(view) if isinstance(view, np.ndarray) else view
