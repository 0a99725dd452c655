"""Calls that have no type or operator: messages, objects, barriers, calls made together, futures.

Each function returns what must be equal in a group of Gloo and in one of mpiddp.
"""

import contextlib
import gc
import socket
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch
from comparison import GATHER_ONE, SCATTER_ONE, Side, close_sides, differ, make_sides
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from mpiddp.torch_backend import members
from mpiddp.torch_internals import fill


def send_and_receive(side: Side) -> list[Any]:
    """A ring in which rank 0 sends first; the tag tells two messages apart."""
    after, before = (side.rank + 1) % side.size, (side.rank - 1) % side.size
    if side.size == 1:
        return []
    sent, got = [side.fill(seed=1), side.fill(3, seed=2)], [side.room(), side.room(3)]
    for is_first in (True, False):
        if (side.rank == 0) == is_first:
            for tag, tensor in enumerate(sent):
                dist.send(tensor, group=side.group, group_dst=after, tag=tag)
        if is_first:
            who = [dist.recv(each, None, side.group, tag, before) for tag, each in enumerate(got)]
    return [*got, *who, *sent]


def together(side: Side) -> list[Any]:
    """What a manager of coalesced calls collects; Gloo makes such calls one by one."""
    tensors = [side.fill(seed=seed) for seed in range(4)]
    outputs = [side.room(2 * side.size) for _ in range(3)]
    sources = [side.fill(2, seed=seed) for seed in range(3)]
    parts = [side.room(2) for _ in range(3)]
    wholes = [side.fill(2 * side.size, seed=seed) for seed in range(3)]

    @contextlib.contextmanager
    def together_in(waits: bool) -> Iterator[None]:
        manager = dist._coalescing_manager(side.group, async_ops=not waits)
        with contextlib.nullcontext() if side.is_gloo else manager as works:
            yield
        if works and not waits:
            works.wait()

    with together_in(waits=False):
        for tensor in tensors:
            dist.all_reduce(tensor, group=side.group)
    with together_in(waits=True):
        for output, source in zip(outputs, sources, strict=True):
            GATHER_ONE(output, source, group=side.group)
    with together_in(waits=False):
        for part, whole in zip(parts, wholes, strict=True):
            SCATTER_ONE(part, whole, group=side.group)
    options = fill(dist.BroadcastOptions(), asyncOp=False)
    for several in [sources[:1], sources[1:2]] if side.is_gloo else [sources[:2]]:
        side.group.broadcast(several, options).wait()
    return [*tensors, *outputs, *parts, *sources]


def in_the_middle_of_autograd(side: Side) -> list[Any]:
    """Functional collectives, whose results are waited for when they are used."""
    # torch 2.13 gave some of them other names.
    warnings.simplefilter("ignore", FutureWarning)
    group, size = side.group, side.size
    tensor = side.fill()
    found: list[Any] = [
        functional.all_reduce(tensor, "sum", group) + 1,
        functional.all_reduce(tensor[1:3, 2:], "max", group) * 2,
        functional.all_gather_tensor(tensor, 0, group) + 1,
        functional.all_gather_tensor(tensor, 1, group) + 1,
        functional.reduce_scatter_tensor(side.fill(2 * size, 3), "sum", 0, group) + 1,
        functional.broadcast(tensor, size - 1, group) + 1,
        functional.all_to_all_single(side.fill(size, 3), None, None, group) + 1,
    ]
    found.append(functional.wait_tensor(functional.all_reduce(tensor.t(), "sum", group)).t()[1:])
    leaf = side.fill().requires_grad_()
    functional.all_gather_tensor_autograd(leaf, 0, group).square().sum().backward()
    several = []
    for wanted in (side.dtype, torch.int8):
        parts = [side.fill(n).to(wanted) for n in (3, 4)]
        several += functional.all_reduce_coalesced(parts, "sum", group)
    gathered = functional.all_gather_into_tensor_coalesced([side.fill(3), side.fill(4)], group)
    return [*found, leaf.grad, tensor, *(each + 0 for each in (*several, *gathered))]


def beside_a_callback(side: Side) -> list[Any]:
    """Calls of callbacks, for which the program does not wait before its next call."""
    found = []
    for number in range(20):
        first, second, third = (side.fill(500, seed=seed) for seed in range(3))
        # The ranks come to the third call before the first one ends, or afterwards.
        time.sleep(0.001 * ((number + side.rank) % 2))
        if side.is_gloo:
            for tensor in (first, second, third):
                dist.all_reduce(tensor, group=side.group)
        else:
            work = dist.all_reduce(first, group=side.group, async_op=True)
            follow = partial(dist.all_reduce, second, group=side.group)
            future = work.get_future().then(lambda _, follow=follow: follow())
            time.sleep(0.001 * ((number + side.rank) % 3 == 0))
            dist.all_reduce(third, group=side.group)
            future.wait()
        found += [first, second, third]
    return found


