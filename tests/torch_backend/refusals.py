"""Wrong calls of a group, which stays usable; how groups begin and end beside one another."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from comparison import GATHER_ONE, SCATTER_ONE, WAIT, close_sides, make_sides
from torch import distributed as dist

from mistakes import hear
from mpiddp.lifeline.stacks.flight_recorder import read_record
from mpiddp.torch_backend import gloo_calls, make_group, members

SHORT = timedelta(seconds=0.5)
CHANGE_TIMEOUT = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def list_mistakes(group: Any) -> dict[str, tuple[Callable[[], object], str]]:
    """A call, and a pattern that its message has."""
    size = dist.get_world_size()
    after = (dist.get_rank() + 1) % size
    one, meta = torch.ones(4), torch.ones(4, device="meta")
    whole, sparse = torch.ones(4 * size, device="meta"), torch.eye(3).to_sparse()
    on_cpus = "a tensor on meta, and backend mpiddp works on CPU tensors"
    nobody = "which neither mpiddp nor Gloo computes"
    made: list[tuple[str, Callable[..., object], str]] = [
        ("device, sum", partial(dist.all_reduce, meta), on_cpus),
        ("device, send", partial(dist.send, meta, group_dst=after), on_cpus),
        ("device, all-gather", partial(GATHER_ONE, whole, meta), on_cpus),
        ("device, reduce-scatter", partial(SCATTER_ONE, meta, whole), on_cpus),
        ("device, broadcast", partial(dist.broadcast, meta, group_src=0), on_cpus),
        ("int16", partial(dist.all_reduce, one.short()), f"SUM of torch.int16, {nobody}"),
        ("average of integers", partial(dist.all_reduce, one.long(), dist.ReduceOp.AVG),
         f"AVG of torch.int64, {nobody}"),
        ("sparse", partial(dist.broadcast, sparse, group_src=0), "layout torch.sparse_coo"),
        ("sizes", partial(GATHER_ONE, torch.ones(1), one),
         f"a tensor of 1 torch.float32 for {size} × 4"),
        ("parts", partial(SCATTER_ONE, torch.ones(99), one), f"for {size} × 99"),
        ("length of a list", partial(dist.all_gather, [one], one), f"1 tensors for {size} ranks"),
        ("room in a list", partial(dist.all_gather, [torch.ones(3)] * size, one),
         "4 elements, and 3 in this rank's list"),
        ("root", partial(dist.broadcast, one, group_src=size), "src|root|roup rank"),
    ]  # fmt: skip
    return {name: (partial(call, group=group), pattern) for name, call, pattern in made}


def make_mistakes(session: Any) -> tuple[dict[str, tuple[str, str]], float]:
    """By mistake the error and its pattern; a sum that is made afterwards."""
    sides = make_sides()
    group = sides[1].group
    mistakes = list_mistakes(group).items()
    found = {name: (hear(call), pattern) for name, (call, pattern) in mistakes}
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    close_sides(*sides)
    return found, total.sum().item()


def make_different_calls(session: Any) -> list[str]:
    """What a rank is told of calls whose types differ: all ranks have as many bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.ones(4, dtype=torch.int32 if rank else torch.float32)
    said = []
    for call in (
        lambda group: dist.all_gather([torch.empty_like(mine)] * size, mine, group=group),
        lambda group: GATHER_ONE(mine.new_empty(4 * size), mine, group=group),
        lambda group: dist.broadcast(mine, group_src=0, group=group),
        lambda group: dist.broadcast(mine, group_src=0, group=group, async_op=True).wait(),
    ):
        sides = make_sides()
        said.append(hear(partial(call, sides[1].group)))
        dist.barrier()
        close_sides(*sides)
    return said


