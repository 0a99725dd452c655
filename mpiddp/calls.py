"""The collective calls on the current session: ``mpiddp.all_reduce`` and its kin.

All ranks make the same calls in the same order, with buffers of the same length and type. Buffers
are the caller's, contiguous, and changed in place. When a call returns its result is there; on a
GPU, once the current stream has come so far, and calls on different streams must not overlap. The
first call of a session, and the first over each transport, make ready what later ones use, and wait
for all ranks.

An algorithm is proved for the session's number of ranks when it is first used. All ranks end with
the same bits, but for NaNs: what is a NaN on one rank is one on all, but payloads may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mpiddp.collectives.bootstrap import describe, find_communicator
from mpiddp.collectives.communicator import check_tensor
from mpiddp.collectives.operators import Operator
from mpiddp.collectives.planner import Request
from mpiddp.collectives.selection import TRANSPORTS, Call
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.schedule import Collective

_OPERATORS = tuple(operator.value for operator in Operator)
_requests: dict[tuple[Any, ...], Request] = {}
"""The requests that were made so far: constants, since the same call has to be the same object."""


def _find_request(
    kind: Collective,
    algorithm: str,
    transport: str,
    op: str = "sum",
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
    root: int = 0,
) -> Request:
    try:
        # Numbers of other types may equal a rank's.
        key = (kind.value, algorithm, transport, op, reduction_dtype, fixed_order, root, type(root))
        request = _requests.get(key)
    except TypeError:
        _check_options(algorithm, transport, op, reduction_dtype, root)
        raise
    if request is None:
        _check_options(algorithm, transport, op, reduction_dtype, root)
        call = Call(kind, algorithm, transport, root, fixed_order)
        request = _requests[key] = Request(call, op, reduction_dtype)
    return request


def _check_options(
    algorithm: object, transport: object, op: object, reduction_dtype: object, root: object
) -> None:
    for name, text in (("algorithm", algorithm), ("transport", transport), ("op", op)):
        if not isinstance(text, str):
            raise ConfigurationError(f"{name}: expected a name, found {text!r}")
    if algorithm in _OPERATORS:
        raise ConfigurationError(
            f"{algorithm!r} is no algorithm, but an operator: op={algorithm!r}"
        )
    if algorithm in TRANSPORTS:
        raise ConfigurationError(
            f"{algorithm!r} is no algorithm, but a transport: transport={algorithm!r}"
        )
    if not isinstance(reduction_dtype, torch.dtype | None):
        raise ConfigurationError(
            f"reduction_dtype: expected a torch type, found {reduction_dtype!r}"
        )
    if not isinstance(root, int):
        raise ConfigurationError(f"root: expected the number of a rank, found {root!r}")


def all_reduce(
    tensor: torch.Tensor,
    algorithm: str = "auto",
    transport: str = "auto",
    op: str = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Make ``tensor`` the sum of all ranks' tensors, in place, and return it.

    Args:
        tensor: of any shape; float64, float32, float16, bfloat16, int64 or int32; on the CPU or a
            GPU.
        algorithm: a registered algorithm, with parameters as in ``ring:segments=4``, or ``auto``;
            its docstring says how many steps and bytes it takes, and how much extra memory with
            messages. In shared memory blocks of 256 KiB are enough, one for each rank whose memory
            is private, and where many ranks swap the same chunk, as in recursive-doubling, copies
            of it.
        transport: ``shared-memory``, ``mpi``, ``shared-memory+mpi`` (the first inside nodes, the
            second between them), ``torch`` (point-to-point over Gloo or NCCL), or ``auto``.
        op: sum, average, product, min or max.
        reduction_dtype: the type in which contributions are added; by default the tensor's own, but
            float32 for float16 and bfloat16. Where an algorithm adds in several steps, wider sums
            travel in the wider type.
        fixed_order: the order of additions does not depend on an element's place in the buffer, so
            neither does the result depend on how a buffer was cut.

    ``auto`` follows the rule that `mpiddp.collectives.selection` states. On tensors of
    ``mpiddp.shared_empty`` no copy is made inside a node. An algorithm whose
    dedicated servers contribute nothing (``central``) is refused.

    Raises:
        ScheduleError: the algorithm is no all-reduce; says why.
        ConfigurationError: a tensor, name or combination that cannot be used; a neighbour that
            makes another call. With MPIDDP_DEBUG=1 all calls are compared first, and the error
            says on every rank who differs.
        PeerLostError: a rank did not come, or left, within the timeout; says which, and the step.
    """
    communicator = find_communicator()
    try:
        key = (
            tensor.data_ptr(), tensor.numel(), tensor.dtype,
            algorithm, transport, op, reduction_dtype, fixed_order,
        )  # fmt: skip
        shortcut = communicator.shortcuts.get(key)
    except (AttributeError, RuntimeError, TypeError):
        check_tensor(tensor)
        _check_options(algorithm, transport, op, reduction_dtype, 0)
        raise
    is_plain = tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_neg()
    if shortcut is not None and is_plain:
        communicator.make(shortcut, tensor)
        return tensor
    request = _find_request(
        Collective.ALL_REDUCE, algorithm, transport, op, reduction_dtype, fixed_order
    )
    communicator.run(request, tensor)
    communicator.remember(request, tensor, key)
    return tensor


