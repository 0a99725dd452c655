"""A started launch: what `startup.start` hands out."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpiddp.errors import SUCCESS, ConfigurationError
from mpiddp.launch.failure.error_meaning import exit_code
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.mpi.control import ControlChannel, count_exchanges, hand_over
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.phases import Compute
from mpiddp.launch.rendezvous.store import Meeting
from mpiddp.launch.resources import Resources
from mpiddp.process.background import call_at_exit
from mpiddp.process.preemption_signals import PreemptionSignals

if TYPE_CHECKING:
    from mpi4py import MPI

_open: list[Session] = []
"""The sessions that are open in this process: a rank's own, and the one that its script opened."""


def find_session() -> Session | None:
    """The session that was opened last in this process and is still open, or None."""
    return _open[-1] if _open else None


def make_current(session: Session) -> None:
    """Have `find_session` return it until it is closed."""
    _open.append(session)


def find_failure_handler(session: Session) -> FailureHandler:
    """What ends the job if this process fails."""
    return session._resources.failure_handler


def is_broken(session: Session) -> bool:
    """Whether a collective call of this rank failed or was interrupted: later ones do not match."""
    begun, ended = count_exchanges(session)
    own = session.collectives
    return begun != ended or (own is not None and own.has_failed)


def current_session() -> Session:
    """The session that is open. Raises ConfigurationError if there is none."""
    if not _open:
        raise ConfigurationError("there is no session: call mpiddp.init() first")
    return _open[-1]


class Session(ControlChannel):
    """A started launch. Use it as a context manager, or call ``close``.

        with mpiddp.init() as session:
            model = net.to(session.device)
            seed = session.broadcast(time.time_ns())
            if session.any(not Path("data").exists()):
                print("rank", session.world.rank, "goes on without data")

    Attributes:
        world: rank, size and place of this process (`World`).
        device: this rank's GPU, or the CPU.
        gpus: numbers of the GPUs that the ranks of this node take, or one rank as the
            ``device_ids`` of nn.DataParallel.
        backend: ``nccl``, ``gloo`` or ``mpi``.
        threads: CPU threads of this rank.
        comm: an mpi4py communicator over all ranks, for the user's messages; None without MPI,
            and once the session is closed.
        meeting: address and port of the store.
        seconds: how long each phase of start-up took its slowest rank; empty but on rank 0.
    """

    def __init__(
        self,
        control: ControlChannel,
        resources: Resources,
        compute: Compute,
        meeting: Meeting,
        seconds: Mapping[str, float],
        signals: PreemptionSignals | None = None,
    ) -> None:
        """Takes over the communicator of ``control``, and ``resources``."""
        super().__init__(control.world, hand_over(control), control.timeout)
        self._resources = resources
        self._closed = False
        self._kept: LaunchOptions | None = None
        self._postponed: list[Callable[[], None]] = []
        self.device = compute.device
        self.gpus = compute.placements[self.world.local_rank].gpus
        self.backend = compute.backend
        self.threads = compute.threads
        self.meeting = meeting
        self.seconds = seconds
        self.signals = signals
        """Signals of a preemption that this process has noted; None if it notes none."""
        self.collectives: Any = None
        """What ``mpiddp.all_reduce`` and other collective calls share; None before the first."""
        self.collectives_lock = threading.Lock()
        """Held by the thread that makes ``collectives``."""
        self._calls = (0, 0)
        """What `count_calls` returns once the session is closed."""

    @property
    def comm(self) -> MPI.Intracomm | None:
        """mpi4py's, for the user's messages; None without MPI, and once the session is closed."""
        return self._resources.comm

    @property
    def store(self) -> Any:
        """torch's store, which all ranks share; None in a process that is alone."""
        return self._resources.store

    @property
    def has_group(self) -> bool:
        """Whether start-up made torch.distributed's default group."""
        return self._resources.has_group

    def ensure_collectives(self, make: Callable[[], Any]) -> Any:
        """``collectives``, which ``make()`` makes once; other threads wait for it meanwhile."""
        with self.collectives_lock:
            if self.collectives is None:
                self.collectives = make()
        return self.collectives

    def count_calls(self) -> tuple[int, int]:
        """The number of the last call of mpiddp's collectives, and of the last complete one.

        They are counted from 1, alike on all ranks.
        """
        collectives = self.collectives  # The main thread may close them meanwhile.
        if collectives is not None:
            begun, complete = collectives.count_calls()
            return begun, complete
        begun, complete = self._calls
        return begun + self.collectives_lock.locked(), complete

    def describe_call(self) -> dict[str, Any]:
        """The last call of mpiddp's collectives, for reports of a hang: number, whether it is
        complete; if it is not, name, shapes, type and seconds of its wait, as far as known."""
        begun, complete = self.count_calls()
        collectives = self.collectives
        more = collectives.describe_call() if collectives is not None else {}
        return {"number": begun, "is_complete": complete >= begun, **more}

    def at_close(self, work: Callable[[], None], *, last: bool = False) -> None:
        """Have ``work`` done when the session is closed, before MPI and the group go.

        What was registered last is done first; ``last``: after all others.
        """
        on_close = self._resources.on_close
        on_close.insert(0 if last else len(on_close), work)

    def postpone(self, work: Callable[[], None]) -> None:
        """Have collective work done by ``do_postponed``, or at the end of session or program.

        It is not done if the program fails before.
        """
        if not self._postponed:
            self.at_close(self.do_postponed)
            call_at_exit(self._end_postponed)
        self._postponed.append(work)

    def do_postponed(self) -> None:
        """Do now what was postponed, in its order. Collective."""
        while self._postponed:
            self._postponed.pop(0)()

    def _end_postponed(self) -> None:
        """At the end of the program, which an error does not change by itself."""
        if self._resources.failure_handler.is_own_process():
            try:
                self.do_postponed()
            except BaseException as error:
                self._resources.failure_handler.fail(error)
                raise

    @property
    def kept(self) -> LaunchOptions | None:
        """What it was started with, if functions that are called in this process share it."""
        return self._kept

    def keep(self, options: LaunchOptions | None) -> None:
        """Let the session outlast ``close`` and the end of ``with``; None: no more.

        They only do what was postponed then, and an error does not end the job.
        """
        self._kept = options

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and exit_code(error) != SUCCESS:
            if self._kept is not None:
                return
            self._resources.failure_handler.fail(error)
        self.close()

    def close(self) -> None:
        """Close group, store and MPI.

        Waits for all ranks, however long they still work. The job ends if one is lost meanwhile, or
        waits in a collective that this rank does not call.
        Variables that were set at the start get their old values back.
        """
        if self._closed or not self._resources.failure_handler.is_own_process():
            return
        if self._kept is not None:
            self.do_postponed()
            return
        self._closed = True
        atexit.unregister(self.close)
        # After the users' work, before the group goes.
        self._resources.on_close.insert(0, self._forget)
        self._resources.close(self)

    def _forget(self) -> None:
        self._calls = self.count_calls()
        self.collectives = None
        if self in _open:
            _open.remove(self)
