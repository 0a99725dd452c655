"""Calls that cannot be made, and what each says to the ranks of a pool.

Every rank makes the same mistake, hears of it at once, and makes good calls afterwards.
"""

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


CONTIGUOUS = r"expected a contiguous tensor, found one of shape .*: call \.contiguous\(\) first"
DENSE = r"expected a dense tensor, found one of layout torch.sparse_coo"
VALUES = r"expected a tensor whose memory holds its values: call .*"
RANK = r"src or dst: expected the number of a rank, found "
SUMMED = r"expected a tensor of float64, float32, int64, int32, float16, bfloat16, found "
NO_SUM = r"ScheduleError: double on 3 ranks is no all-reduce: step 1: .* rank 1 is added twice"
NO_HALF = r"ScheduleError: lopsided on 3 ranks cannot be halved: its first 1 of 3 steps are no "
DIFFERENT = (
    r"the schedule of drawn must be the same on all ranks, but it differs from rank 0's on rank 1: "
    r"rank 0 has \d+, rank 1 has \d+"
)
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: mpiddp.all_reduce(torch.ones(2, 3).t()), CONTIGUOUS),
    (lambda: mpiddp.all_reduce(torch.eye(6)[:1].to_sparse()), DENSE),
    (lambda: sum_again(lambda tensor: tensor.view(2, 3).t()), CONTIGUOUS),
    (lambda: sum_again(lambda tensor: tensor.requires_grad_()), "a leaf that requires grad"),
    (lambda: sum_again(torch._neg_view), VALUES),
    (lambda: mpiddp.broadcast(torch.ones(3, dtype=torch.complex64).conj()), VALUES),
    (lambda: mpiddp.all_reduce(torch.ones(6, device="meta")), "expected a CPU or CUDA tensor"),
    (lambda: mpiddp.all_reduce([1.0] * 6), "expected a torch tensor, found list"),  # type: ignore[arg-type]
    (lambda: mpiddp.all_reduce(ones(), "average"), "'average' is no algorithm, but an operator"),
    (lambda: mpiddp.all_reduce(ones(), "mpi"), "'mpi' is no algorithm, but a transport"),
    (lambda: mpiddp.shared_empty(4, 3), "dtype: expected a torch type, found 3; a shape is one "),  # type: ignore[arg-type]
    (lambda: mpiddp.all_reduce(ones(), ["ring"]), r"algorithm: expected a name, found \['ring'\]"),  # type: ignore[arg-type]
    (lambda: mpiddp.broadcast(ones(), "0"), RANK + "'0'"),  # type: ignore[arg-type]
    (lambda: [mpiddp.broadcast(ones(), src=each) for each in (0, 0.0)], RANK + r"0\.0"),
    (
        lambda: mpiddp.all_reduce(ones(), reduction_dtype="float64"),
        "reduction_dtype: expected a torch type, found 'float64'",
    ),
    (lambda: mpiddp.shared_empty(2.5), "shape: expected integers, found 2.5"),  # type: ignore[arg-type]
    (lambda: mpiddp.shared_empty((3, -1)), r"expected lengths >= 0, found \(3, -1\)"),
    (lambda: mpiddp.shared_empty(3, "float32"), "dtype: expected a torch type, found 'float32'"),  # type: ignore[arg-type]
    (
        lambda: mpiddp.all_reduce(ones(), algorithm="rong"),
        r"no algorithm is called 'rong' \(did you mean ring\?\); there are .*\bring\b",
    ),
    (lambda: mpiddp.all_reduce(ones(), algorithm="central"), "central leaves out the buffers of 1"),
    (lambda: mpiddp.all_reduce(ones(), transport="pigeon"), "no transport is called 'pigeon'"),
    (lambda: mpiddp.all_reduce(ones(), op="median"), "no operator is called 'median'; there are "),
    (lambda: mpiddp.all_reduce(ones(), ReduceOp.MAX), "'max' is no algorithm, but an operator"),  # type: ignore[arg-type]
    (lambda: mpiddp.all_reduce(ones(), op=ReduceOp.BAND), "op: .*, found ReduceOp.BAND"),
    (lambda: mpiddp.all_gather([ones()], ones()), "algorithm: expected a name, found a tensor: "),  # type: ignore[arg-type]
    (lambda: mpiddp.all_reduce(ones(dtype=torch.bool)), SUMMED + "bool"),
    (lambda: mpiddp.all_reduce(ones(dtype=torch.int8)), SUMMED + "int8"),
    (
        lambda: mpiddp.broadcast(ones(dtype=torch.complex128)),
        "expected elements of 1, 2, 4 or 8 bytes, found complex128",
    ),
    (
        lambda: mpiddp.all_reduce(ones(dtype=torch.int64), op="average"),
        "an average of int64 is no integer",
    ),
    (
        lambda: mpiddp.all_reduce(ones(dtype=torch.int32), reduction_dtype=torch.float64),
        "reduction_dtype must be int32 or a wider .*, found float64",
    ),
    (lambda: mpiddp.broadcast(ones(), src=9), "src must be 0 to 2, found 9"),
    (lambda: mpiddp.reduce(ones(), dst=-1), "dst must be 0 to 2, found -1"),
    (lambda: mpiddp.reduce(ones(), 0, "ring"), "ring has no single root, so it makes no reduce; "),
    (lambda: name_wrong(lambda: mpiddp.all_reduce(ones(), "double")), NO_SUM),
    (lambda: name_wrong(lambda: mpiddp.all_reduce(ones(), "drawn", "mpi")), DIFFERENT),
    (lambda: name_wrong(lambda: mpiddp.all_reduce(ones(), "drawn", "torch")), DIFFERENT),
    (lambda: name_wrong(lambda: mpiddp.reduce(ones(), 0, "lopsided")), NO_HALF),
    (lambda: mpiddp.all_reduce(ones(), transport="shared-memory"), "nothing was said"),
]
"""What is done, and a pattern of what is said."""
VARIABLES: list[tuple[tuple[str, Callable[[int], str | None]], str]] = [
    (("MPIDDP_WAIT", lambda rank: "doze"), "MPIDDP_WAIT on rank 0: expected spin, yield, sleep"),
    (
        ("MPIDDP_WAIT", lambda rank: "yield" if rank == 1 else None),
        "MPIDDP_WAIT must be the same .*rank 0 has '', rank 1 has 'yield'",
    ),
    (("MPIDDP_MESSAGE_BYTES", lambda rank: "0"), "MPIDDP_MESSAGE_BYTES: expected bytes >= 8, "),
    (
        ("MPIDDP_MESSAGE_BYTES", lambda rank: str(4096 + rank)),
        "MPIDDP_MESSAGE_BYTES must be the same .*4096.*4098",
    ),
]


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


def hear_variables(session: mpiddp.Session) -> list[str]:
    """What is said of variables when the first call is prepared."""
    found = []
    for (name, choose), _ in VARIABLES:
        set_variable(name, choose(session.world.rank))
        found.append(hear(mpiddp.describe_collectives))
        set_variable(name, None)
    return found


def sum_well(size: int) -> None:
    for transport in ("auto", "mpi", "torch"):
        for count in (6, 200003):
            tensor = ones(count)
            mpiddp.all_reduce(tensor, transport=transport)
            assert torch.equal(tensor, torch.full((count,), float(size)))


def run(session: mpiddp.Session) -> list[str]:
    renew(session)
    said = hear_variables(session)
    sum_well(session.world.size)
    said += [hear(make) for make, _ in CALLS]
    sum_well(session.world.size)
    return said