def all_reduce_async(
    tensor: torch.Tensor,
    algorithm: str = "auto",
    transport: str = "auto",
    op: str = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
) -> torch.futures.Future[torch.Tensor]:
    """As ``all_reduce``, but return at once, with a future that will have ``tensor``.

    The tensor must stay untouched until then. Calls are made in the order in which they were
    begun, on a GPU on a stream of their own; a later call that is not asynchronous waits for them.
    Where MPI has less than MPI_THREAD_MULTIPLE, a call on a CPU tensor is made at once, and done
    when this returns.
    """
    request = _find_request(
        Collective.ALL_REDUCE, algorithm, transport, op, reduction_dtype, fixed_order
    )
    return find_communicator().start(request, tensor)


def prepare_all_reduce(
    tensor: torch.Tensor,
    algorithm: str = "auto",
    transport: str = "auto",
    op: str = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
) -> Callable[[], torch.Tensor]:
    """What makes ``all_reduce`` on this tensor whenever it is called, as often as one likes.

    It saves the microseconds in which ``all_reduce`` finds out what to do, as MPI's
    ``MPI_Allreduce_init`` does. It belongs to the memory that the tensor has now: torch refuses to
    resize it from now on, and whatever the tensor's name is given later (``tensor.data = …``, or a
    new ``grad`` after ``zero_grad()``, which sets it to None unless told otherwise) is not summed.
    Autograd is not told that the memory changes. All ranks prepare the same calls in the same
    order, since the first one over a transport makes it ready.
    """
    request = _find_request(
        Collective.ALL_REDUCE, algorithm, transport, op, reduction_dtype, fixed_order
    )
    return find_communicator().prepare(request, tensor)


def reduce_scatter(
    tensor: torch.Tensor,
    algorithm: str = "auto",
    transport: str = "auto",
    op: str = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Sum this rank's part of all ranks' tensors; return the part, a view of the flat tensor.

    Rank r of n owns elements ⌊r·count/n⌋ to ⌊(r+1)·count/n⌋. The rest of the tensor is worked in,
    and holds nothing useful afterwards. Arguments and errors as those of ``all_reduce``; the
    algorithm must be one whose halves give each rank one part: ring, direct, …
    """
    communicator = find_communicator()
    request = _find_request(
        Collective.REDUCE_SCATTER, algorithm, transport, op, reduction_dtype, fixed_order
    )
    return communicator.own_part(communicator.run(request, tensor))


def all_gather(
    tensor: torch.Tensor, algorithm: str = "auto", transport: str = "auto"
) -> torch.Tensor:
    """Fill ``tensor`` with every rank's part of it, in place, and return it.

    Each rank has put its own part, as ``reduce_scatter`` describes it, where it belongs. Elements
    of any type of 1, 2, 4 or 8 bytes.
    """
    request = _find_request(Collective.ALL_GATHER, algorithm, transport)
    return find_communicator().run(request, tensor)


def broadcast(
    tensor: torch.Tensor, root: int = 0, algorithm: str = "auto", transport: str = "auto"
) -> torch.Tensor:
    """Make ``tensor`` what it is on rank ``root``, in place, and return it.

    Elements of any type of 1, 2, 4 or 8 bytes. A root that differs between ranks may leave tensors
    as they were: no rank waits for one that only receives. MPIDDP_DEBUG=1 finds that.
    """
    request = _find_request(Collective.BROADCAST, algorithm, transport, root=root)
    return find_communicator().run(request, tensor)


def reduce(
    tensor: torch.Tensor,
    root: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    op: str = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Make ``tensor`` the sum of all ranks' tensors on rank ``root``, in place, and return it.

    On the other ranks it is worked in, and holds nothing useful afterwards. Arguments and errors
    as those of ``all_reduce``.
    """
    request = _find_request(
        Collective.REDUCE, algorithm, transport, op, reduction_dtype, fixed_order, root
    )
    return find_communicator().run(request, tensor)


def barrier() -> None:
    """Return once every rank has come; what a GPU has been told to do is not waited for."""
    find_communicator().barrier()


def shared_empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A CPU tensor in memory that the other ranks of this node can work in.

    Collective calls on it make no copy inside a node. It is zeros at first, belongs to the caller,
    and is freed as any tensor is. Not collective, unless it is the first of these functions that is
    called in a session.

    Raises ConfigurationError where there is no memory left, in the machine or within the limit of a
    job's or a container's control group, or no session.
    """
    lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(length, int) for length in lengths):
        raise ConfigurationError(f"shape: expected integers, found {shape!r}")
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(
            f"dtype: expected a torch type, found {dtype!r}; a shape is one argument, as (4, 3)"
        )
    return find_communicator().segments.empty(lengths, dtype)


def describe_collectives() -> dict[str, Any]:
    """How ranks wait, what transports there are, and what a user should know of them."""
    return describe(find_communicator())
