"""What start-up has opened in this process, and the order in which it is closed."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from mpiddp.launch.device.vendors import BACKENDS
from mpiddp.launch.device.visibility import find_module
from mpiddp.launch.failure.deadline import CLOSING, PhaseDeadlines
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.control import ControlChannel, free, hand_over
from mpiddp.launch.phases import Compute, JobRanks, StartUp
from mpiddp.lifeline.lifeline import Lifeline


class Resources:
    """What start-up has opened. Its owner calls ``close``."""

    def __init__(
        self,
        start_up: StartUp,
        ranks: JobRanks,
        compute: Compute | None,
        *,
        store: Any = None,
        has_group: bool = False,
        lifeline: Lifeline | None = None,
        deadlines: PhaseDeadlines | None = None,
    ) -> None:
        """``store``: torch's. ``has_group``: whether torch.distributed's default group was made
        here. ``deadlines``: of the close, once all ranks have come.
        """
        self.failure_handler = start_up.failure_handler
        self.on_close = start_up.on_close
        self.comm = ranks.comm
        self.store = store
        self.backend = compute.backend if compute is not None else ""
        self.has_group = has_group
        self._variables = start_up.variables
        self._module, self._kept_mpi = ranks.module, ranks.kept_mpi
        self._lifeline = lifeline
        self._deadlines = deadlines

    def close(self, control: ControlChannel) -> None:
        """Close group, store and MPI, in this order; rank 0's store outlives everyone's.

        Waits for all ranks, however long they still work. Ends the job if anything fails.
        """
        if self._module is not None and mpi.has_ended(self._module):
            # Past `KeptMpi`, by a library: nothing can be freed any more, and nobody waited for.
            hand_over(control)
            self.comm = None
            self.failure_handler.meet(communicator=None)
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
        is_on_gpus = self.backend in BACKENDS
        if not is_on_gpus:
            self._close_group()
        control.meet()
        if lifeline is not None and self._lifeline is None:
            lifeline.note_reopened()
        # All have come, so nothing takes long any more.
        deadlines = self._deadlines
        with deadlines.phase(CLOSING) if deadlines is not None else contextlib.nullcontext():
            if is_on_gpus:
                self._close_group()
            if self._lifeline is not None:
                self.failure_handler.meet(lifeline=None)
                self._lifeline.close()
            if control.world.rank != 0:
                self.store = None
            control.meet()
            self.store = None
            self._close_mpi(control)
        if deadlines is not None:
            deadlines.close()
        if self._lifeline is not None:
            self._lifeline.wait()
        self._variables.restore()

    def _close_group(self) -> None:
        """Close the group, a script's own too: a rank that left must not look alive to its peers.

        A script's group on GPUs is left to the end of the process, since NCCL may wait for peers.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_initialized():
            return
        if self.has_group or not find_module().is_initialized():
            torch.distributed.destroy_process_group()

    def _close_mpi(self, control: ControlChannel) -> None:
        if self.comm is not None:
            self.comm.Free()
            self.comm = None
        free(control)
        # Last, for a failure of the others.
        communicator = self.failure_handler.peers.communicator
        self.failure_handler.meet(communicator=None)
        if communicator is not None:
            communicator.Free()
        if self._kept_mpi is not None:
            self._kept_mpi.close()
