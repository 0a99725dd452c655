"""Ranks that this process starts once, and calls functions on: `mpiddp.ranks`."""

from __future__ import annotations

import contextlib
import linecache
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from mpiddp.errors import SUCCESS, ConfigurationError, MpiddpError
from mpiddp.launch.launcher.launcher import find_launcher, has_manager_hint
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.script.command_line import read_front, split
from mpiddp.launch.session import find_session
from mpiddp.options.checks import did_you_mean
from mpiddp.options.fields import list_fields
from mpiddp.remote import pickling
from mpiddp.remote.call import Call, Request, find_stacks
from mpiddp.remote.channel import Parcel
from mpiddp.remote.fingerprint import find_code, find_fingerprint
from mpiddp.remote.job import JobRequest, Member, RankJob, describe_ranks
from mpiddp.remote.rank_output import Sink
from mpiddp.remote.starter import End
from mpiddp.wording import count_noun, print_message, read_message

T = TypeVar("T")
PROGRAM = "mpiddp.remote.rank"
NEVER = float("inf")


class Ranks:
    """Ranks that wait for calls; made by `mpiddp.ranks`.

        losses = ranks.run(train, epochs=3)
        for member in ranks.members:
            member.rank, member.host, member.device

    They keep what they have loaded from call to call: MPI, torch, the process group, modules.
    Several threads may call: the ranks do one call after the other.

    Attributes:
        members: the ranks, with ``rank``, ``host``, ``process`` (its number), ``device``,
            ``threads`` and ``backend`` of each.
    """

    def __init__(self, request: JobRequest, seconds: float) -> None:
        """``seconds``: how long a call may take."""
        _refuse_ranks()
        self._request, self._seconds = request, seconds
        self._owner = os.getpid()
        self._count = 0
        self._turn = threading.Condition()
        self._queue: deque[object] = deque()
        """Calls that wait for their turn, and the one that runs."""
        self._turn_thread = 0
        """The thread whose turn it is."""
        self._running = ""
        """The function that runs."""
        self._began = 0.0
        self._is_closed = False
        self._is_told = False
        """Whether an error of a call has said that the ranks have ended."""
        self._job = self._start()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake = weakref.finalize(self, os.close, self._wake)

    def _start(self) -> RankJob:
        job = RankJob(self._request)
        # Called even if nobody closes them, at the latest when this process ends.
        self._end = weakref.finalize(self, _close_job, job, self._owner)
        return job

    @property
    def members(self) -> tuple[Member, ...]:
        return self._job.members

    def __len__(self) -> int:
        return len(self.members)

    def run(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> list[T]:
        """Run ``function(*arguments, **keywords)`` on every rank; what each returned, by rank.

            losses = ranks.run(train, epochs=3)

        Meanwhile what the ranks print appears here. The function goes by value if it is of
        ``__main__`` or of a notebook, else by its name. Each rank gets copies of the arguments,
        and this process copies of the results, tensors on the CPU. ``mpiddp.init()`` in the
        function gives the session. Ctrl-C interrupts the function on all ranks.

        Raises:
            RankFailedError: the function has raised on a rank, or a rank was lost, or the call's
                time is up.
            ConfigurationError: function or arguments cannot be sent, or the ranks have ended.
        """
        __tracebackhide__ = True
        return self.within(self._seconds).run(function, *arguments, **keywords)

    def submit(
        self, function: Callable[..., T], /, *arguments: Any, **keywords: Any
    ) -> Future[list[T]]:
        """As ``run``, without waiting for the end: the result is the list that ``run`` returns.

            future = ranks.submit(evaluate, model)
            accuracies = future.result()

        The arguments are copied now. ``interrupt()`` interrupts the function; ``future.cancel()``
        takes back a call whose turn has not come.
        """
        return self.within(self._seconds).submit(function, *arguments, **keywords)

    def within(self, seconds: float) -> LimitedRanks:
        """The same ranks, for calls that may take ``seconds``: ``ranks.within(60).run(…)``."""
        _check_seconds(seconds)
        return LimitedRanks(self, seconds)

    def stacks(self, *, full: bool = False) -> str:
        """Where each rank is, as ``python -m mpiddp stacks`` shows it; ``full``: whole stacks.

        Another thread may ask while a function runs.
        """
        self._check_open()
        return find_stacks(self._job, is_full=full) or "the ranks do not answer\n"

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the function that runs, if one does, on all ranks."""
        if os.getpid() != self._owner:
            return
        with self._turn:  # The descriptor stays open meanwhile.
            if self._running:
                os.eventfd_write(self._wake, 1)

    def restart(self) -> None:
        """End the ranks, and start as many again. What they have kept is lost.

        A message on standard error tells what `close` would raise.
        """
        self._check_open()
        with self._take_turn():
            was_told, self._is_told = self._is_told, True  # Calls refuse if no new ranks start.
            end = self._end()
            if end is not None and end.code and not was_told:
                print_message(str(self._job.explain("the ranks did not end well")))
            self._job, self._is_told = self._start(), False

    def close(self) -> None:
        """End the ranks. A function that runs is interrupted. A second call does nothing.

        Raises an MpiddpError if they do not end well, and no call has said so: a rank was lost
        since, or failed in what it does at its end, such as to write what it has saved.
        """
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        self.interrupt()
        with self._take_turn():
            end = self._end()
        self._close_wake()
        if end is not None and end.code and not self._is_told:
            raise self._job.explain("the ranks did not end well")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except MpiddpError:
            if kind is None:
                raise

    def __reduce__(self) -> str:
        raise TypeError("ranks stay in the process that started them, and this refers to them")

    def __repr__(self) -> str:
        state = self._describe_state()
        return f"<{count_noun(len(self), 'rank')}: {describe_ranks(self.members)}, {state}>"

    def _repr_html_(self) -> str:
        from mpiddp.remote.rank_table import draw_ranks

        state = self._describe_state()
        end = self._job.end
        return draw_ranks(self.members, state, end.lost_rank if end is not None else None)

    @property
    def state(self) -> str:
        """``waiting``, ``closed``, ``ended``, or which function runs."""
        if self._is_closed or os.getpid() != self._owner:
            return "closed"
        with self._turn:
            # While a call runs or waits, it looks for the end itself.
            end = self._job.end if self._queue else self._job.await_end(0)
        if end is not None:
            return "ended"
        return f"running {self._running}" if self._running else "waiting"

    def _describe_state(self) -> str:
        """The state, with how long a function has run, or why the ranks have ended."""
        state, end = self.state, self._job.end
        if state.startswith("running"):
            return f"{state} for {time.monotonic() - self._began:.0f} s"
        # There is no outcome if this process has ended them.
        reason = end.outcome.get("reason") if end is not None and state == "ended" else None
        return f"{state}: {reason}" if reason else state

    # One call

    def _pack(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Parcel:
        self._check_open()
        _check_function(function)
        try:
            return Parcel(*pickling.dump((function, arguments, dict(keywords))))
        except MpiddpError:
            raise
        except Exception as error:  # A ``__reduce__`` may raise anything.
            name = pickling.describe_function(function)
            raise ConfigurationError(
                f"{name} and its arguments cannot be sent to the ranks: "
                f"{type(error).__name__}: {read_message(error)}"
            ) from error

    def _run(self, seconds: float, function: Callable[..., Any], parcel: Parcel) -> list[Any]:
        """One call, in its turn."""
        if self._is_told:
            why = self._describe_state()
            raise ConfigurationError(f"these ranks have {why}; restart() starts them again")
        self._count += 1
        name = pickling.describe_function(function)
        fingerprint = find_fingerprint(function)
        request = Request(self._count, name, parcel, fingerprint, _find_sources(function), seconds)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)  # A wake-up that came too late for the call before.
        self._running, self._began = name, time.monotonic()
        try:
            self._check_open()  # A close() from now on interrupts this call.
            return Call(self._job, request, self._wake).run()
        finally:
            self._running = ""
            self._is_told = self._job.end is not None

    @contextlib.contextmanager
    def _take_turn(self, ticket: object | None = None) -> Iterator[None]:
        """Let callers use the ranks one after the other, in the order in which they came.

        Raises ConfigurationError in a thread that has the turn: it would wait for itself.
        """
        if self._turn_thread == threading.get_ident():
            raise ConfigurationError(
                "a signal handler or output= cannot call these ranks, or end them, while its own "
                "thread calls them: raise an exception there, or use another thread"
            )
        ticket = ticket or object()
        try:
            self._queue_up(ticket)
            with self._turn:
                self._turn.wait_for(lambda: self._queue[0] is ticket)
            self._turn_thread = threading.get_ident()
            yield
        finally:
            if self._turn_thread == threading.get_ident():
                self._turn_thread = 0
            self._leave_queue(ticket)

    def _queue_up(self, ticket: object) -> None:
        with self._turn:
            if ticket not in self._queue:
                self._queue.append(ticket)

    def _leave_queue(self, ticket: object) -> None:
        with self._turn:
            if ticket in self._queue:  # Ctrl-C may come at any moment.
                self._queue.remove(ticket)
            self._turn.notify_all()

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            raise ConfigurationError(
                "these ranks belong to another process, of which this one is a copy"
            )
        if self._is_closed:
            raise ConfigurationError("these ranks were closed: mpiddp.ranks(…) starts others")


@dataclass(frozen=True)
class LimitedRanks:
    """Ranks for calls with a time limit; made by `Ranks.within`."""

    ranks: Ranks
    seconds: float
    """Of each call."""

    def run(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> list[T]:
        """As `Ranks.run`."""
        __tracebackhide__ = True
        try:
            parcel = self.ranks._pack(function, arguments, keywords)
            with contextlib.closing(parcel), self.ranks._take_turn():
                return self.ranks._run(self.seconds, function, parcel)
        except (MpiddpError, KeyboardInterrupt) as error:
            # The traceback inside mpiddp does not help the reader.
            raise error.with_traceback(None) from None

    def submit(
        self, function: Callable[..., T], /, *arguments: Any, **keywords: Any
    ) -> Future[list[T]]:
        """As `Ranks.submit`. The time counts from the call's turn on."""
        parcel = self.ranks._pack(function, arguments, keywords)
        parcel.keep()
        future: Future[list[T]] = Future()
        ticket = object()
        self.ranks._queue_up(ticket)

        def work() -> None:
            with contextlib.closing(parcel), self.ranks._take_turn(ticket):
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    found = self.ranks._run(self.seconds, function, parcel)
                except BaseException as error:  # Whoever asks for the result gets it.
                    future.set_exception(error.with_traceback(None))
                else:
                    future.set_result(found)

        # A thread for each: a notebook shows what it prints below the cell that has started it.
        try:
            threading.Thread(target=work, name="mpiddp-call", daemon=True).start()
        except RuntimeError:  # There are too many.
            self.ranks._leave_queue(ticket)
            parcel.close()
            raise
        return future


def ranks(
    number: int | None = None,
    *,
    nodes: int | None = None,
    per_node: int | None = None,
    call_timeout: float = NEVER,
    variables: Mapping[str, str] | None = None,
    output: Sink | None = None,
    launcher: str = "auto",
    launcher_options: str = "",
    **options: Any,
) -> Ranks:
    """Start ranks, as ``python -m mpiddp`` does, and keep them for calls from this process.

        with mpiddp.ranks(2) as ranks:
            losses = ranks.run(train, epochs=3)

    This process loads no MPI and uses no GPU. The ranks end with ``with``, with ``close()``, or
    with this process.

    Args:
        number: of ranks; by default one for each GPU, else for each core; in a Slurm job as many
            as it has tasks.
        nodes: of the scheduler's job, with ``per_node`` ranks on each.
        call_timeout: seconds that a call may take; by default as long as it wants.
        variables: added to the environment of the ranks.
        output: called with rank, ``out`` or ``err``, and text for what the ranks print, in place
            of printing it with labels.
        launcher: as the front's option, with ``launcher_options``.
        **options: those of `mpiddp.init`, and ``stall_timeout``, ``site_defaults`` and
            ``debug``.

    Raises:
        ConfigurationError: a bad argument; this process is a rank itself.
        LaunchError, UnreachableError: the ranks do not start.
    """
    _check_seconds(call_timeout)
    names = [field.name for field in fields(LaunchOptions)]
    for name in options:
        if name not in names:
            raise ConfigurationError(
                f"mpiddp.ranks has no argument {name}{did_you_mean(name, names)}"
            )
    launch = LaunchOptions(**options)
    front = {
        "-n": number, "--nodes": nodes, "--ranks-per-node": per_node,
        "--launcher": launcher, "--launcher-options": launcher_options,
    }  # fmt: skip
    words = [f"{flag}={value}" for flag, value in front.items() if value not in (None, "")]
    line = split([*words, "-m", PROGRAM, *_list_words(launch)])
    read_front(line)
    request = JobRequest(
        words=(*words, "-m", PROGRAM, *line.rest),
        interface=launch.interface,
        port_range=launch.port_range,
        may_leave=bool(launcher_options),  # They may name hosts.
        variables={name: str(value) for name, value in (variables or {}).items()},
        output=output,
    )
    return Ranks(request, call_timeout)


def run(
    function: Callable[..., T], /, *arguments: Any, ranks: int | None = None, **keywords: Any
) -> list[T]:
    """Start ranks, run a function on each, and end them; what each returned, by rank.

        losses = mpiddp.run(train, epochs=3, ranks=2)

    ``ranks``: how many, as the first argument of `mpiddp.ranks`, which takes more options. What
    else is given goes to the function. Raises what `mpiddp.ranks` and `Ranks.run` raise.
    """
    _check_function(function)
    start = globals()["ranks"]  # The function, whose name the argument has.
    with start(ranks) as started:
        found: list[T] = started.run(function, *arguments, **keywords)
    return found


def _list_words(options: LaunchOptions) -> list[str]:
    """The options that are not as usual, as a rank's command line."""
    words = ["--quiet"]
    for field in list_fields(LaunchOptions):
        value = getattr(options, field.name)
        if value != field.default:
            words.append(f"{field.flag}={value}" if field.takes_value else field.flag)
    return words


def _find_sources(function: Callable[..., Any]) -> dict[str, list[str]]:
    """The lines of a function that no file holds, as of a notebook's cell."""
    code = find_code(function)
    if code is None or os.path.exists(code.co_filename):
        return {}
    lines = linecache.getlines(code.co_filename)
    return {code.co_filename: lines} if lines else {}


def _check_function(function: Any) -> None:
    if not callable(function):
        raise ConfigurationError(f"expected a function, found {type(function).__qualname__}")


def _check_seconds(seconds: Any) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigurationError(f"expected seconds above 0 for a call, found {seconds!r}")


def _refuse_ranks() -> None:
    """Raise ConfigurationError in a process that is a rank."""
    if find_session() is not None or find_launcher() is not None or has_manager_hint():
        raise ConfigurationError(
            "this process is a rank, or was started by srun or mpirun, and ranks start no ranks: "
            "call mpiddp.ranks in a process that was started by hand, or by the batch script itself"
        )


def _close_job(job: RankJob, owner: int) -> End:
    """End a job, in the process that has started it; how it ended."""
    return job.close() if os.getpid() == owner else End(SUCCESS)
