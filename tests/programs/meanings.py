"""What the collective calls of a pool's ranks mean beside their sums.

Asserts what each rank can see for itself, and reports what only all of them together show.
"""

import itertools
import math
import time
import zlib
from typing import Any

import torch
from torch.distributed import ReduceOp

import mpiddp
from battery import WHOLE
from mpiddp.collectives.transport.operators import OPERATORS

TRANSPORTS = ("shared-memory", "shared-memory+mpi", "mpi", "torch")
LATE = 0.3


def meet(rank: int, size: int) -> list[tuple[float, float]]:
    """When this rank came to each of some barriers, and when it left; one rank comes late."""
    times = []
    for late in range(size):
        if rank == late:
            time.sleep(LATE)
        came = time.monotonic()
        mpiddp.barrier()
        times.append((came, time.monotonic()))
    return times


def start_many(rank: int, size: int, transport: str, comm: Any) -> list[int]:
    """Begin calls before the others are done; the order in which they were done."""
    done: list[int] = []
    buffers = [torch.full((17**3 * (n % 3) + n,), float(rank + n)) for n in range(12)]
    futures = []
    for number, buffer in enumerate(buffers):
        future = mpiddp.all_reduce(buffer, transport=transport, async_op=True)
        future.then(lambda _, number=number: done.append(number))
        futures.append(future)
    # The same buffer once more, and a call that is not asynchronous: both come after the rest.
    again = mpiddp.all_reduce(buffers[5], transport=transport, async_op=True)
    last = mpiddp.all_reduce(buffers[7], transport=transport)
    assert comm.allreduce(1) == size
    total = sum(range(size))
    for number, (future, buffer) in enumerate(zip(futures, buffers, strict=True)):
        assert future.wait() is buffer
        twice = size if number in (5, 7) else 1
        assert torch.equal(buffer, torch.full_like(buffer, (total + number * size) * twice))
    assert again.wait() is buffers[5] and last is buffers[7]
    return done


def prepare_well(rank: int, size: int, transport: str) -> None:
    """Calls that are prepared once, made often, between others and with new contents."""
    buffers = [torch.empty(count) for count in (7, 5000, 100001)]
    prepared = [mpiddp.prepare_all_reduce(buffer, transport=transport) for buffer in buffers]
    for turn in range(4):
        futures = []
        for buffer, call in zip(buffers, prepared, strict=True):
            other = torch.ones(30011)
            if turn % 2:
                futures.append(mpiddp.all_reduce(other, transport=transport, async_op=True))
            buffer.fill_(rank + turn)
            assert call() is buffer
            assert bool((buffer == sum(range(size)) + size * turn).all()), (transport, turn)
            # What is not asynchronous comes after what was begun before.
            assert not turn % 2 or bool((other == size).all()), (transport, turn)
        torch.futures.wait_all(futures)


def keep_shapes(rank: int, size: int) -> None:
    for shape in ((), (1,), (2, 3, 5), (0, 4)):
        tensor = torch.full(shape, rank + 1.0)
        assert mpiddp.all_reduce(tensor) is tensor
        assert tensor.shape == shape
        assert torch.equal(tensor, torch.full(shape, float(sum(range(size + 1)))))
        shared = mpiddp.shared_empty(shape, torch.int32)
        assert shared.shape == shape and shared.dtype == torch.int32
        assert bool((shared == 0).all())
    rows = torch.zeros(3, 4)
    rows[1] = rank + 1
    mpiddp.all_reduce(rows[1])
    assert rows.sum(1).tolist() == [0, 4 * sum(range(size + 1)), 0]


def name_operators(rank: int) -> None:
    """torch's operators and mpiddp's names are one call, and stay so when it is repeated."""
    tensor = torch.empty(6)
    for op, name in OPERATORS.items():
        expected = mpiddp.all_reduce(torch.full((6,), rank + 2.0), op=name)
        for each in (op, ReduceOp(op), op, name):
            mpiddp.all_reduce(tensor.fill_(rank + 2.0), op=each if rank % 2 else name)
            assert torch.equal(tensor, expected), (name, each)


def digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(bytes(tensor.contiguous().view(torch.uint8).tolist()))


def round_alike(rank: int) -> list[tuple[str, int]]:
    generator = torch.Generator().manual_seed(rank)
    found = []
    for transport in TRANSPORTS:
        for algorithm in WHOLE:
            for dtype in (torch.float32, torch.bfloat16):
                tensor = torch.randn(997, generator=generator).to(dtype)
                mpiddp.all_reduce(tensor, algorithm, transport)
                found.append((f"{algorithm} over {transport} of {dtype}", digest(tensor)))
    return found


def add_nans(session: mpiddp.Session) -> list[tuple[str, list[str]]]:
    """For each call the bits of numbers; of NaNs the payload: r + 1 if it is rank r's."""
    rank, found = session.world.rank, []
    types = {torch.float32: (torch.int32, 22), torch.float64: (torch.int64, 51)}
    for transport, algorithm in itertools.product(
        ("auto", "mpi"), ("recursive-doubling", "one-shot", "ring", "direct")
    ):
        for (dtype, (bits, quiet)), count in itertools.product(types.items(), (1, 33)):
            tensor = torch.rand(count, dtype=dtype)
            # Infinity's bits, that of a quiet NaN, and a payload.
            infinity = torch.tensor(torch.inf, dtype=dtype).view(bits)
            tensor[::2] = (infinity + (1 << quiet) + rank + 1).view(dtype)
            mpiddp.all_reduce(tensor, algorithm, transport)
            numbers = zip(tensor.tolist(), tensor.view(bits).tolist(), strict=True)
            texts = [f"{n & 0xFF:x}" if math.isnan(v) else f"number {n:x}" for v, n in numbers]
            found.append((f"{count} {dtype}, {algorithm} over {transport}", texts))
    return found


def use_memory_anew(size: int) -> None:
    """The same memory, in turns with other operators, types, lengths and shapes."""
    buffer = torch.empty(6)
    frozen = torch.nn.Parameter(buffer, requires_grad=False)
    views = [buffer, buffer[:3], buffer.view(torch.int32), buffer.view(2, 3), frozen]
    for view in 3 * views:
        for op, expected in (("sum", size), ("max", 1)):
            before = view.fill_(1)._version
            assert mpiddp.all_reduce(view, op=op) is view
            assert torch.equal(view, torch.full_like(view, expected)), (view, op)
            assert view._version > before
    for _ in range(3):
        # Other memory for the same tensor.
        buffer.data = torch.ones(6, dtype=torch.float64)
        assert torch.equal(mpiddp.all_reduce(buffer), torch.full_like(buffer, size))


def run(session: mpiddp.Session) -> dict[str, Any]:
    """Everything; what only all ranks together can judge."""
    rank, size = session.world.rank, session.world.size
    report: dict[str, Any] = {"times": meet(rank, size), "done": {}}
    for transport in TRANSPORTS:
        report["done"][transport] = start_many(rank, size, transport, session.comm)
        prepare_well(rank, size, transport)
    use_memory_anew(size)
    keep_shapes(rank, size)
    name_operators(rank)
    report["rounded"] = round_alike(rank)
    return report
