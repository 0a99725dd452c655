"""The collective calls of the current session: ``mpiddp.all_reduce`` and the others.

All ranks make the same calls in the same order, with buffers of the same length and type. Buffers
are the caller's, contiguous, and changed in place. When a call returns, its result is there. On a
GPU the result is there once the current stream has reached it, and calls on different streams must
not overlap. The first call of a session, and the first call over each transport, prepare what later
calls use, and wait for all ranks. Calls of several threads must not overlap either: one that begins
while another thread makes one raises ConfigurationError, and no more calls are possible.

An algorithm is proved for the session's number of ranks when it is first used. The results of all
ranks are bitwise equal, except for the payloads of NaNs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch

from mpiddp.collectives import TRANSPORTS
from mpiddp.collectives.bootstrap import ensure_communicator
from mpiddp.collectives.communicator import check_tensor
from mpiddp.collectives.planner import CallRequest
from mpiddp.collectives.transport.operators import Operator, name_operator
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.schedule import Collective
from mpiddp.torch_internals import find_implementation

Op: TypeAlias = "str | torch.distributed.ReduceOp | torch.distributed.ReduceOp.RedOpType"
_requests: dict[tuple[Any, ...], CallRequest] = {}
"""The requests that were made so far: plans are kept for the object, so a call is one object."""


def _find_request(
    kind: Collective,
    algorithm: str,
    transport: str,
    op: Op = "sum",
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
    root: int = 0,
) -> CallRequest:
    try:
        # Numbers of other types may equal a rank's, or one of torch's operators.
        types = (type(root), type(op))
        key = (kind.value, algorithm, transport, op, reduction_dtype, fixed_order, root, types)
        request = _requests.get(key)
    except TypeError:
        _check_options(algorithm, transport, op, reduction_dtype, root)
        raise
    if request is None:
        name = _check_options(algorithm, transport, op, reduction_dtype, root)
        if name == op:
            request = CallRequest(
                kind, algorithm, transport, root, fixed_order, name, reduction_dtype
            )
        else:
            rest = (reduction_dtype, fixed_order, root)
            request = _find_request(kind, algorithm, transport, name, *rest)
        _requests[key] = request
    return request


def _check_options(
    algorithm: object, transport: object, op: object, reduction_dtype: object, root: object
) -> str:
    """Raises ConfigurationError; returns the operator's name."""
    # torch's second argument is the operator.
    algorithm, op = name_operator(algorithm), name_operator(op)
    for name, text in (("algorithm", algorithm), ("transport", transport), ("op", op)):
        if not isinstance(text, str):
            # As in torch's calls that have an output and an input.
            is_tensor = "tensor(" in (found := repr(text))
            found = "a tensor: a call has one tensor, which it changes" if is_tensor else found
            raise ConfigurationError(f"{name}: expected a name, found {found}")
    operators = [operator.value for operator in Operator]
    others = {"an operator: op": operators, "a transport: transport": TRANSPORTS}
    for other, names in others.items():
        if algorithm in names:
            raise ConfigurationError(f"{algorithm!r} is no algorithm, but {other}={algorithm!r}")
    if not isinstance(reduction_dtype, torch.dtype | None):
        raise ConfigurationError(
            f"reduction_dtype: expected a torch type, found {reduction_dtype!r}"
        )
    if not isinstance(root, int):
        raise ConfigurationError(f"src or dst: expected the number of a rank, found {root!r}")
    return str(op)


