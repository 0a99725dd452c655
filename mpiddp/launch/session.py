"""A started launch: what `startup.start` hands out, and the order in which it is closed."""

from __future__ import annotations

import array
import atexit
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mpiddp.errors import SUCCESS, ConfigurationError
from mpiddp.launch import mpi, rendezvous
from mpiddp.launch.failure import WayOut
from mpiddp.launch.report import exit_code
from mpiddp.launch.world import World, solitary_world

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What a launch can be told."""

    backend: str = "auto"
    """``nccl``, ``gloo``, or ``auto``: NCCL when every rank has its own GPU, else Gloo."""
    timeout: float = 300.0
    """Seconds for each phase of start-up and for each collective."""
    interface: str = "auto"
    """``auto``, ``NAME``, ``HOST=NAME,…``, or NCCL's syntax (``^docker,lo``, ``=eth0``)."""
    allow_shared_gpu: bool = False
    """Whether several ranks may use one GPU (with Gloo)."""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ConfigurationError(f"timeout: expected seconds > 0, found {self.timeout}")


class Session:
    """A started launch. Use it as a context manager, or call ``close``.

    `startup.start` fills it in phase by phase.
    """

    def __init__(self, way_out: WayOut) -> None:
        self._way_out = way_out
        self._module: Any = None
        self._finalize = False
        self._store: Any = None
        self._group = False
        self._closed = False
        self._changed: dict[str, str | None] = {}
        self._on_close: list[Callable[[], None]] = []
        self.world: World = solitary_world()
        self.comm: MPI.Intracomm | None = None
        """A communicator of mpiddp's own over all ranks, or None without MPI."""
        self.device: torch.device
        """This rank's GPU, or the CPU."""
        self.backend = ""
        """``nccl`` or ``gloo``."""
        self.threads = 1
        """CPU threads of this rank."""
        self.meeting: rendezvous.Meeting
        """Where the store is."""

    def agree(self, value: T, what: str = "value") -> T:
        """Return ``value`` if all ranks hold the same one. Collective.

        ``value`` is made of None, bool, int, float, str, bytes, dataclasses of these, and
        tuples, lists and dicts of these; they are compared by their ``repr``.

        Raises:
            ConfigurationError: on every rank, saying which ranks differ from rank 0.
        """
        if self.comm is None:
            return value
        digest = hashlib.sha256(repr(value).encode()).digest()
        first = self.broadcast(digest)
        if not self.any(digest != first):
            return value
        # Only now is it worth asking everyone.
        rows = self.comm.allgather((digest, repr(value)[:120]))
        odd = [rank for rank, row in enumerate(rows) if row[0] != first]
        names = ", ".join(map(str, odd[:8])) + (", …" if len(odd) > 8 else "")
        raise ConfigurationError(
            f"{what} must be the same on all ranks, but it differs from rank 0's on rank {names}: "
            f"rank 0 has {rows[0][1]}, rank {odd[0]} has {rows[odd[0]][1]}"
        )

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank. Collective."""
        if self.comm is None:
            return bool(flag)
        from mpi4py import MPI

        mine, result = array.array("b", [bool(flag)]), array.array("b", [0])
        mpi.wait(self.comm.Iallreduce([mine, MPI.INT8_T], [result, MPI.INT8_T], op=MPI.MAX))
        return bool(result[0])

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value``, on every rank; any object that pickle takes. Collective."""
        if self.comm is None:
            return value
        received: T = self.comm.bcast(value)
        return received

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and exit_code(error) != SUCCESS:
            self._way_out.fail(error)
        self.close()

    def close(self) -> None:
        """Close group, store and MPI, in this order; rank 0's store outlives everyone's.

        Waits for all ranks. Variables that were set at the start get their old values back.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for undo in self._on_close:
            undo()
        if self._group:
            import torch.distributed as distributed

            if distributed.is_initialized():
                distributed.destroy_process_group()
        if self.comm is not None:
            mpi.wait(self.comm.Ibarrier())
        if self.world.rank != 0:
            self._drop_store()
        if self.comm is not None:
            mpi.wait(self.comm.Ibarrier())
        self._drop_store()
        self._close_mpi()
        self._restore_variables()

    def export(self, variables: Mapping[str, str]) -> None:
        """Set environment variables until the session closes."""
        for name, value in variables.items():
            self._changed.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def _restore_variables(self) -> None:
        for name, value in self._changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _drop_store(self) -> None:
        self._store = None
        self._way_out.store = None

    def _close_mpi(self) -> None:
        if self._way_out.communicator is not None:
            self._way_out.communicator.Free()
            self._way_out.communicator = None
        if self.comm is not None:
            self.comm.Free()
            self.comm = None
        if self._finalize:
            self._module.Finalize()
