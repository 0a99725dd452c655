"""Collective calls of the ranks of a pool, whose results are known exactly.

Every rank knows what all of them put in, whole numbers that no type rounds, so it knows the
result, too. It reports what went wrong.
"""

import itertools
import random
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import mpiddp
from mpiddp.errors import PeerLostError
from mpiddp.schedules import registry
from pool_rank import renew

Row = dict[str, Any]
CPU = torch.device("cpu")
GUARDS = 3
"""Elements before and behind each buffer, which nobody may touch; they spoil the alignment."""
COUNTS = (0, 1, 7, 1000, 200003)
"""None at all; fewer than ranks; a mailbox; more than a block that stays in cache, and ragged."""
MEMORY = ("private", "shared", "rank 0 private", "rank 0 shared")
TRANSPORTS = ("auto", "shared-memory", "mpi", "torch", "shared-memory+mpi")
FLOATS = ("float64", "float32", "float16", "bfloat16")
SCALES = {"float64": 2**40, "float32": 2**12, "int64": 2**55, "int32": 2**24}
VARIANTS = (
    "ring:segments=3", "naive-ring:segments=2", "direct:servers=1", "double-tree:segments=4",
    "two-level:inner=ring,outer=recursive-doubling",
)  # fmt: skip
PARTING = ("auto", "ring", "direct")
ROOTED = ("auto", "binomial-tree", "gather-broadcast", "naive-ring:segments=3")
WHOLE = tuple(name for name in registry.names() if name != "central")
"""Algorithms that sum all ranks' buffers."""
IN_ORDER = ("auto", "one-shot", "direct", "gather-broadcast")
"""Algorithms that add in the same order everywhere."""
VALUES = torch.randint(-7, 8, (2 * COUNTS[-1],), generator=torch.Generator().manual_seed(0))


