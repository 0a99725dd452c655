"""A process group of torch.distributed whose collectives are mpiddp's.

What mpiddp's schedules do not do (messages between two ranks, gather, scatter, all-to-all, bitwise
operators, types that are not added) a Gloo backend of the same ranks does, which is made when it
is first needed.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from mpiddp.collectives.communicator import Communicator
from mpiddp.torch_backend.call_queue import CallQueue
from mpiddp.torch_backend.gloo_calls import GlooCalls
from mpiddp.torch_backend.members import Place
from mpiddp.torch_backend.monitored_barrier import MonitoredBarrier
from mpiddp.torch_backend.own_calls import OwnCalls, start_all_reduce, start_broadcast, start_gather
from mpiddp.torch_backend.tensors import (
    Tensors,
    find_root,
    is_waited_for,
    list_tensors,
    make_error,
    read_options,
)
from mpiddp.torch_internals import add_prefix, find_backend_base, keep_from_compiler, list_groups

NAME = "mpiddp"
CPU_BACKEND = "mpiddp_part"
"""Of the backend that stands beside others in a group."""
BACKEND_BASE = find_backend_base()
GROUP_BASE: Any = distributed.ProcessGroup


# torch's signatures are overloads: the methods here take what any release passes.
@keep_from_compiler
class _Calls:
    """The ranks of a process group, as torch.distributed and DDP call them.

    Tensors are on the CPU; other ones are refused. The methods' names and arguments are those of
    torch's ProcessGroup. Errors are DistNetworkError for a rank that is lost, and else
    DistBackendError.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place.rank, place.size)  # type: ignore[call-arg]
        self._place = place
        self._timeout = place.timeout
        self._name = place.name
        self._description = ""
        self._own = own = OwnCalls(place)
        self._calls = CallQueue(place.name, lambda: own.delay)
        self._monitored = MonitoredBarrier(place)
        self._gloo = GlooCalls(place, self._calls, self.set_timeout)

    # ---- what torch asks of a group ---------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._description = description

    name = getBackendName
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.begun

    def _set_sequence_number_for_group(self) -> None:
        """Ranks count their calls from 0."""

    def list_calls(self) -> list[dict[str, Any]]:
        """The last calls, for reports of a hang: fields of a `RecordedCall`."""
        shared = {"backend": NAME, "group": self._name, "members": self._place.ranks}
        rows = self._calls.list_calls()
        for row in rows:
            if row.pop("is_under_way"):
                known = self._own.describe_call()
                row |= {name: known[name] for name in ("type", "seconds") if name in known}
        return [shared | row for row in rows]

    def is_broken(self) -> bool:
        """Whether a call failed or was interrupted, so that the ranks' next ones do not match."""
        return self._own.has_failed

    @property
    def _device_types(self) -> list[torch.device]:
        """Those whose backend torch sets the timeout of.

        None before the group is known: torch 2.15 would attach a recorder to it, which fails.
        """
        return [torch.device("cpu")] if self in list_groups() else []

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo.find()

    def set_timeout(self, timeout: timedelta) -> None:
        """For calls that begin from now on."""
        self._timeout = timeout
        self._own.set_timeout(timeout)
        self._gloo.set_timeout(timeout)

    def shutdown(self) -> None:
        """Wait for the calls that were begun, and give back what they used."""
        self._calls.close()
        self._own.close()
        self._gloo.close()

    abort = shutdown

    # ---- mpiddp's ---------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, **options: Any) -> Any:
        """All-reduce of one tensor, or of each of several."""
        reduction, waits = read_options(opts, options)
        if shortcut := self._own.find_shortcut(tensors, reduction):
            return self._calls.make("all_reduce", shortcut, tensors, waits=waits)
        # Gloo adds sparse ones.
        found = list_tensors(tensors, dense=False)
        if not reduction.can_add(found):
            return self._gloo.all_reduce(found, reduction)
        infers = torch.is_inference_mode_enabled()
        call = partial(self._own.all_reduce, found, reduction, infers)
        gloo = self._own.find_direct(found, reduction) if len(found) == 1 else None
        start = partial(start_all_reduce, gloo, found[0], reduction) if gloo else None
        return self._calls.make("all_reduce", call, found, waits=waits, start=start)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, **options: Any) -> Any:
        """From ``opts.rootRank``."""
        found = list_tensors(tensors)
        root = find_root(opts, options)
        waits = is_waited_for(opts)
        call = partial(self._own.broadcast, found, root)
        gloo = self._own.find_direct(found) if len(found) == 1 else None
        start = partial(start_broadcast, gloo, found[0], root) if gloo else None
        return self._calls.make("broadcast", call, found, waits=waits, start=start)

    def reduce(self, tensors: Any, opts: Any = None, *values: Any, **options: Any) -> Any:
        """To ``opts.rootRank``; the other ranks keep their tensors."""
        found = list_tensors(tensors)
        root = find_root(opts, options)
        reduction, waits = read_options(values[0] if values else opts, options)
        if not reduction.can_add(found):
            return self._gloo.reduce(found, root, reduction)
        call = partial(self._own.reduce, found, root, reduction)
        return self._calls.make("reduce", call, found, waits=waits)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, *_: Any, **options: Any
    ) -> Any:
        """Into a list of tensors, one from each rank; they may differ in length."""
        targets = outputs if isinstance(outputs[0], list) else [outputs]
        sources = list_tensors(inputs)
        waits = is_waited_for(opts)
        self._check_rows(targets, sources)
        call = partial(self._own.gather_lists, targets, sources)
        return self._calls.make("all_gather", call, targets, waits=waits)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Any:
        """Each input into a list of its own: ``outputs`` has a list for each rank."""
        rows = [[each[index] for each in outputs] for index in range(len(inputs))]
        return self.allgather(rows, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None, **_: Any
    ) -> Any:
        """Into one tensor, one rank's part after the other."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Each input into its output."""
        self._check_parts(list_tensors(outputs), list_tensors(inputs))
        waits = is_waited_for(opts)
        call = partial(self._own.gather, outputs, inputs)
        is_one = len(outputs) == 1 and outputs[0].numel()
        gloo = self._own.find_direct([*outputs, *inputs]) if is_one else None
        start = partial(start_gather, gloo, outputs[0], inputs[0]) if gloo else None
        return self._calls.make("all_gather_single", call, outputs, waits=waits, start=start)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *values: Any, **options: Any
    ) -> Any:
        """Of lists of tensors, one for each rank; they may differ in length."""
        rows = inputs if isinstance(inputs[0], list) else [inputs]
        targets = list_tensors(outputs)
        reduction, waits = read_options(opts, options)
        self._check_rows(rows, targets)
        if not reduction.can_add(targets):
            return self._gloo.reduce_scatter(targets, rows, reduction)
        call = partial(self._own.scatter_lists, targets, rows, reduction)
        return self._calls.make("reduce_scatter", call, targets, waits=waits)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None, **_: Any
    ) -> Any:
        """Of one tensor, whose parts lie one after the other."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Each input into its output."""
        self._check_parts(list_tensors(inputs), list_tensors(outputs))
        reduction, waits = read_options(opts, {})
        if not reduction.can_add(outputs):
            rows = [list(source.reshape(-1).chunk(self._place.size)) for source in inputs]
            return self._gloo.reduce_scatter(outputs, rows, reduction)
        call = partial(self._own.scatter, outputs, inputs, reduction)
        return self._calls.make("reduce_scatter_single", call, outputs, waits=waits)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None, **_: Any) -> Any:
        """Until all ranks have come; within a timeout, which all of them must pass then."""
        limit = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", timeout)
        waits = is_waited_for(opts)
        # In options without one it is negative.
        if limit is not None and limit > timedelta(0):
            call = partial(self._monitored.pass_within, limit)
            return self._calls.make("barrier", call, [], waits=waits)
        gloo = self._own.find_direct([])
        start = gloo.barrier if gloo else None
        return self._calls.make("barrier", self._own.barrier, [], waits=waits, start=start)

    def _check_rows(self, rows: list[Tensors], tensors: Tensors) -> None:
        """Each row has a tensor for each rank, that for this one as long as its own."""
        for row, own in zip(rows, tensors, strict=True):
            if len(row) != self._place.size:
                raise make_error(f"{len(row)} tensors for {self._place.size} ranks")
            if (found := row[self._place.rank].numel()) != own.numel():
                raise make_error(
                    f"a tensor of {own.numel()} elements, and {found} in this rank's list"
                )

    def _check_parts(self, wholes: Tensors, parts: Tensors) -> None:
        """Each whole has room for the part of each rank."""
        for whole, part in zip(wholes, parts, strict=True):
            if whole.numel() != part.numel() * self._place.size or whole.dtype != part.dtype:
                raise make_error(
                    f"a tensor of {whole.numel()} {whole.dtype} for {self._place.size} × "
                    f"{part.numel()} {part.dtype}"
                )

    def find_communicator(self) -> Communicator:
        """Of mpiddp's calls; collective if none was made yet."""
        return self._own.find_communicator()

    def list_gloo_calls(self) -> list[str]:
        """The calls so far that Gloo has made, as Gloo names them."""
        return sorted(self._gloo.used)

    # ---- Gloo's -----------------------------------------------------------------------------

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._gloo.ask("send", list_tensors(tensors), rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._gloo.ask("recv", list_tensors(tensors), rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._gloo.ask("recv_anysource", list_tensors(tensors), tag)

    def gather(self, outputs: Any, inputs: Tensors, opts: Any) -> Any:
        return self._gloo.ask("gather", outputs, inputs, opts)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any) -> Any:
        return self._gloo.ask("scatter", outputs, inputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, target_sizes: list[int],
        source_sizes: list[int], opts: Any = None,
    ) -> Any:  # fmt: skip
        return self._gloo.all_to_all_single(output, source, target_sizes, source_sizes, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self._gloo.alltoall(outputs, inputs, opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Raises RuntimeError that names a rank which does not come in time, in seconds or as
        timedelta."""
        # C++ passes it among options.
        limit = self._timeout if timeout is None else getattr(timeout, "timeout", timeout)
        if not isinstance(limit, timedelta):
            limit = timedelta(seconds=limit)
        self._monitored.wait(limit, wait_all_ranks=wait_all_ranks)


class Group(_Calls, GROUP_BASE):  # type: ignore[misc]
    """A process group, for tensors on CPUs alone.

    Its calls need not go through C++, as those of a CpuBackend do. They are some 10 µs quicker, and
    their works can be asked whether they are complete.
    """


class CpuBackend(_Calls, BACKEND_BASE or object):  # type: ignore[misc]
    """The backend for CPUs of a group that has backends for other devices, from torch 2.14 on.

    torch passes on of its works wait() and get_future() only.
    """

    # What a backend in Python inherits asks itself, without end, in torch 2.14 and 2.15.
    supports_splitting = supports_coalescing = supports_shrinking = False
    supports_reconfigure = supports_window = False
    supports_time_estimate = _supports_time_estimate = False

    @property
    def options(self) -> Any:
        return BACKEND_BASE.Options(NAME, self._timeout)

    def split(self, store: Any, ranks: list[int], options: Any) -> CpuBackend:
        """The backend of a new group of these ranks of this one, as meshes of devices ask for."""
        place, name = self._place, options.group_name
        if place.rank not in ranks:
            # torch crashes (SIGSEGV) on None, which would say that.
            raise make_error(
                f"ranks {ranks} without rank {place.rank}: split_group must take each "
                "rank into a group; new_group takes some"
            )
        members = tuple(place.ranks[rank] for rank in ranks)
        own = add_prefix(f"split/{name}", place.store)
        return CpuBackend(Place(own, ranks.index(place.rank), members, options._timeout, name))
