"""What start-up has opened in this process, and the order in which it is closed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpiddp.launch.device.binding import Cpus, bind_threads, find_cpus
from mpiddp.launch.failure.deadline import CLOSING, PhaseDeadlines
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.exported_variables import ExportedVariables
from mpiddp.launch.launcher.launcher import Launcher
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.control import ControlChannel, free
from mpiddp.lifeline.lifeline import Lifeline

if TYPE_CHECKING:
    from mpi4py import MPI


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
    deadlines: PhaseDeadlines | None = None
    lifeline: Lifeline | None = None
    _unbound: Cpus = frozenset()
    """Where this process could run before it was bound."""

    def start_mpi(
        self, module: Any, launcher: Launcher | None, *, is_joined: bool
    ) -> tuple[str, ...]:
        """Initialise MPI, unless ``is_joined``; returns the interfaces that it was told to use."""
        self.module = module
        if is_joined:
            return ()
        initialization = mpi.initialize(module, launcher)
        self.finalizes = initialization.here
        return initialization.interfaces

    def open_communicators(self) -> MPI.Intracomm:
        """Copies of MPI_COMM_WORLD: one for the user, and the one that is returned. Collective."""
        self.comm = self.module.COMM_WORLD.Dup()
        own: MPI.Intracomm = self.module.COMM_WORLD.Dup()
        return own

    def choose_backend(self, backend: str) -> None:
        self.backend = backend

    def open_store(self, store: Any) -> None:
        """Own torch's store."""
        self.store = store

    def note_group(self) -> None:
        """torch.distributed's default group was made here."""
        self.has_group = True

    def take_lifeline(self, lifeline: Lifeline) -> None:
        """Own this rank's connection to its companion."""
        self.lifeline = lifeline

    def take_deadlines(self, deadlines: PhaseDeadlines) -> None:
        """Of the close, once all ranks have come."""
        self.deadlines = deadlines

    def bind(self, cores: Cpus) -> None:
        """Let this process run on ``cores``, until the end of the session."""
        self._unbound = find_cpus()
        bind_threads(cores)

    def _unbind(self) -> None:
        if self._unbound:
            bind_threads(self._unbound)

    def close(self, control: ControlChannel) -> None:
        """Close group, store and MPI, in this order; rank 0's store outlives everyone's.

        Waits for all ranks, however long they still work. Ends the job where anything fails.
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
        # Of another session, if this one is opened in a script that a rank runs.
        lifeline = self.failure_handler.peers.lifeline
        if lifeline is not None:
            lifeline.note_closing(control.world.hostname, control.timeout)
        # NCCL may wait for its peers, so it waits for them to come.
        is_nccl = self.backend == "nccl"
        if not is_nccl:
            self._close_group()
        control.meet()
        if lifeline is not None and self.lifeline is None:
            lifeline.note_reopened()
        # All have come, so nothing takes long any more.
        deadlines = self.deadlines
        with deadlines.phase(CLOSING) if deadlines is not None else contextlib.nullcontext():
            if is_nccl:
                self._close_group()
            if self.lifeline is not None:
                self.failure_handler.peers.join_lifeline(None)
                self.lifeline.close()
            if control.world.rank != 0:
                self.store = None
            control.meet()
            self.store = None
            self._close_mpi(control)
        if deadlines is not None:
            deadlines.close()
        self._forget_lifeline()
        self.variables.restore()
        self._unbind()

    def _close_group(self) -> None:
        """Close the group, a script's own too: a rank that left must not look alive to its peers.

        A script's group on GPUs is left to the end of the process, since NCCL may wait for peers.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_initialized():
            return
        if self.has_group or not torch.cuda.is_initialized():
            torch.distributed.destroy_process_group()

    def _forget_lifeline(self) -> None:
        """Its process ends; where start-up failed, nothing has been joined."""
        if self.lifeline is not None:
            lifeline, self.lifeline = self.lifeline, None
            self.failure_handler.peers.join_lifeline(None)
            lifeline.close()
            lifeline.wait()

    def _close_mpi(self, control: ControlChannel) -> None:
        if self.comm is not None:
            self.comm.Free()
            self.comm = None
        free(control)
        # Last, for a failure of the others.
        self.failure_handler.peers.free_communicator()
        if self.finalizes:
            mpi.finalize(self.module)

    def abandon(self) -> None:
        """Undo a start-up that failed, as far as one process can, so that it can be tried again."""
        for work in reversed(self.on_close):
            work()
        distributed = sys.modules.get("torch.distributed")
        if self.has_group and distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        self.store = None
        self._forget_lifeline()
        self.variables.restore()
        self._unbind()