def make_again(session: Any) -> list[float]:
    """Groups of one name in one store, each after the one before is destroyed; their sums."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store, sums = dist.PrefixStore("again", dist.distributed_c10d._get_default_store()), []
    for number in range(3):
        asked = SimpleNamespace(
            store=store, group_rank=rank, group_size=size, global_ranks_in_group=[],
            timeout=WAIT, group_id="again",
        )  # fmt: skip
        group = make_group(asked)
        for dtype in (torch.float32, torch.uint8):
            tensor = torch.full((5000,), rank + number, dtype=dtype)
            # The other rank finds what this one wrote for the group before, if anything.
            time.sleep(0.3 * (rank == number % 2))
            group.allreduce([tensor]).wait()
            sums.append(tensor.double().mean().item())
        for _ in range(2):
            group.monitored_barrier()
        group.shutdown()
    return sums


def change_timeouts(session: Any) -> list[str]:
    """What a rank is told that waits for one which does not come, after the timeout was changed."""
    said, groups = [], []
    for setting in (CHANGE_TIMEOUT, lambda seconds, group: group.set_timeout(seconds)):
        group = make_sides()[1].group
        groups.append(group)
        for dtype in (torch.float32, torch.int8):
            dist.all_reduce(torch.ones(3, dtype=dtype), group=group)
        setting(SHORT, group)
        if dist.get_rank() == 0:
            for dtype in (torch.float32, torch.int8):
                tensor = torch.ones(3, dtype=dtype)
                said.append(hear(partial(dist.all_reduce, tensor, group=group)))
    # The ranks are at different calls of these groups.
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)
    return said


def list_ranges(session: Any) -> list[tuple[str, object]]:
    """What torch's profiler shows of two calls: names, and whether they were asynchronous.

    And what is told of them and a third one where ranks hang: names and shapes.
    """
    sides = make_sides()
    tensor = torch.ones(9)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(tensor, group=sides[1].group)
        dist.broadcast(tensor, group_src=0, group=sides[1].group, async_op=True).wait()
    dist.all_reduce(tensor, group=sides[1].group)
    told = [each for each in read_record() if each.backend == "mpiddp" and each.is_complete]
    close_sides(*sides)
    events = profiler.events() or []
    shown = [(each.name, each.is_async) for each in events if each.name.startswith("mpiddp:")]
    return [*shown, *((each.name, each.shapes) for each in told)]


def talk_in_two_threads(session: Any) -> list[float]:
    """The first messages of a group, one in each thread, and how many backends they opened."""
    _, ours = sides = make_sides()

    def open_slowly(*values: Any) -> Any:
        time.sleep(0.3)
        return members.open_gloo(*values)

    def talk(tag: int) -> float:
        tensor = torch.full((1,), 1.0 + tag + 2 * ours.rank)
        if (ours.rank + tag) % 2:
            dist.send(tensor, group=ours.group, group_dst=1 - ours.rank, tag=tag)
        else:
            dist.recv(tensor, group=ours.group, group_src=1 - ours.rank, tag=tag)
        return tensor.item()

    opening = mock.patch.object(gloo_calls, "open_gloo", side_effect=open_slowly)
    with opening as opened, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(talk, range(2)))
    close_sides(*sides)
    return [*found, opened.call_count]


def come_late(session: Any) -> tuple[str, float]:
    """The error in a barrier to which all ranks but one come too late; a sum in the same group."""
    _, ours = sides = make_sides()
    options, tensor = dist.BarrierOptions(), torch.ones(3)
    options.asyncOp, options.timeout = False, timedelta(milliseconds=100)
    dist.barrier(group=ours.group)
    if dist.get_rank() > 0:
        dist.barrier()
    message = hear(lambda: ours.group.barrier(options).wait())
    assert hear(lambda: ours.group.barrier(options.timeout).wait()) == message
    if dist.get_rank() == 0:
        dist.barrier()
    options.timeout = WAIT
    for words, named in (([options], {}), ([WAIT], {}), ([], {"timeout": WAIT}), ([], {})):
        ours.group.barrier(*words, **named).wait()
    dist.all_reduce(tensor, group=ours.group)
    close_sides(*sides)
    return message, tensor.sum().item()


def compile_a_model(session: Any) -> list[float]:
    """The gradient of a compiled DDP model with a buffer, which is broadcast before each pass."""
    sides, size = make_sides(), dist.get_world_size()
    model = torch.nn.Linear(2, 1, bias=False)
    model.register_buffer("unused", torch.full((3,), float(dist.get_rank())))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=sides[1].group)
    compiled = torch.compile(wrapped, backend="eager")
    for _ in range(2):
        wrapped.zero_grad()
        compiled(torch.full((1, 2), 2.0 * dist.get_rank())).sum().backward()
    close_sides(*sides)
    return [*(model.weight.grad / (size - 1)).view(-1).tolist(), *model.unused.tolist()]


def close_twice(session: Any) -> list[str]:
    """Groups that are destroyed in another order on each rank, then used; the errors' kinds."""
    pairs = [make_sides()[1] for _ in range(3)]
    for side in pairs[:2]:
        dist.all_reduce(torch.ones(3), group=side.group)
    works = [dist.all_reduce(torch.ones(9), group=pairs[0].group, async_op=True)]
    order = pairs if dist.get_rank() % 2 else pairs[::-1]
    for side in order:
        dist.destroy_process_group(side.group)
    works[0].wait()
    return [
        hear(lambda: dist.destroy_process_group(pairs[0].group)),
        hear(lambda: pairs[0].group.allreduce([torch.ones(3)]).wait()),
        hear(lambda: pairs[2].group.allreduce([torch.ones(3, dtype=torch.int8)]).wait()),
    ]
