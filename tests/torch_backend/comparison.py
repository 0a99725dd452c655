"""Makes the same calls in a group of Gloo and in one of mpiddp, and compares what they leave.

As a script, every rank prints its transport and the differences:
torchrun --nproc-per-node 2 comparison.py

The inputs are small whole numbers: every sum and product of them is exact in every type, so the
results are compared bit by bit.
"""

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.testing import assert_close

import mpiddp.torch_backend  # noqa: F401 - registers the backend
from mpiddp import describe_collectives

Tensors = list[torch.Tensor]
WAIT = timedelta(seconds=120)
"""Of a group: longer than a busy machine takes for any call."""
EVERY_TYPE = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
FEW_TYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda tensor: tensor, "transposed": lambda tensor: tensor.t().contiguous().t(),
    "strided": lambda tensor: torch.stack([tensor, tensor], 2).flatten(1)[:, ::2],
    "offset": lambda tensor: torch.cat([tensor.new_ones(1), tensor.view(-1)])[1:].view_as(tensor),
}  # fmt: skip
OPERATORS = {name: getattr(dist.ReduceOp, name) for name in (
    "SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG",
)} | {"SCALED": dist._make_nccl_premul_sum(2.0)}  # fmt: skip
GATHER_ONE = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER_ONE = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""By the names that torch gave them in 2.13; it warns of the older ones."""
SHAPES, LONG_SHAPES = ((), (0,), (0, 3)), ((1000,), (400_000,))
"""The long ones: more than fits a mailbox, and several pieces of a message."""


@dataclass(frozen=True)
class Side:
    """One of the two groups, and how calls are made in it."""

    group: Any
    ranks: tuple[int, ...]
    """Of the group, by their numbers in the default group."""
    how: str = "at once"
    """Or how an asynchronous call is waited for."""
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    shape: tuple[int, ...] = (4, 6)
    operator: str = "SUM"

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        return self.ranks.index(dist.get_rank())

    @property
    def is_gloo(self) -> bool:
        return bool(dist.get_backend(self.group) == "gloo")

    def fill(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """An input of this rank: of ``shape``, by default the side's, in its layout and type."""
        sizes = shape or self.shape
        count = torch.Size(sizes).numel()
        whole = torch.arange(count) * 7 + 3 * self.rank + 5 * seed
        if self.dtype is torch.bool:
            values = whole % 3 > 0
        elif self.dtype.is_complex:
            values = torch.complex((whole % 4).double() - 1, (whole % 3).double() - 1)
        else:
            values = whole % 4 - (0 if self.dtype is torch.uint8 else 1)
        flat = values.to(self.dtype).view(sizes)
        # Gloo takes no notice of the strides of some tensors, and leaves a wrong result.
        return LAYOUTS[self.layout](flat) if len(sizes) == 2 and not self.is_gloo else flat

    def room(self, *shape: int) -> torch.Tensor:
        """As ``fill``, for a result: all ones."""
        return torch.ones_like(self.fill(*shape))

    def call(self, function: Callable[..., Any], *values: Any, **options: Any) -> None:
        if self.how == "at once" or self.is_gloo:
            # Gloo's reduce-scatter never says that it is complete, unless it is waited for.
            function(*values, group=self.group, **options)
            return
        work = function(*values, group=self.group, async_op=True, **options)
        if self.how == "future":
            work.get_future().then(lambda future: future.value()).wait()
        elif self.how == "polled" and type(self.group) is not dist.ProcessGroup:
            # If it has backends beside ours, torch stands before the works of all.
            while not work.is_completed():
                time.sleep(0.001)
            work.wait()
        else:
            work.wait(WAIT)

    def reduces(self, function: Callable[..., Any], *values: Any, **options: Any) -> None:
        self.call(function, *values, op=OPERATORS[self.operator], **options)


def all_reduce(side: Side) -> Tensors:
    tensor = side.fill()
    side.reduces(dist.all_reduce, tensor)
    return [tensor]


def reduce(side: Side) -> Tensors:
    tensor, root = side.fill(), side.size - 1
    side.reduces(dist.reduce, tensor, group_dst=root)
    return [tensor] if side.rank == root else []


def reduce_scatter(side: Side) -> Tensors:
    output, inputs = side.room(), [side.fill(seed=seed) for seed in range(side.size)]
    side.reduces(dist.reduce_scatter, output, inputs)
    return [output, *inputs]


def reduce_scatter_uneven(side: Side) -> Tensors:
    output, inputs = side.room(side.rank + 1, 2), [side.fill(n + 1, 2) for n in range(side.size)]
    side.reduces(dist.reduce_scatter, output, inputs)
    return [output, *inputs]


