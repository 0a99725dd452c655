"""A started launch: what `startup.start` hands out, and the order in which it is closed."""

from __future__ import annotations

import array
import atexit
import contextlib
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mpiddp.errors import SUCCESS, ConfigurationError, PeerLostError
from mpiddp.launch.failure.deadline import CLOSING, Watch
from mpiddp.launch.failure.error_report import exit_code
from mpiddp.launch.failure.failure import WayOut
from mpiddp.launch.failure.heartbeat import Heartbeat
from mpiddp.launch.mpi import mpi
from mpiddp.launch.rendezvous import store
from mpiddp.launch.world import World, solitary_world

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

T = TypeVar("T")

LONGEST_TIMEOUT = 1e6
"""Seconds; what torch's timers hold."""

_current: Session | None = None
"""The session that is open in this process."""


def current_session() -> Session:
    """The session that is open. Raises ConfigurationError if there is none."""
    if _current is None:
        raise ConfigurationError("there is no session: call mpiddp.init() first")
    return _current


@dataclass(frozen=True)
class Options:
    """What a launch can be told."""

    backend: str = "auto"
    """``nccl``, ``gloo``, or ``auto``: NCCL when every rank has its own GPU, else Gloo."""
    timeout: float = 300.0
    """Seconds for each phase of start-up and for each collective; over NCCL, collectives have 30
    seconds more, counted from the moment in which they are queued."""
    interface: str = "auto"
    """``auto``, ``NAME``, ``HOST=NAME,…``, or NCCL's syntax (``^docker,lo``, ``=eth0``)."""
    allow_shared_gpu: bool = False
    """Whether several ranks may use one GPU: with Gloo, or with NCCL 2.30 or newer and
    NCCL_MULTI_RANK_GPU_ENABLE=1."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"timeout: expected seconds above 0 and up to {LONGEST_TIMEOUT:g}, "
                f"found {self.timeout}"
            )


class Session:
    """A started launch. Use it as a context manager, or call ``close``.

    `startup.start` fills it in phase by phase.
    """

    def __init__(self, way_out: WayOut, timeout: float) -> None:
        self._way_out = way_out
        self._timeout = timeout
        self._process = os.getpid()
        self._own: MPI.Intracomm | None = None
        """For the methods below; whatever is pending on ``comm`` is the user's."""
        self._module: Any = None
        self._finalize = False
        self._store: Any = None
        self._group = False
        self._closed = False
        self._watch: Watch | None = None
        """For the end, while nothing else is left to do."""
        self._heartbeat: Heartbeat | None = None
        self._changed: dict[str, str | None] = {}
        self._on_close: list[Callable[[], None]] = []
        self.collectives: Any = None
        """What ``mpiddp.all_reduce`` and its kin have made for this session, once they are used."""
        self.world: World = solitary_world()
        self.comm: MPI.Intracomm | None = None
        """An mpi4py communicator over all ranks, for the user's messages; None without MPI."""
        self.device: torch.device
        """This rank's GPU, or the CPU."""
        self.backend = ""
        """``nccl`` or ``gloo``."""
        self.threads = 1
        """CPU threads of this rank."""
        self.meeting: store.Meeting
        """Where the store is."""
        self.seconds: Mapping[str, float] = {}
        """How long each phase of start-up took its slowest rank; on rank 0, empty on the others."""

    def agree(self, value: T, what: str = "value") -> T:
        """Return ``value`` if all ranks hold the same one. Collective.

        ``value`` is made of None, bool, int, float, str, bytes, dataclasses of these, and
        tuples, lists and dicts of these; they are compared by their ``repr``.

        Raises:
            ConfigurationError: on every rank, saying which ranks differ from rank 0.
        """
        if self._own is None:
            return value
        digest = hashlib.sha256(repr(value).encode()).digest()
        first = self.broadcast(digest)
        if not self.any(digest != first):
            return value
        # Only now, when all have answered, is it worth asking everyone.
        rows = self._own.allgather((digest, repr(value)[:120]))
        odd = [rank for rank, row in enumerate(rows) if row[0] != first]
        names = ", ".join(map(str, odd[:8])) + (", …" if len(odd) > 8 else "")
        raise ConfigurationError(
            f"{what} must be the same on all ranks, but it differs from rank 0's on rank {names}: "
            f"rank 0 has {rows[0][1]}, rank {odd[0]} has {rows[odd[0]][1]}"
        )

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank. Collective.

        Raises:
            PeerLostError: not all ranks came within the session's timeout.
        """
        return self._find_first([flag])[0] is not None

    def _find_first(self, flags: Sequence[bool]) -> list[int | None]:
        """For each flag the lowest rank that has it up, or None. Collective, as `any`."""
        if self._own is None:
            return [0 if flag else None for flag in flags]
        from mpi4py import MPI

        none = self.world.size
        mine = array.array("q", [self.world.rank if flag else none for flag in flags])
        first = array.array("q", mine)
        self._wait(
            self._own.Iallreduce([mine, MPI.INT64_T], [first, MPI.INT64_T], op=MPI.MIN), "any"
        )
        return [rank if rank < none else None for rank in first]

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value``, on every rank; any object that pickle takes. Collective.

        Raises:
            PeerLostError: rank 0 did not come within the session's timeout.
        """
        if self._own is None:
            return value
        try:
            return mpi.SleepingCommunicator(
                self._own, lambda request: self._wait(request, "broadcast")
            ).bcast(value)
        except (EOFError, pickle.UnpicklingError) as error:
            raise _mismatch("session.broadcast()") from error

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank; any objects that pickle takes. Collective.

        Raises:
            PeerLostError: not all ranks came within the session's timeout.
        """
        if self._own is None:
            return [value]
        try:
            return mpi.SleepingCommunicator(
                self._own, lambda request: self._wait(request, "gather")
            ).allgather(value)
        except (EOFError, pickle.UnpicklingError) as error:
            raise _mismatch("session.gather()") from error

    def duplicate(self) -> MPI.Intracomm | None:
        """A communicator over all ranks for the caller alone, who frees it; None without MPI.

        Collective. Raises:
            PeerLostError: not all ranks came within the session's timeout.
        """
        if self._own is None:
            return None
        communicator, request = self._own.Idup()
        self._wait(request, "duplicate")
        return communicator

    @property
    def timeout(self) -> float:
        """Seconds for each collective."""
        return self._timeout

    def at_close(self, work: Callable[[], None]) -> None:
        """Have ``work`` done when the session is closed, before MPI and the group go."""
        self._on_close.append(work)

    def open(self) -> None:
        """Make it the current session of this process."""
        global _current
        _current = self

    def _leave(self) -> None:
        global _current
        if _current is self:
            _current = None

    def _wait(self, request: MPI.Request, what: str) -> None:
        try:
            came = mpi.wait(request, self._timeout)
        except RuntimeError as error:
            raise _mismatch(f"session.{what}()") from error
        if not came:
            raise PeerLostError(
                f"session.{what}() waited {self._timeout:g} s for the other ranks: every rank "
                "must call it; --timeout SECONDS waits longer"
            )

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

        Waits for all ranks, however long they still work, but not for one that has not been heard
        of for the session's timeout: that ends the job, as any failure does. Variables that were
        set at the start get their old values back, except the one that keeps child processes out
        of MPI.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            with contextlib.ExitStack() as stack:
                # Whatever fails before, what the launch has opened is closed.
                stack.callback(self._close_launch)
                for work in reversed(self._on_close):
                    stack.callback(work)
        except BaseException as error:
            # Nobody else would: hooks are gone by now, and at the end of a program errors pass.
            self._way_out.fail(error)
            raise

    def _close_launch(self) -> None:
        self.collectives = None
        self._leave()
        # NCCL may wait for its peers, so it waits for them to come.
        is_nccl = self.backend == "nccl"
        if not is_nccl:
            self._close_group()
        self._meet_to_leave()
        # All have come, so nothing takes long any more.
        with self._watch.phase(CLOSING) if self._watch is not None else contextlib.nullcontext():
            if is_nccl:
                self._close_group()
            if self._heartbeat is not None:
                self._heartbeat.stop()
                self._heartbeat = None
            if self.world.rank != 0:
                self._drop_store()
            self._meet_to_leave()
            self._drop_store()
            self._close_mpi()
        if self._watch is not None:
            self._watch.close()
        self._restore_variables()

    def _meet_to_leave(self) -> None:
        """Wait until all ranks are here, or one is lost."""
        if self._own is None:
            return
        heartbeat = self._heartbeat
        try:
            request = self._own.Ibarrier()
            while not mpi.wait(request, heartbeat.period if heartbeat else float("inf")):
                lost = heartbeat.find_silent() if heartbeat else None
                if lost is not None:
                    raise self._describe_loss(lost)
        except RuntimeError as error:
            raise _mismatch("the end of this rank's session") from error

    def _describe_loss(self, rank: int) -> PeerLostError:
        return PeerLostError(
            f"{self._way_out.describe_rank(rank)} has not been heard of for {self._timeout:g} s, "
            "while this rank waits for it at the end of the session: it was killed or stopped, or "
            "its node is down"
        )

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

    def _close_group(self) -> None:
        """Close the group, a script's own too: a rank that left must not look alive to its peers.

        A script's group on GPUs is left to the end of the process, since NCCL may wait for peers.
        """
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_initialized():
            return
        if self._group or not torch.cuda.is_initialized():
            torch.distributed.destroy_process_group()

    def _drop_store(self) -> None:
        self._store = None
        self._way_out.store = None

    def _close_mpi(self) -> None:
        if self.comm is not None:
            self.comm.Free()
            self.comm = None
        if self._own is not None:
            self._own.Free()
            self._own = None
        # Last, for a failure of the others.
        if self._way_out.communicator is not None:
            communicator, self._way_out.communicator = self._way_out.communicator, None
            communicator.Free()
        if self._finalize:
            mpi.finalize(self._module)

    def abandon(self) -> None:
        """Undo a start-up that failed, as far as one process can: for a notebook's next try."""
        self._closed = True
        self._leave()
        for work in reversed(self._on_close):
            work()
        distributed = sys.modules.get("torch.distributed")
        if self._group and distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        self._drop_store()
        self._restore_variables()


def _mismatch(what: str) -> PeerLostError:
    """What mpi4py says of calls that do not fit together is of no use to anybody."""
    return PeerLostError(
        f"{what} was matched with a different call on another rank: all ranks must make the same "
        "calls, and leave the session together"
    )
