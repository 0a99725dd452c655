"""What start-up has opened in this process, and the order in which it is closed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpiddp.errors import PeerLostError
from mpiddp.launch.binding import Cpus, bind_threads, find_cpus
from mpiddp.launch.control import ControlChannel
from mpiddp.launch.failure.deadline import CLOSING, Watch
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.heartbeat import Heartbeat
from mpiddp.launch.mpi import mpi

if TYPE_CHECKING:
    from mpi4py import MPI


class ExportedVariables:
    """Environment variables that are set until the session closes."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def export(self, variables: Mapping[str, str]) -> None:
        for name, value in variables.items():
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = value

    def restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class Resources:
    """What start-up has opened so far. Its owner calls ``close`` or ``abandon``."""

    failure_handler: FailureHandler
    variables: ExportedVariables = field(default_factory=ExportedVariables)
    on_close: list[Callable[[], None]] = field(default_factory=list)
    """Called before anything is closed, the last added first."""
    module: Any = None
    """mpi4py.MPI, None without MPI."""
    finalizes: bool = False
    """Whether MPI was initialised here."""
    comm: MPI.Intracomm | None = None
    store: Any = None
    backend: str = ""
    has_group: bool = False
    watch: Watch | None = None
    """Deadline of the close, once all ranks have come."""
    _unbound: Cpus = frozenset()
    """Where this process could run before it was bound."""
    heartbeat: Heartbeat | None = None

    def bind(self, cores: Cpus) -> None:
        """Let this process run on ``cores``, until the end of the session."""
        self._unbound = find_cpus()
        bind_threads(cores)

    def _unbind(self) -> None:
        if self._unbound:
            bind_threads(self._unbound)

    def close(self, control: ControlChannel) -> None:
        """Close group, store and MPI, in this order; rank 0's store outlives everyone's.

        Waits for all ranks, however long they still work, but not for one that has not been heard
        of for the channel's timeout. Ends the job where anything fails.
        """
        try:
            with contextlib.ExitStack() as stack:
                # Whatever fails before, what the launch has opened is closed.
                stack.callback(self._close_launch, control)
                for work in self.on_close:
                    stack.callback(work)
        except BaseException as error:
            # Nobody else would: hooks are gone by now, and at the end of a program errors pass.
            self.failure_handler.fail(error)
            raise

    def _close_launch(self, control: ControlChannel) -> None:
        # NCCL may wait for its peers, so it waits for them to come.
        is_nccl = self.backend == "nccl"
        if not is_nccl:
            self._close_group()
        self._meet(control)
        # All have come, so nothing takes long any more.
        with self.watch.phase(CLOSING) if self.watch is not None else contextlib.nullcontext():
            if is_nccl:
                self._close_group()
            if self.heartbeat is not None:
                self.heartbeat.stop()
                self.heartbeat = None
            if control.world.rank != 0:
                self._drop_store()
            self._meet(control)
            self._drop_store()
            self._close_mpi(control)
        if self.watch is not None:
            self.watch.close()
        self.variables.restore()
        self._unbind()

    def _meet(self, control: ControlChannel) -> None:
        """Wait until all ranks are here, or one is lost."""
        heartbeat = self.heartbeat
        for _ in control._meet(heartbeat.period if heartbeat is not None else float("inf")):
            lost = heartbeat.find_silent() if heartbeat is not None else None
            if lost is not None:
                raise PeerLostError(
                    f"{self.failure_handler.peers.describe_rank(lost)} has not been heard of for "
                    f"{control.timeout:g} s, while this rank waits for it at the end of the "
                    "session: it was killed or stopped, or its node is down"
                )

    def _close_group(self) -> None:
        """Close the group, a script's own too: a rank that left must not look alive to its peers.

        A script's group on GPUs is left to the end of the process, since NCCL may wait for peers.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_initialized():
            return
        if self.has_group or not torch.cuda.is_initialized():
            torch.distributed.destroy_process_group()

    def _drop_store(self) -> None:
        self.store = self.failure_handler.peers.store = None

    def _close_mpi(self, control: ControlChannel) -> None:
        if self.comm is not None:
            self.comm.Free()
            self.comm = None
        control._free()
        # Last, for a failure of the others.
        peers = self.failure_handler.peers
        if peers.communicator is not None:
            communicator, peers.communicator = peers.communicator, None
            communicator.Free()
        if self.finalizes:
            mpi.finalize(self.module)

    def abandon(self) -> None:
        """Undo a start-up that failed, as far as one process can: for a notebook's next try."""
        for work in reversed(self.on_close):
            work()
        distributed = sys.modules.get("torch.distributed")
        if self.has_group and distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        self._drop_store()
        self.variables.restore()
        self._unbind()
