"""What torch passes to a group: tensors, operators, and whether the caller waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from mpiddp.collectives.transport import operators
from mpiddp.collectives.transport.operators import TYPES
from mpiddp.torch_internals import find_scale

Tensors = list[torch.Tensor]
Operators = distributed.ReduceOp
OPERATORS = {**operators.OPERATORS, Operators.PREMUL_SUM: "sum"}
"""mpiddp's names of torch's operators."""
ADDED = frozenset(TYPES)
GLOO_TYPES = (*TYPES, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)
"""Types that have sums: mpiddp adds TYPES, Gloo the others."""


@dataclass(frozen=True)
class Reduction:
    """An operator of a call."""

    operator: Any
    """torch's."""
    name: str
    """mpiddp's; empty if it has none."""
    factor: Any = None
    """By which a PREMUL_SUM multiplies first, a number or a tensor."""

    def can_add(self, tensors: Tensors) -> bool:
        """Whether mpiddp's schedules can; Gloo is asked if not."""
        for tensor in tensors:
            dtype = tensor.dtype
            if not self.name or dtype not in ADDED or tensor.layout is not torch.strided:
                return False
            if self.name == "average" and not dtype.is_floating_point:
                return False
        return True

    def scale(self, flat: torch.Tensor) -> None:
        """Multiply by the factor, in place."""
        if self.factor is not None:
            flat.mul_(self.factor)

    def check_for_gloo(self, tensors: Tensors) -> None:
        """Raise DistBackendError for what neither mpiddp nor Gloo computes."""
        kind = getattr(self.operator, "op", self.operator)
        for tensor in tensors:
            if tensor.dtype not in GLOO_TYPES or kind in (Operators.AVG, Operators.PREMUL_SUM):
                what = f"{kind.name} of {tensor.dtype}"
                raise make_error(f"{what}, which neither mpiddp nor Gloo computes")


_REDUCTIONS = {
    hash(Operators(kind)): Reduction(kind, OPERATORS.get(kind, ""))
    for kind in Operators.RedOpType.__members__.values()
    if kind != Operators.PREMUL_SUM
}
"""By the hash of a ReduceOp, which is its kind's hash: to ask for the kind takes four times as
long."""
_KINDS = (Operators, Operators.RedOpType)


def find_reduction(operator: Any) -> Reduction:
    """Of a ReduceOp, or of one of its kinds."""
    found = _REDUCTIONS.get(hash(operator))
    return found or Reduction(operator, "sum", find_scale(operator))


class Flat:
    """A tensor's elements in one row: its own memory if it is contiguous, else a copy of them."""

    def __init__(self, tensor: torch.Tensor, *, keeps: bool = True) -> None:
        """``keeps``: the call reads what is in it."""
        self._tensor = tensor.detach()
        self._is_own = self._tensor.is_contiguous()
        if self._is_own:
            self._flat = self._tensor.view(-1)
        elif keeps:
            # Not reshape(): of a strided tensor that may be a view with strides.
            self._flat = self._tensor.contiguous().view(-1)
        else:
            self._flat = self._tensor.new_empty(tensor.numel())

    def __enter__(self) -> torch.Tensor:
        return self._flat

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and not self._is_own:
            self._tensor.copy_(self._flat.view(self._tensor.shape))


def list_tensors(tensors: Any, *, dense: bool = True) -> Tensors:
    """torch passes a list, or one tensor; each is checked."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in found:
        check_tensor(tensor)
        if dense and tensor.layout is not torch.strided:
            raise make_error(f"a tensor of layout {tensor.layout}, and needs a dense one")
    return found


def flatten(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in flatten(each)]
    return []


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether its elements are not in one row; a sparse tensor's are Gloo's matter."""
    return tensor.layout is torch.strided and not tensor.is_contiguous()


def copy_contiguous(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous()
    return [*map(copy_contiguous, value)] if isinstance(value, list | tuple) else value


def check_tensor(tensor: torch.Tensor) -> None:
    if not tensor.is_cpu:
        raise make_error(
            f"a tensor on {tensor.device}, and backend mpiddp works on CPU tensors: make a "
            'group for GPUs, new_group(backend="nccl"); torch 2.14 has "cpu:mpiddp,cuda:nccl"'
        )


def make_error(what: str) -> Exception:
    return distributed.DistBackendError(f"mpiddp: this call has {what}")


def read_options(opts: Any, options: dict[str, Any]) -> tuple[Reduction, bool]:
    """The operator, and whether the caller waits for the call at once."""
    if isinstance(opts, _KINDS):
        return find_reduction(opts), False
    operator = options["op"] if "op" in options else getattr(opts, "reduceOp", Operators.SUM)
    return find_reduction(operator), is_waited_for(opts)


def is_waited_for(opts: Any) -> bool:
    """Whether the caller waits for the call at once; C++ never says so."""
    return not getattr(opts, "asyncOp", True)


def find_root(opts: Any, options: dict[str, Any]) -> int:
    """The group's rank that a call goes from or to."""
    if isinstance(opts, int):
        return opts
    root: int = options.get("root", getattr(opts, "rootRank", 0))
    return root