def reduce_scatter_tensor(side: Side) -> Tensors:
    output, source = side.room(2, 3), side.fill(2 * side.size, 3)
    side.reduces(SCATTER_ONE, output, source)
    return [output, source]


def reduce_scatter_into_its_input(side: Side) -> Tensors:
    """Into the first part, which is rank 0's own, and another's on the other ranks."""
    source = side.fill(2 * side.size, 3)
    side.call(SCATTER_ONE, source[:2], source)
    return [source]


def broadcast(side: Side) -> Tensors:
    found = []
    for root in range(side.size):
        tensor = side.fill()
        side.call(dist.broadcast, tensor, group_src=root)
        found.append(tensor)
    return found


def all_gather(side: Side) -> Tensors:
    source, outputs = side.fill(), [side.room() for _ in side.ranks]
    side.call(dist.all_gather, outputs, source)
    return [source, *outputs]


def all_gather_uneven(side: Side) -> Tensors:
    source = side.fill(side.rank + 1, 2)
    outputs = [side.room(rank + 1, 2) for rank in range(side.size)]
    # Gloo's all-gather and all-to-all take tensors of one length.
    side.call(dist.all_gather_object if side.is_gloo else dist.all_gather, outputs, source)
    return [source, *outputs]


def all_gather_into_tensor(side: Side) -> Tensors:
    source, output = side.fill(2, 3), side.room(2 * side.size, 3)
    side.call(GATHER_ONE, output, source)
    within = side.fill(2 * side.size)
    side.call(GATHER_ONE, within, within[2 * side.rank : 2 * side.rank + 2])
    return [source, output, within]


def gather(side: Side) -> Tensors:
    source, root = side.fill(), side.size - 1
    outputs = [side.room() for _ in side.ranks] if side.rank == root else None
    side.call(dist.gather, source, outputs, group_dst=root)
    return [source, *(outputs or [])]


def scatter(side: Side) -> Tensors:
    output, root = side.room(), side.size - 1
    inputs = [side.fill(seed=seed) for seed in range(side.size)] if side.rank == root else None
    side.call(dist.scatter, output, inputs, group_src=root)
    return [output, *(inputs or [])]


def all_to_all_uneven(side: Side) -> Tensors:
    inputs = [side.fill(to + 1, 3) for to in range(side.size)]
    outputs = [side.room(side.rank + 1, 3) for _ in side.ranks]
    if side.is_gloo:
        whole, sizes = torch.cat(outputs), [[*map(len, each)] for each in (outputs, inputs)]
        side.call(dist.all_to_all_single, whole, torch.cat(inputs), *sizes)
        outputs = [*whole.split(side.rank + 1)]
    else:
        side.call(dist.all_to_all, outputs, inputs)
    return [*inputs, *outputs]


def all_to_all_single(side: Side) -> Tensors:
    source = side.fill(2 * side.size, 3)
    output, other = (side.room(2 * side.size, 3) for _ in range(2))
    side.call(dist.all_to_all_single, output, source)
    side.group.alltoall_base(other, source, [], []).wait()
    return [source, output, other]


def all_to_all_split(side: Side) -> Tensors:
    """Rank r sends ``to`` rows to rank ``to``: rank 0 gets nothing."""
    sizes = list(range(side.size))
    source = side.fill(sum(sizes), 3)
    output = side.room(side.rank * side.size, 3)
    side.call(dist.all_to_all_single, output, source, [side.rank] * side.size, sizes)
    return [source, output]


REDUCTIONS = (all_reduce, reduce, reduce_scatter, reduce_scatter_uneven, reduce_scatter_tensor)
MOVES = (
    broadcast, all_gather, all_gather_uneven, all_gather_into_tensor, gather, scatter,
    all_to_all_uneven, all_to_all_single, all_to_all_split,
)  # fmt: skip


def _list_sides(side: Side, *, is_long: bool) -> Iterator[tuple[Callable[[Side], Tensors], Side]]:
    """Each call with its variations: every type, operator, layout, shape and way to wait."""
    types = EVERY_TYPE if is_long else FEW_TYPES
    for dtype, operator in itertools.product(types, OPERATORS):
        calls = REDUCTIONS if is_long or dtype is torch.float32 else (all_reduce, reduce_scatter)
        for call in calls:
            yield call, replace(side, dtype=dtype, operator=operator)
    for dtype, call in itertools.product(types, MOVES):
        yield call, replace(side, dtype=dtype)
    for call, layout in itertools.product(REDUCTIONS, LAYOUTS):
        yield call, replace(side, dtype=torch.int8, layout=layout)
    hows = ("at once", "wait", "future", "polled")
    for how, layout in itertools.product(hows if is_long else hows[::2], LAYOUTS):
        for call in (*REDUCTIONS, *MOVES, reduce_scatter_into_its_input):
            yield call, replace(side, how=how, layout=layout)
    shapes = [*itertools.product(hows, SHAPES), *itertools.product(hows[:1], LONG_SHAPES)]
    for how, shape in shapes:
        for call in (all_reduce, reduce, reduce_scatter, broadcast, all_gather, gather, scatter):
            yield call, replace(side, how=how, shape=shape)