# fmt: off
@overload
def all_reduce(
    tensor: torch.Tensor, algorithm: str = "auto", transport: str = "auto", op: Op = "sum", *,
    reduction_dtype: torch.dtype | None = None, fixed_order: bool = False,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def all_reduce(
    tensor: torch.Tensor, algorithm: str = "auto", transport: str = "auto", op: Op = "sum", *,
    reduction_dtype: torch.dtype | None = None, fixed_order: bool = False,
    async_op: Literal[True],
) -> torch.futures.Future[torch.Tensor]: ...
# fmt: on
def all_reduce(
    tensor: torch.Tensor,
    algorithm: str = "auto",
    transport: str = "auto",
    op: Op = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
    async_op: bool = False,
) -> torch.Tensor | torch.futures.Future[torch.Tensor]:
    """Replace ``tensor`` by the sum of all ranks' tensors, in place, and return it.

        mpiddp.all_reduce(tensor)
        mpiddp.all_reduce(tensor, "ring:segments=4", op="average")
        future = mpiddp.all_reduce(gradients, async_op=True)  # Then compute something else.
        future.wait()

    Args:
        tensor: of any shape; float64, float32, float16, bfloat16, int64 or int32; on CPU or GPU.
        algorithm: ``auto``, or a registered one, for example ``ring:segments=4``. Its docstring has
            its steps, bytes and memory with messages. In shared memory it takes 256 KiB for each
            rank whose memory is private, and room for exchanged chunks.
        transport: ``shared-memory``, ``mpi``, ``shared-memory+mpi`` (the first inside nodes, the
            second between them), ``torch`` (point-to-point over Gloo or NCCL), or ``auto``.
        op: sum, average, product, min or max; or SUM, AVG, PRODUCT, MIN, MAX of torch's ReduceOp.
        reduction_dtype: the type in which contributions are added, and partial sums travel; by
            default the tensor's own, but float32 for float16 and bfloat16.
        fixed_order: the order of additions does not depend on an element's position in the buffer,
            so the result does not depend on how a buffer was cut.
        async_op: return a future at once, whose value is ``tensor``; leave the tensor alone until
            then. Such calls run in order, on a GPU on a stream of their own; other calls wait for
            them. If MPI has less than MPI_THREAD_MULTIPLE, those on CPUs are complete at once.

    ``auto`` follows the rule that `mpiddp.collectives.planner` states, or a tuning table. On
    tensors of ``shared_empty`` no copy is made inside a node. An algorithm whose dedicated servers
    contribute nothing (``central``) is refused.

    Raises:
        ScheduleError: the algorithm is no all-reduce; says why.
        ConfigurationError: what cannot be used; another rank of the node makes a different call.
            With MPIDDP_DEBUG=1 all calls are compared first: it says which ranks differ.
        PeerLostError: a rank did not come within the timeout, or left; says which, and the step.
    """
    communicator = ensure_communicator()
    options = (algorithm, transport, op, reduction_dtype, fixed_order)
    if async_op:
        return communicator.start(_find_request(Collective.ALL_REDUCE, *options), tensor)
    try:
        shortcut = communicator.find_shortcut(tensor, options)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        check_tensor(tensor)
        _check_options(algorithm, transport, op, reduction_dtype, 0)
        raise
    if shortcut is not None:
        communicator.make(shortcut, tensor)
        return tensor
    request = _find_request(Collective.ALL_REDUCE, *options)
    communicator.run(request, tensor)
    communicator.remember(request, tensor, options)
    return tensor


def prepare_all_reduce(
    tensor: torch.Tensor,
    algorithm: str = "auto",
    transport: str = "auto",
    op: Op = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
) -> Callable[[], torch.Tensor]:
    """Return a function that makes ``all_reduce`` on this tensor each time it is called.

        reduce_gradients = mpiddp.prepare_all_reduce(gradients)
        for batch in batches:
            compute(batch, gradients)
            reduce_gradients()

    It saves the microseconds in which ``all_reduce`` finds out what to do, like MPI's
    ``MPI_Allreduce_init``. The function belongs to the memory that the tensor has now. From now on
    torch refuses to resize that memory, and other memory that the tensor is given later
    (``tensor.data = …``, or a new ``grad`` after ``zero_grad()``) is not summed. Autograd is not
    told that the memory changes. All ranks prepare the same calls in the same order. Arguments and
    errors are those of ``all_reduce``.
    """
    request = _find_request(
        Collective.ALL_REDUCE, algorithm, transport, op, reduction_dtype, fixed_order
    )
    return ensure_communicator().prepare(request, tensor)


def reduce_scatter(
    tensor: torch.Tensor,
    algorithm: str = "auto",
    transport: str = "auto",
    op: Op = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Sum this rank's part of all ranks' tensors; return the part, a view of the flat tensor.

        mine = mpiddp.reduce_scatter(tensor)

    Rank r of n owns elements ⌊r·count/n⌋ to ⌊(r+1)·count/n⌋. The rest of the tensor is overwritten
    and undefined afterwards. Arguments and errors are those of ``all_reduce``; the algorithm must
    give each rank one part, for example ring or direct.
    """
    communicator = ensure_communicator()
    request = _find_request(
        Collective.REDUCE_SCATTER, algorithm, transport, op, reduction_dtype, fixed_order
    )
    return communicator.own_part(communicator.run(request, tensor))


def all_gather(
    tensor: torch.Tensor, algorithm: str = "auto", transport: str = "auto"
) -> torch.Tensor:
    """Fill ``tensor`` with every rank's part of it, in place, and return it.

        mpiddp.all_gather(tensor)

    Before the call each rank has its own part, as ``reduce_scatter`` describes it, in its position.
    The elements may have any type of 1, 2, 4 or 8 bytes. Errors are those of ``all_reduce``.
    """
    request = _find_request(Collective.ALL_GATHER, algorithm, transport)
    return ensure_communicator().run(request, tensor)


def broadcast(
    tensor: torch.Tensor, src: int = 0, algorithm: str = "auto", transport: str = "auto"
) -> torch.Tensor:
    """Replace ``tensor`` by that of rank ``src``, in place, and return it.

        mpiddp.broadcast(parameters, src=0)

    The elements may have any type of 1, 2, 4 or 8 bytes. A ``src`` that differs between ranks may
    leave tensors unchanged without an error; MPIDDP_DEBUG=1 finds that. Errors are those of
    ``all_reduce``.
    """
    request = _find_request(Collective.BROADCAST, algorithm, transport, root=src)
    return ensure_communicator().run(request, tensor)


def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    algorithm: str = "auto",
    transport: str = "auto",
    op: Op = "sum",
    *,
    reduction_dtype: torch.dtype | None = None,
    fixed_order: bool = False,
) -> torch.Tensor:
    """Replace ``tensor`` on rank ``dst`` by the sum of all ranks' tensors, and return it.

        mpiddp.reduce(loss, dst=0, op="average")

    On the other ranks it is overwritten and undefined afterwards. Arguments and errors are those
    of ``all_reduce``.
    """
    request = _find_request(
        Collective.REDUCE, algorithm, transport, op, reduction_dtype, fixed_order, dst
    )
    return ensure_communicator().run(request, tensor)


def barrier() -> None:
    """Wait until every rank has called it; queued work of a GPU is not waited for.

        mpiddp.barrier()

    Raises PeerLostError if a rank does not come within the timeout.
    """
    ensure_communicator().barrier()


def shared_empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A CPU tensor of zeros in memory that the other ranks of this node can read and write.

        gradients = mpiddp.shared_empty((1024, 1024))

    Collective calls on it make no copy inside a node. It belongs to the caller, and is freed like
    any tensor. Not collective, unless it is the first call of a session.

    Raises ConfigurationError if there is no session, or no memory left, in the machine or within
    the limit of a job's or a container's control group.
    """
    lengths = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(length, int) for length in lengths):
        raise ConfigurationError(f"shape: expected integers, found {shape!r}")
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(
            f"dtype: expected a torch type, found {dtype!r}; a shape is one argument, as (4, 3)"
        )
    return ensure_communicator().shared_memory.empty(lengths, dtype)


def describe_collectives(group: Any = None) -> dict[str, Any]:
    """How ranks wait, and which transports there are; collective if it is the first call.

        print(mpiddp.describe_collectives()["transports"])

    ``group``: a process group of torch.distributed whose backend is mpiddp; by default the calls of
    the session are described.

    Returns ``wait`` (spin, yield or sleep), ``transports`` (the preferred one first),
    ``single_copy`` (whether private memory is copied once), ``nodes`` (ranks of each), ``tuning``
    (which tuning table is used, and for what, or why it is not), ``notes`` (what is missing, and
    why), ``gloo`` (the calls of a group that Gloo has made so far, as it names them) and ``torch``
    (its version). Raises ConfigurationError for a group of another backend.
    """
    gloo: list[str] = []
    if group is None:
        communicator = ensure_communicator()
    elif found := find_implementation(group, "list_gloo_calls"):
        communicator, gloo = found.find_communicator(), found.list_gloo_calls()
    else:
        raise ConfigurationError(f"expected a group of backend mpiddp, found {group!r}")
    node_memory = communicator.node_memory
    return {
        "wait": communicator.waiter.policy.value,
        "transports": list(communicator.layout.transports),
        "single_copy": node_memory is not None and node_memory.can_copy,
        "nodes": list(communicator.layout.sizes),
        "tuning": communicator.layout.tuning.text,
        "notes": list(communicator.notes),
        "gloo": gloo,
        "torch": torch.__version__,
    }