def forgotten_works(side: Side) -> list[Any]:
    """Nobody waits for these; a call that comes later, and is waited for, ends after them."""
    tensors = [side.fill(1000, seed=seed) for seed in range(20)]
    for tensor in tensors[:10]:
        dist.all_reduce(tensor, group=side.group, async_op=True)
    for tensor in tensors[10:]:
        dist.broadcast(tensor, group=side.group, group_src=0, async_op=True)
    # What was just made; a pool's rank has much that is old.
    gc.collect(1)
    dist.barrier(group=side.group)
    last = side.fill()
    dist.all_reduce(last, group=side.group)
    return [last, *tensors]


def beside_autograd(side: Side) -> list[Any]:
    """Calls in inference mode, into leaves, and on what a backward pass needs afterwards."""
    size, group = side.size, side.group
    with torch.inference_mode():
        rows = [side.room() for _ in range(size)]
        dist.all_gather(rows, side.fill(), group=group, async_op=True).wait()
    leaves = [side.room().requires_grad_() for _ in range(size)]
    with torch.no_grad():
        sources = [side.fill(seed=seed) for seed in range(size)]
        work = dist.all_to_all(leaves, sources, group=group, async_op=True)
    # Whoever makes the call need not be in that mode.
    work.wait()
    leaf, part = side.fill(size, 3).requires_grad_(), side.room(1, 3)
    whole = leaf * 2
    square = whole.square().sum()
    with torch.no_grad():
        SCATTER_ONE(part, whole, group=group)
    square.backward()
    return [*rows, *(each.detach() for each in leaves), part, leaf.grad, whole._version]


CALLS = (
    send_and_receive, together, in_the_middle_of_autograd, beside_a_callback,
    forgotten_works, beside_autograd,
)  # fmt: skip
"""Messages and barriers of all kinds are left to torch's own tests."""


def _compare(gloo: Side, ours: Side) -> list[str]:
    compared = [differ(call.__name__, ours, call(ours), call(gloo)) for call in CALLS]
    return [each for each in compared if each]


def compare_messages(session: Any, backend: str = "mpiddp") -> list[str]:
    """The calls of this module in a group of all ranks; the differences."""
    gloo, ours = make_sides(backend=backend)
    differences = _compare(gloo, ours)
    close_sides(gloo, ours)
    return differences


def compare_messages_through_gloo(session: Any) -> list[str]:
    """The same of ranks that have no MPI, and each of which takes itself for a node."""
    with (
        mock.patch.object(members, "find_session", return_value=None),
        mock.patch.object(socket, "gethostname", return_value=f"node{dist.get_rank()}"),
    ):
        return compare_messages(session)


def list_groups(size: int) -> list[tuple[int, ...]]:
    """One rank alone, two that overlap in one, all in reversed order, and the even ranks."""
    everybody = tuple(range(size))
    found = [(size - 1,), everybody[:2], everybody[1:], everybody[::-1], everybody[::2]]
    return [ranks for ranks in dict.fromkeys(found) if ranks]


def compare_groups(session: Any) -> list[str]:
    """The calls of this module in groups that overlap; each group waits for its ranks alone."""
    pairs = [make_sides(ranks) for ranks in list_groups(dist.get_world_size())]
    mine = [pair for pair in pairs if dist.get_rank() in pair[0].ranks]
    differences = [each for gloo, ours in mine for each in _compare(gloo, ours)]
    for pair in mine:
        close_sides(*pair)
    return differences


def compare_threads(session: Any, rounds: int, name: str) -> list[str]:
    """Several groups at once, each used by a thread of its own; calls of every length.

    ``name``: of the tensors' type. Bytes are added by Gloo, other types by mpiddp.
    """
    pairs = [make_sides(ranks) for ranks in list_groups(dist.get_world_size())]
    mine = [ours for _, ours in pairs if dist.get_rank() in ours.ranks]
    differences: list[str] = []
    dtype = getattr(torch, name)

    def work(place: int, side: Side) -> None:
        # The ranks begin with different groups.
        time.sleep(0.2 * ((place + dist.get_rank()) % len(mine)))
        for number in range(rounds):
            tensor = torch.full((1 + 997 * (number % 7),), side.rank + number % 5, dtype=dtype)
            dist.all_reduce(tensor, group=side.group)
            total = sum(rank + number % 5 for rank in range(side.size))
            if not torch.equal(tensor, torch.full_like(tensor, total)):
                differences.append(f"{side.ranks}, round {number}: {tensor[:4]}, not {total}")

    # If they wait for each other, each call ends with an error after the group's timeout.
    with ThreadPoolExecutor(len(mine)) as pool:
        list(pool.map(work, range(len(mine)), mine))
    for pair in pairs:
        close_sides(*pair)
    return differences
