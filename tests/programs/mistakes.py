"""Calls that cannot be made, by name, and what each says to the ranks of a pool.

Every rank makes the same mistake, hears of it at once, and makes good calls afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

import mpiddp
import wrong_algorithms
from mpiddp.errors import ConfigurationError
from pool_rank import renew


def ones(count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def name_wrong(make: Callable[[], Any]) -> Any:
    with wrong_algorithms.registered():
        return make()


def sum_again(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Sum a tensor that is not as it was when it was summed before."""
    return mpiddp.all_reduce(change(mpiddp.all_reduce(ones())))


CALLS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: mpiddp.all_reduce(torch.ones(2, 3).t()),
    "sparse, like one before": lambda: mpiddp.all_reduce(torch.eye(6)[:1].to_sparse()),
    "transposed, like one before": lambda: sum_again(lambda tensor: tensor.view(2, 3).t()),
    "leaf, like one before": lambda: sum_again(lambda tensor: tensor.requires_grad_()),
    "negative, like one before": lambda: sum_again(torch._neg_view),
    "meta": lambda: mpiddp.all_reduce(torch.ones(6, device="meta")),
    "no tensor": lambda: mpiddp.all_reduce([1.0] * 6),  # type: ignore[arg-type]
    "conjugate": lambda: mpiddp.broadcast(torch.ones(3, dtype=torch.complex64).conj()),
    "operator for an algorithm": lambda: mpiddp.all_reduce(ones(), "average"),
    "two lengths": lambda: mpiddp.shared_empty(4, 3),  # type: ignore[arg-type]
    "list of names": lambda: mpiddp.all_reduce(ones(), ["ring"]),  # type: ignore[arg-type]
    "name for a rank": lambda: mpiddp.broadcast(ones(), "0"),  # type: ignore[arg-type]
    "name for a type": lambda: mpiddp.all_reduce(ones(), reduction_dtype="float64"),
    "shape of halves": lambda: mpiddp.shared_empty(2.5),  # type: ignore[arg-type]
    "algorithm": lambda: mpiddp.all_reduce(ones(), algorithm="rong"),
    "server": lambda: mpiddp.all_reduce(ones(), algorithm="central"),
    "transport": lambda: mpiddp.all_reduce(ones(), transport="pigeon"),
    "operator of torch for an algorithm": lambda: mpiddp.all_reduce(ones(), ReduceOp.MAX),  # type: ignore[arg-type]
    "input and output": lambda: mpiddp.all_gather([ones()], ones()),  # type: ignore[arg-type]
    "operator of torch": lambda: mpiddp.all_reduce(ones(), op=ReduceOp.BAND),
    "operator": lambda: mpiddp.all_reduce(ones(), op="median"),
    "bool": lambda: mpiddp.all_reduce(ones(dtype=torch.bool)),
    "int8": lambda: mpiddp.all_reduce(ones(dtype=torch.int8)),
    "complex128 moved": lambda: mpiddp.broadcast(ones(dtype=torch.complex128)),
    "integer average": lambda: mpiddp.all_reduce(ones(dtype=torch.int64), op="average"),
    "integers widely": lambda: mpiddp.all_reduce(
        ones(dtype=torch.int32), reduction_dtype=torch.float64
    ),
    "root too high": lambda: mpiddp.broadcast(ones(), src=9),
    "root that equals one": lambda: [mpiddp.broadcast(ones(), src=r) for r in (0, 0.0)],
    "no root": lambda: mpiddp.reduce(ones(), 0, "ring"),
    "no all-reduce": lambda: name_wrong(lambda: mpiddp.all_reduce(ones(), "double")),
    **{
        f"another on each rank, {transport}": lambda transport=transport: name_wrong(
            lambda: mpiddp.all_reduce(ones(), "drawn", transport)
        )
        for transport in ("mpi", "torch")
    },
    "no half": lambda: name_wrong(lambda: mpiddp.reduce(ones(), 0, "lopsided")),
    "negative shape": lambda: mpiddp.shared_empty((3, -1)),
    "name for a type, shared": lambda: mpiddp.shared_empty(3, "float32"),  # type: ignore[arg-type]
    "shared memory": lambda: mpiddp.all_reduce(ones(), transport="shared-memory"),
}
VARIABLES = {
    "wait": ("MPIDDP_WAIT", lambda rank: "doze"),
    "wait differs": ("MPIDDP_WAIT", lambda rank: ("spin", "sleep")[rank % 2]),
    "wait of one": ("MPIDDP_WAIT", lambda rank: "yield" if rank == 1 else None),
    "no message bytes": ("MPIDDP_MESSAGE_BYTES", lambda rank: "0"),
    "message bytes differ": ("MPIDDP_MESSAGE_BYTES", lambda rank: str(4096 + rank)),
}


def hear(make: Callable[[], Any]) -> str:
    """What a call says that cannot be made."""
    try:
        make()
    except ConfigurationError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def hear_variables(session: mpiddp.Session) -> dict[str, str]:
    """What is said of variables when the first call is prepared."""
    found = {}
    for case, (name, choose) in VARIABLES.items():
        set_variable(name, choose(session.world.rank))
        found[case] = hear(mpiddp.describe_collectives)
        set_variable(name, None)
    return found


def sum_well(size: int) -> None:
    for transport in ("auto", "mpi", "torch"):
        for count in (6, 200003):
            tensor = ones(count)
            mpiddp.all_reduce(tensor, transport=transport)
            assert torch.equal(tensor, torch.full((count,), float(size)))


def run(session: mpiddp.Session) -> dict[str, str]:
    renew(session)
    report = hear_variables(session)
    sum_well(session.world.size)
    for case, make in CALLS.items():
        report[case] = hear(make)
    sum_well(session.world.size)
    return report