def _take(call: Callable[[Side], Tensors], side: Side) -> Tensors | BaseException:
    try:
        return call(side)
    except (RuntimeError, ValueError, TypeError) as error:
        return error


def _foretell(call: Callable[[Side], Tensors], side: Side) -> Tensors | BaseException:
    """What Gloo leaves; for what it does not do, what it leaves of a call that means the same."""
    if side.operator in ("AVG", "SCALED"):
        return _foretell_scaled(call, side)
    found = _take(call, side)
    if isinstance(found, BaseException) and side.dtype is torch.bfloat16:
        found = _take(call, replace(side, dtype=torch.float64))
        if not isinstance(found, BaseException):
            return [each.to(side.dtype) for each in found]
    return found


def _foretell_scaled(call: Callable[[Side], Tensors], side: Side) -> Tensors | BaseException:
    """A sum, made by an operator that Gloo has, and scaled afterwards."""
    found = _take(call, replace(side, operator="SUM", dtype=torch.float64))
    if isinstance(found, BaseException) or not side.dtype.is_floating_point:
        return ValueError("no average or product of these")
    outputs = 1 if call is not reduce else len(found)
    factor = 2.0 if side.operator == "SCALED" else 1 / side.size
    scaled = [each * factor for each in found[:outputs]] + found[outputs:]
    return [each.to(side.dtype) for each in scaled]


def find_difference(call: Callable[[Side], Tensors], gloo: Side, ours: Side) -> str | None:
    """How the two sides differ; empty if they do not, None if there is nothing to compare with."""
    expected, found = _foretell(call, gloo), _take(call, ours)
    if isinstance(expected, BaseException):
        # More than Gloo can is no error.
        return None
    where = f"{call.__name__} {ours.dtype} {ours.operator} {ours.layout} {ours.shape} {ours.how}"
    if isinstance(found, BaseException):
        return f"{where} on {ours.ranks}: {type(found).__name__}: {found}"
    # An average of three is rounded where it is divided, once or twice.
    error = 2 * torch.finfo(ours.dtype).eps if ours.dtype.is_floating_point else 0.0
    return differ(where, ours, found, expected, error)


def differ(name: str, ours: Side, found: Any, expected: Any, error: float = 0.0) -> str:
    """How what ours has found is not as expected; empty if it is."""
    try:
        assert_close(found, expected, rtol=error, atol=0.0)
    except AssertionError as reason:
        return f"{name} on {ours.ranks}: {reason}"
    return ""


def make_sides(ranks: Sequence[int] | None = None, backend: str = "mpiddp") -> tuple[Side, Side]:
    """Two new groups of these ranks, Gloo's and ours. Collective over all ranks."""
    members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
    groups = [
        dist.new_group(list(members), backend=name, timeout=WAIT) for name in ("gloo", backend)
    ]
    # torch sorts them.
    members = tuple(sorted(members))
    return Side(groups[0], members), Side(groups[1], members)


def close_sides(*sides: Side) -> None:
    for side in sides:
        if dist.get_rank() in side.ranks:
            dist.destroy_process_group(side.group)


def compare_calls(session: Any, is_long: bool, backend: str = "mpiddp") -> tuple[int, list[str]]:
    """Every call in a group of all ranks: how often each is compared, at least; the differences."""
    gloo, ours = make_sides(backend=backend)
    pairs = zip(_list_sides(gloo, is_long=is_long), _list_sides(ours, is_long=is_long), strict=True)
    found = [(call, find_difference(call, one, other)) for (call, one), (_, other) in pairs]
    close_sides(gloo, ours)
    counts = Counter(call for call, each in found if each is not None)
    return min(counts[call] for call, _ in found), [each for _, each in found if each]


def main() -> None:
    dist.init_process_group("gloo")
    differences = compare_calls(None, is_long=False)[1]
    group = dist.new_group(backend="mpiddp", timeout=WAIT)
    transport = describe_collectives(group)["transports"][0]
    print(json.dumps([transport, *differences]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
