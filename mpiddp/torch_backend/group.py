"""A process group of torch.distributed whose collectives are mpiddp's.

What mpiddp's schedules do not do (messages between two ranks, gather, scatter, all-to-all, bitwise
operators, types that are not added) a Gloo backend of the same ranks does, which is made when it
is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from mpiddp.collectives import SHARED
from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.planner import Request
from mpiddp.collectives.transport.operators import TYPES
from mpiddp.schedules.schedule import Collective
from mpiddp.torch_backend.calls import CallQueue, CallWork
from mpiddp.torch_backend.members import Place, make_group_communicator
from mpiddp.torch_internals import add_prefix, find_scale, make_gloo

NAME = "mpiddp"
Tensors = list[torch.Tensor]
Operators = distributed.ReduceOp
_OPERATORS = {
    Operators.SUM: "sum",
    Operators.AVG: "average",
    Operators.PRODUCT: "product",
    Operators.MIN: "min",
    Operators.MAX: "max",
    Operators.PREMUL_SUM: "sum",
}
"""mpiddp's names of torch's operators."""
GLOO_TYPES = (*TYPES, torch.int8, torch.uint8, torch.bool)
"""Types that are added at all; the last ones by Gloo."""


def _request(kind: Collective, operator: str = "sum", root: int = 0) -> Request:
    """One object for equal calls, since plans are kept for the object."""
    key = (kind, operator, root)
    if key not in _requests:
        _requests[key] = Request(kind, root=root, operator=operator)
    return _requests[key]


_requests: dict[Any, Request] = {}
_IN_MEMORY = {
    operator: Request(Collective.REDUCE_SCATTER, "direct", SHARED, operator=operator)
    for operator in set(_OPERATORS.values())
}
"""Reduce-scatters in which a rank writes its own part alone."""


class Group(distributed.ProcessGroup):
    """The ranks of a process group, as torch.distributed and DDP call them.

    Tensors are on the CPU; other ones are refused. The methods' names and arguments are those of
    torch's ProcessGroup. Errors are DistNetworkError for a rank that is lost, and else
    DistBackendError.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place.rank, place.size)
        self._place = place
        self._timeout = place.timeout
        self._name = place.name
        self._description = ""
        self._calls = CallQueue(place.name)
        self._communicator: Communicator | None = None
        self._gloo: Any = None
        self._is_closed = False
        self._number = 0

    # ---- what torch asks of a group ---------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    def name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def _set_sequence_number_for_group(self) -> None:
        """Ranks count their calls from 0."""

    def _get_backend(self, device: torch.device) -> Any:
        return self._find_gloo()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def shutdown(self) -> None:
        """Wait for the calls that were begun, and give back what they used."""
        self._calls.close()
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None
        if self._gloo is not None:
            self._gloo.shutdown()
        self._gloo = None
        self._is_closed = True

    abort = shutdown

    # ---- mpiddp's ---------------------------------------------------------------------------

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: Any = None, **options: Any
    ) -> CallWork | Any:
        """All-reduce of one tensor, or of each of several."""
        # Gloo adds sparse ones.
        found = _list(tensors, dense=False)
        operator, waits = _read(opts, options)
        if not all(map(partial(_can_add, operator=operator), found)):
            return self._ask_gloo("allreduce", found, operator=operator)
        return self._make(partial(self._all_reduce, found, operator), found, waits=waits)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> CallWork | Any:
        return self.allreduce(tensors, opts)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: Any = None, **options: Any
    ) -> CallWork:
        """From ``opts.rootRank``."""
        found = _list(tensors)
        root = opts if isinstance(opts, int) else options.get("root", getattr(opts, "rootRank", 0))
        waits = not getattr(opts, "asyncOp", True)
        return self._make(partial(self._broadcast, found, root), found, waits=waits)

    def reduce(self, tensors: Any, opts: Any = None, *values: Any, **options: Any) -> Any:
        """To ``opts.rootRank``; the other ranks keep their tensors."""
        found = _list(tensors)
        root = opts if isinstance(opts, int) else options.get("root", getattr(opts, "rootRank", 0))
        operator, waits = _read(values[0] if values else opts, options)
        if not all(map(partial(_can_add, operator=operator), found)):
            _check_operator(found, operator)
            return self._ask_gloo_with_root("reduce", found, root, operator)
        return self._make(partial(self._reduce, found, root, operator), found, waits=waits)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, *_: Any, **options: Any
    ) -> CallWork:
        """Into a list of tensors, one from each rank; they may differ in length."""
        targets = outputs if isinstance(outputs[0], list) else [outputs]
        sources = _list(inputs)
        waits = not getattr(opts, "asyncOp", True)
        for row, source in zip(targets, sources, strict=True):
            if len(row) != self._place.size:
                raise _refuse(f"{len(row)} tensors for {self._place.size} ranks")
            if row[self._place.rank].numel() != source.numel():
                raise _refuse(
                    f"a tensor of {source.numel()} elements, and room for "
                    f"{row[self._place.rank].numel()} from this rank"
                )
        return self._make(partial(self._gather_lists, targets, sources), targets, waits=waits)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> CallWork:
        """Each input into a list of its own: ``outputs`` has a list for each rank."""
        rows = [[each[index] for each in outputs] for index in range(len(inputs))]
        return self.allgather(rows, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None, **_: Any
    ) -> CallWork:
        """Into one tensor, one rank's part after the other."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> CallWork:
        """Each input into its output."""
        for output, source in zip(_list(outputs), _list(inputs), strict=True):
            if output.numel() != source.numel() * self._place.size or output.dtype != source.dtype:
                raise _refuse(
                    f"an output of {output.numel()} {output.dtype} for {self._place.size} × "
                    f"{source.numel()} {source.dtype}"
                )
        waits = not getattr(opts, "asyncOp", True)
        return self._make(partial(self._gather, outputs, inputs), outputs, waits=waits)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *values: Any, **options: Any
    ) -> Any:
        """Of lists of tensors, one for each rank; they may differ in length."""
        rows = inputs if isinstance(inputs[0], list) else [inputs]
        targets = _list(outputs)
        operator, waits = _read(opts, options)
        for target, row in zip(targets, rows, strict=True):
            if len(row) != self._place.size:
                raise _refuse(f"{len(row)} tensors for {self._place.size} ranks")
            if row[self._place.rank].numel() != target.numel():
                raise _refuse(
                    f"an output of {target.numel()} elements for a part of "
                    f"{row[self._place.rank].numel()}"
                )
        if not all(map(partial(_can_add, operator=operator), targets)):
            return self._add_with_gloo(targets, rows, operator)
        return self._make(
            partial(self._scatter_lists, targets, rows, operator), targets, waits=waits
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None, **_: Any
    ) -> Any:
        """Of one tensor, whose parts lie one after the other."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Each input into its output."""
        for output, source in zip(_list(outputs), _list(inputs), strict=True):
            if source.numel() != output.numel() * self._place.size or output.dtype != source.dtype:
                raise _refuse(
                    f"an output of {output.numel()} {output.dtype} for {self._place.size} ranks' "
                    f"parts of {source.numel()} {source.dtype}"
                )
        operator, waits = _read(opts, {})
        if not all(map(partial(_can_add, operator=operator), outputs)):
            rows = [list(source.reshape(-1).chunk(self._place.size)) for source in inputs]
            return self._add_with_gloo(outputs, rows, operator)
        call = partial(self._scatter, outputs, inputs, operator)
        return self._make(call, outputs, waits=waits)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None, **_: Any) -> CallWork:
        """Until all ranks have come."""
        waits = not getattr(opts, "asyncOp", True)
        return self._make(lambda: self._find_communicator().barrier(), [], waits=waits)

    # ---- Gloo's -----------------------------------------------------------------------------

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._ask_gloo("send", _list(tensors), rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._ask_gloo("recv", _list(tensors), rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._ask_gloo("recv_anysource", _list(tensors), tag)

    def gather(self, outputs: Any, inputs: Tensors, opts: Any) -> Any:
        return self._ask_gloo("gather", outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any) -> Any:
        return self._ask_gloo("scatter", outputs, inputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, target_sizes: list[int],
        source_sizes: list[int], opts: Any = None,
    ) -> Any:  # fmt: skip
        if not (output.is_contiguous() and source.is_contiguous()):
            parts = [
                tensor.split(sizes or tensor.shape[0] // self._place.size)
                for tensor, sizes in ((output, target_sizes), (source, source_sizes))
            ]
            return self.alltoall(*map(list, parts), opts)
        values = () if opts is None else (opts,)
        return self._ask_gloo("alltoall_base", output, source, target_sizes, source_sizes, *values)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Through one tensor, which Gloo wants."""
        for tensor in (*outputs, *inputs):
            _check(tensor)
        source = torch.cat([each.reshape(-1) for each in inputs])
        sizes = [each.numel() for each in outputs]
        target = source.new_empty(sum(sizes))
        work = self._find_gloo().alltoall_base(
            target, source, sizes, [each.numel() for each in inputs]
        )

        def finish() -> None:
            work.wait()
            for part, output in zip(target.split(sizes), outputs, strict=True):
                output.copy_(part.view(output.shape))

        return self._make(finish, outputs, waits=not getattr(opts, "asyncOp", True))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Raises RuntimeError that names a rank which does not come in time."""
        self._find_gloo().monitored_barrier(timeout or self._timeout, wait_all_ranks)

    # ---- how ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise distributed.DistBackendError("mpiddp: this process group has been destroyed")

    def _make(self, call: Callable[[], object], tensors: list[Any], *, waits: bool) -> CallWork:
        self._check_open()
        self._number += 1
        return self._calls.make(call, tensors, waits=waits)

    def _find_communicator(self) -> Communicator:
        """Made by the first call, in which all ranks take part."""
        if self._communicator is None:
            self._communicator = make_group_communicator(self._place, self._find_gloo)
        return self._communicator

    def _find_gloo(self) -> Any:
        """Its connections are made when a pair of ranks first talks."""
        self._check_open()
        if self._gloo is None:
            place = self._place
            # Its own connection: a store keeps out other threads while Gloo waits in it.
            store = add_prefix("gloo", place.store.clone())
            self._gloo = make_gloo(store, place.rank, place.size, self._timeout)
        return self._gloo

    def _ask_gloo(self, method: str, *values: Any, operator: Any = None) -> Any:
        """``values``: the tensors of the result come first; other ones are left as they are."""
        tensors = [tensor for value in values for tensor in _flatten(value)]
        for tensor in tensors:
            _check(tensor)
        self._number += 1
        if operator is not None:
            _check_operator(tensors, operator)
            options = distributed.AllreduceOptions()
            options.reduceOp = operator
            values = (*values, options)
        # Gloo takes no notice of strides.
        rows = [_copy_contiguous(value) for value in values]
        gloo = self._find_gloo()
        try:
            work = getattr(gloo, method)(*rows)
        except RuntimeError as error:
            types = ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))
            raise _refuse(f"{method} of {types}, which Gloo refuses: {error}") from error
        if all(map(_is_plain, tensors)):
            return work
        results = [] if method == "send" else _flatten(values[0])

        def finish() -> None:
            work.wait()
            for target, row in zip(results, _flatten(rows[0]), strict=False):
                target.detach().copy_(row)

        return self._make(finish, results, waits=False)

    def _ask_gloo_with_root(self, method: str, found: Tensors, root: int, operator: Any) -> Any:
        options = distributed.ReduceOptions()
        options.reduceOp, options.rootRank = operator, root
        return self._ask_gloo(method, found, options)

    def _add_with_gloo(self, targets: Tensors, rows: list[Tensors], operator: Any) -> Any:
        """Reduce-scatters of what mpiddp does not add: of Gloo's all-reduces a part is kept."""
        sums = [torch.cat([each.reshape(-1) for each in row]) for row in rows]
        works = [self._ask_gloo("allreduce", [each], operator=operator) for each in sums]

        def finish() -> None:
            for work, total, row, target in zip(works, sums, rows, targets, strict=True):
                work.wait()
                part = total.split([each.numel() for each in row])[self._place.rank]
                target.copy_(part.view(target.shape))

        return self._make(finish, targets, waits=False)

    def _all_reduce(self, tensors: Tensors, operator: Any) -> None:
        request = _request(Collective.ALL_REDUCE, _OPERATORS[_kind(operator)])
        for tensor in tensors:
            with _Flat(tensor) as flat:
                _scale(flat, operator)
                self._find_communicator().run(request, flat)

    def _broadcast(self, tensors: Tensors, root: int) -> None:
        request = _request(Collective.BROADCAST, root=root)
        for tensor in tensors:
            with _Flat(tensor) as flat:
                self._find_communicator().run(request, flat.view(torch.uint8))

    def _reduce(self, tensors: Tensors, root: int, operator: Any) -> None:
        request = _request(Collective.REDUCE, _OPERATORS[_kind(operator)], root)
        for tensor in tensors:
            flat = tensor.detach().reshape(-1).clone()
            _scale(flat, operator)
            self._find_communicator().run(request, flat)
            if self._place.rank == root:
                tensor.detach().copy_(flat.view(tensor.shape))

    def _gather(self, outputs: Tensors, inputs: Tensors) -> None:
        request = _request(Collective.ALL_GATHER)
        for output, source in zip(outputs, inputs, strict=True):
            with _Flat(output, keeps=False) as flat:
                count, rank = source.numel(), self._place.rank
                own = flat[count * rank : count * (rank + 1)]
                if own.data_ptr() != source.data_ptr():
                    own.copy_(source.detach().reshape(-1))
                self._find_communicator().run(request, flat.view(torch.uint8))

    def _gather_lists(self, rows: list[Tensors], sources: Tensors) -> None:
        for row, source in zip(rows, sources, strict=True):
            sizes = [each.numel() for each in row]
            whole = source.detach().new_empty(sum(sizes))
            if len(set(sizes)) == 1:
                self._gather([whole], [source])
            else:
                parts = whole.split(sizes)
                parts[self._place.rank].copy_(source.detach().reshape(-1))
                for root, part in enumerate(parts):
                    self._broadcast([part], root)
            for part, target in zip(whole.split(sizes), row, strict=True):
                target.detach().copy_(part.view(target.shape))

    def _scatter(self, outputs: Tensors, inputs: Tensors, operator: Any) -> None:
        for output, source in zip(outputs, inputs, strict=True):
            self._scatter_one(output, source.detach().contiguous().view(-1), operator)

    def _scatter_one(self, output: torch.Tensor, source: torch.Tensor, operator: Any) -> None:
        """``source`` is as it was afterwards."""
        communicator, name = self._find_communicator(), _OPERATORS[_kind(operator)]
        count, rank = output.numel(), self._place.rank
        begin, end = count * rank, count * (rank + 1)
        target = output.detach()
        if _kind(operator) == Operators.PREMUL_SUM or communicator.layout.transports[0] != SHARED:
            copy = source.clone()
            _scale(copy, operator)
            communicator.run(_request(Collective.REDUCE_SCATTER, name), copy)
            target.copy_(copy[begin:end].view(output.shape))
            return
        # No rank but this one reads or writes its part.
        own = source[begin:end]
        kept = own.clone()
        communicator.run(_IN_MEMORY[name], source)
        target.copy_(own.view(output.shape))
        own.copy_(kept)

    def _scatter_lists(self, targets: Tensors, rows: list[Tensors], operator: Any) -> None:
        for target, row in zip(targets, rows, strict=True):
            if len({each.numel() for each in row}) == 1:
                whole = torch.cat([each.detach().reshape(-1) for each in row])
                self._scatter_one(target, whole, operator)
                continue
            for root, each in enumerate(row):
                copy = each.detach().clone()
                self._reduce([copy], root, operator)
                if root == self._place.rank:
                    target.detach().copy_(copy.view(target.shape))


class _Flat:
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


def _list(tensors: Any, *, dense: bool = True) -> Tensors:
    """torch passes a list, or one tensor; each is checked."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in found:
        _check(tensor)
        if dense and tensor.layout is not torch.strided:
            raise _refuse(f"a tensor of layout {tensor.layout}, and needs a dense one")
    return found


def _flatten(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _flatten(each)]
    return []


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_contiguous()


def _copy_contiguous(value: Any) -> Any:
    """``value``, or a copy of a tensor whose elements do not lie one after the other."""
    if isinstance(value, torch.Tensor):
        return value if _is_plain(value) else value.detach().contiguous()
    return [*map(_copy_contiguous, value)] if isinstance(value, list | tuple) else value


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise _refuse(
            f"a tensor on {tensor.device}, and backend mpiddp works on CPU tensors: use "
            'init_process_group("cpu:mpiddp,cuda:nccl")'
        )


def _check_operator(tensors: Tensors, operator: Any) -> None:
    """Raise DistBackendError for what neither mpiddp nor Gloo computes."""
    kind = _kind(operator)
    for tensor in tensors:
        if tensor.dtype not in GLOO_TYPES or kind in (Operators.AVG, Operators.PREMUL_SUM):
            raise _refuse(f"{kind.name} of {tensor.dtype}, which neither mpiddp nor Gloo computes")


def _refuse(what: str) -> Exception:
    return distributed.DistBackendError(f"mpiddp: this call has {what}")


def _read(opts: Any, options: dict[str, Any]) -> tuple[Any, bool]:
    """The operator, and whether the caller waits for the call at once."""
    if isinstance(opts, distributed.ReduceOp | distributed.ReduceOp.RedOpType):
        return opts, False
    operator = options.get("op", getattr(opts, "reduceOp", Operators.SUM))
    return operator, not getattr(opts, "asyncOp", True)


def _kind(operator: Any) -> Any:
    return getattr(operator, "op", operator)


def _can_add(tensor: torch.Tensor, operator: Any) -> bool:
    kind = _kind(operator)
    if tensor.layout is not torch.strided or tensor.dtype not in TYPES or kind not in _OPERATORS:
        return False
    return tensor.dtype.is_floating_point or kind != Operators.AVG


def _scale(flat: torch.Tensor, operator: Any) -> None:
    if _kind(operator) == Operators.PREMUL_SUM:
        flat.mul_(find_scale(operator))
