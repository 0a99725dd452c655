"""What start-up has opened in this process, and the order in which it is closed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpiddp.launch.device.binding import Cpus, bind_threads
from mpiddp.launch.failure.deadline import CLOSING, PhaseDeadlines
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.exported_variables import ExportedVariables
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.control import ControlChannel, free, hand_over
from mpiddp.lifeline.lifeline import Lifeline

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class Resources:
    """What start-up has opened. Its owner calls ``close`` or ``abandon``."""

    failure_handler: FailureHandler
    variables: ExportedVariables
    on_close: list[Callable[[], None]]
    """Called before anything is closed, the last added first."""
    module: Any
    """mpi4py.MPI, None without MPI."""
    kept_mpi: mpi.KeptMpi | None
    """None without MPI, and if another session of this process keeps it."""
    comm: MPI.Intracomm | None
    """The user's."""
    store: Any
    """torch's."""
    backend: str
    has_group: bool
    """Whether torch.distributed's default group was made here."""
    lifeline: Lifeline | None
    unbound: Cpus
    """Where this process could run before it was bound; empty if it was not."""
    deadlines: PhaseDeadlines | None
    """Of the close, once all ranks have come."""

    def close(self, control: ControlChannel) -> None:
        """Close group, store and MPI, in this order; rank 0's store outlives everyone's.

        Waits for all ranks, however long they still work. Ends the job if anything fails.
        """
        if self.module is not None and mpi.has_ended(self.module):
            # Past `KeptMpi`, by a library: nothing can be freed any more, and nobody waited for.
            hand_over(control)
            self.comm = None
            self.failure_handler.peers.forget_communicator()
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
        self._restore_process()

    def _close_group(self) -> None:
        """Close the group, a script's own too: a rank that left must not look alive to its peers.

        A script's group on GPUs is left to the end of the process, since NCCL may wait for peers.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_initialized():
            return
        if self.has_group or not torch.cuda.is_initialized():
            torch.distributed.destroy_process_group()

    def _restore_process(self) -> None:
        """As it was before; the companion ends. If start-up failed, nothing has been joined."""
        if self.lifeline is not None:
            lifeline, self.lifeline = self.lifeline, None
            self.failure_handler.peers.join_lifeline(None)
            lifeline.close()
            lifeline.wait()
        self.variables.restore()
        if self.unbound:
            bind_threads(self.unbound)

    def _close_mpi(self, control: ControlChannel) -> None:
        if self.comm is not None:
            self.comm.Free()
            self.comm = None
        free(control)
        # Last, for a failure of the others.
        self.failure_handler.peers.free_communicator()
        if self.kept_mpi is not None:
            self.kept_mpi.close()

    def abandon(self) -> None:
        """Undo a start-up that failed, as far as one process can, so that it can be tried again."""
        for work in reversed(self.on_close):
            work()
        distributed = sys.modules.get("torch.distributed")
        if self.has_group and distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        self.store = None
        if self.kept_mpi is not None:
            self.kept_mpi.release()
        self._restore_process()