def list_sums(size: int, transports: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    whole = ("auto", *WHOLE, *VARIANTS)
    what = [("all_reduce", name) for name in whole if size > 1 or name == "auto"]
    what += [("reduce_scatter", name) for name in PARTING]
    what += [("reduce", name) for name in ROOTED]
    return {
        "what": tuple(what), "transport": transports, "type": (*FLOATS, "int32", "int64"),
        "operator": ("sum", "average", "product", "min", "max"), "count": COUNTS,
        "memory": MEMORY, "root": tuple(range(size)), "reduction": ("default", "own", "wide"),
        "fixed order": (False, True),
    }  # fmt: skip


def list_moves(size: int, transports: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    what = [("all_gather", name) for name in PARTING]
    what += [("broadcast", name) for name in ROOTED]
    types = ("float64", "bfloat16", "int32", "uint8", "bool", "int16", "complex64")
    return {
        "what": tuple(what), "transport": transports, "type": types, "count": COUNTS,
        "memory": MEMORY, "root": tuple(range(size)),
    }  # fmt: skip


LISTS = {
    "sums": list_sums,
    "moves": list_moves,
    # Tensors on GPUs are carried by torch alone.
    "gpu sums": lambda size, _: {**list_sums(size, ("auto", "torch")), "memory": MEMORY[:1]},
    "gpu moves": lambda size, _: {**list_moves(size, ("auto", "torch")), "memory": MEMORY[:1]},
}


def cover(dimensions: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Few rows that hold every possible pair of values; the same ones in every process."""
    dice, rows = random.Random(0), []
    names = itertools.combinations(sorted(dimensions), 2)
    every = ({a: x, b: y} for a, b in names for x in dimensions[a] for y in dimensions[b])
    # A dict keeps its order, which a set of strings does not between processes.
    missing = {pair: None for row in every if is_possible(row) for pair in find_pairs(row)}
    while missing:
        row = dict(next(iter(missing)))
        rest = [name for name in dimensions if name not in row]
        for name in dice.sample(rest, len(rest)):
            row = max(
                (more for value in dimensions[name] if is_possible(more := {**row, name: value})),
                key=lambda more: sum(map(missing.__contains__, find_pairs(more))),
            )
        for pair in find_pairs(row):
            missing.pop(pair, None)
        rows.append(row)
    return rows


def find_pairs(row: Row) -> list[tuple[Any, ...]]:
    return list(itertools.combinations(sorted(row.items()), 2))


def is_possible(row: Row) -> bool:
    """Whether these values may stand in one call; what is not in ``row`` is not asked about."""
    kind, algorithm = row.get("what", ("all_reduce", "auto"))
    is_exact = row.get("type", "float64") not in FLOATS
    if is_exact and (row.get("operator") == "average" or row.get("reduction") == "wide"):
        return False
    return not row.get("fixed order") or (kind == "all_reduce" and algorithm in IN_ORDER)


def is_sum(row: Row) -> bool:
    return row["what"][0] not in ("all_gather", "broadcast")


def contribute(row: Row, rank: int, size: int, turn: int) -> torch.Tensor:
    """What ``rank`` puts in, as whole numbers."""
    operator, dtype = row.get("operator", "sum"), row["type"]
    place = zlib.crc32(repr((row, turn, rank)).encode()) % (len(VALUES) - COUNTS[-1])
    values = VALUES[place : place + row["count"]]
    if dtype == "bool":
        return values % 2
    if dtype == "uint8":
        return values + 7
    if operator == "product":
        return values.sign() + values % 2
    if operator == "average":
        values = values * size
    return values * SCALES.get(dtype, 1)


def move(row: Row, parts: list[torch.Tensor]) -> torch.Tensor:
    if row["what"][0] == "broadcast":
        return parts[row["root"]]
    size, count = len(parts), row["count"]
    bounds = [count * rank // size for rank in range(size + 1)]
    return torch.cat([parts[rank][bounds[rank] : bounds[rank + 1]] for rank in range(size)])


def add(row: Row, parts: list[torch.Tensor]) -> torch.Tensor:
    stack = torch.stack(parts)
    operator = row["operator"]
    if operator == "average":
        return stack.sum(0) // len(parts)
    return {"sum": stack.sum, "product": stack.prod, "min": stack.amin, "max": stack.amax}[
        operator
    ](0)


def expect(row: Row, parts: list[torch.Tensor]) -> torch.Tensor:
    """The result of the whole call, in the type of its buffers."""
    total = (add if is_sum(row) else move)(row, parts)
    result = total.to(getattr(torch, row["type"]))
    back = result.real if result.is_complex() else result
    assert torch.equal(back.to(torch.int64), total), f"{row}: not exact"
    return result


def allocate(
    count: int, dtype: torch.dtype, memory: str, rank: int, device: torch.device
) -> torch.Tensor:
    """A buffer and its guards; only private ones lie on GPUs."""
    first, _, other = memory.rpartition(" ")
    is_shared = (other == "shared") == (not first or rank == 0)
    length = count + 2 * GUARDS
    if is_shared:
        return mpiddp.shared_empty(length, dtype)
    return torch.empty(length, dtype=dtype, device=device)


def call(row: Row, tensor: torch.Tensor) -> torch.Tensor:
    kind, algorithm = row["what"]
    options: dict[str, Any] = {"algorithm": algorithm, "transport": row["transport"]}
    if is_sum(row):
        wide = {"default": None, "own": tensor.dtype, "wide": torch.float64}
        options |= {"op": row["operator"], "reduction_dtype": wide[row["reduction"]]}
        options["fixed_order"] = row["fixed order"]
    if kind in ("broadcast", "reduce"):
        options["src" if kind == "broadcast" else "dst"] = row["root"]
    result: torch.Tensor = getattr(mpiddp, kind)(tensor, **options)
    return result


def check(row: Row, buffer: torch.Tensor, rank: int, size: int, turn: int) -> str | None:
    """Make the call once; what is wrong with its result, if anything is."""
    count, kind = row["count"], row["what"][0]
    parts = [contribute(row, other, size, turn) for other in range(size)]
    expected, tensor = expect(row, parts), buffer[GUARDS : GUARDS + count]
    buffer.fill_(1)
    tensor.copy_(parts[rank])
    start, stop = count * rank // size, count * (rank + 1) // size
    if kind == "all_gather":
        tensor[:start] = 1
        tensor[stop:] = 1
    result = call(row, tensor)
    if not bool((buffer[:GUARDS] == 1).all() and (buffer[GUARDS + count :] == 1).all()):
        return "touched what lies beside the buffer"
    if kind == "reduce" and rank != row["root"]:
        return None
    own = tensor
    if kind == "reduce_scatter":
        own, expected = tensor[start:stop], expected[start:stop]
    if count and result.data_ptr() != own.data_ptr():
        return "returned something else than the buffer"
    result = result.cpu()
    if not torch.equal(result, expected):
        wrong = (result != expected).nonzero().flatten().tolist()
        place = wrong[0]
        found, wanted = result[place].item(), expected[place].item()
        return f"{len(wrong)} elements differ: number {place} is {found}, not {wanted}"
    return None


def make_call(row: Row, rank: int, size: int, device: torch.device = CPU) -> list[str]:
    """Twice on one buffer, once on another one: bound memory is met again, and left."""
    wrong = []
    dtype = getattr(torch, row["type"])
    buffer = allocate(row["count"], dtype, row["memory"], rank, device)
    for turn in range(3):
        if turn == 2:
            buffer = allocate(row["count"], dtype, row["memory"], rank, device)
        fault = check(row, buffer, rank, size, turn)
        if fault is not None:
            wrong.append(f"{row}, turn {turn}: {fault}")
    return wrong


def run(session: mpiddp.Session, *parts: str) -> dict[str, Any]:
    """The rows of the parts that were asked for; what was found."""
    rank, size = session.world.rank, session.world.size
    described = mpiddp.describe_collectives()
    transports = ("auto", *(name for name in TRANSPORTS if name in described["transports"]))
    rows = [row for part in parts for row in cover(LISTS[part](size, transports))]
    wrong = []
    for row in rows:
        try:
            wrong += make_call(row, rank, size, session.device)
        except PeerLostError:
            sys.stderr.write(f"rank {rank} was in {row}\n")
            raise
        except Exception as error:
            wrong.append(f"{row}: {type(error).__name__}: {error}")
    return {"wrong": wrong, "calls": len(rows), "describe": described}


def run_on_nodes(session: mpiddp.Session, nodes: Sequence[int], *parts: str) -> dict[str, Any]:
    """As above, by ranks that take one another for ranks of these nodes."""
    world = session.world
    try:
        session.world = replace(world, node_rank=nodes[world.rank])
        renew(session)
        return run(session, *parts)
    finally:
        session.world = world
        renew(session)


def check_reports(reports: Sequence[dict[str, Any]]) -> None:
    """For tests: calls were made, and nothing is wrong."""
    for rank, report in enumerate(reports):
        assert report["wrong"] == [] and report["calls"] > 10, f"rank {rank}"
