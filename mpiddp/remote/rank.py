"""A rank that waits for calls: the program that `mpiddp.ranks` has the front start.

It opens a session and connects to the calling process three times: for calls, for its standard
output and for its standard error. Then it does one call after the other, in its main thread. It
ends when the calling process closes the connection, or has gone.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.failure.error_origin import find_origin
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.exported_variables import take
from mpiddp.launch.mpi.control import count_exchanges
from mpiddp.launch.options import Options
from mpiddp.launch.session import Session, find_failure_handler, is_broken
from mpiddp.launch.startup import start
from mpiddp.lifeline.stacks.flight_recorder import count_calls, has_broken_group, read_calls
from mpiddp.options.reader import read
from mpiddp.process.streams.output import buffer_lines
from mpiddp.remote import pickling
from mpiddp.remote.channel import Address, Channel, Message, Parcel, connect, make_mark
from mpiddp.remote.fingerprint import check_function
from mpiddp.wording import read_message

OUTPUT = {1: "out", 2: "err"}
"""By descriptor, the role of the connection that takes its place."""
SIGNALS, SIGNAL_SECONDS = 10, 0.1
"""How many signals interrupt a function at most, and the pause between them: a signal that arrives
just before a system call does not end that call."""
NO_MORE = float("inf")
LEAVE_SECONDS = 5.0
"""How long a function may go on after the calling process has gone."""


class CallServer:
    """Does the calls of the calling process, until that closes the connection."""

    def __init__(self, session: Session, address: Address) -> None:
        """Connect. Raises UnreachableError."""
        self._session = session
        self._calls = Channel(connect(address))
        self._calls.send("hello", self._describe("calls"))
        # The caller may be stopped (Ctrl-Z) for as long as its user wants; the ranks end with it.
        self._calls.connection.settimeout(None)
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Message | ConfigurationError | None] = queue.SimpleQueue()
        self._running: int | None = None
        """The number of the call whose function runs."""
        self._interrupted = 0.0
        """The number of the last call to be interrupted, perhaps before its function runs; NO_MORE
        once the calling process has gone."""
        self._is_interruptible = False
        self._marks = _redirect(address, self._describe)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        os.register_at_fork(after_in_child=self._leave_to_parent)
        signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._listen, name="mpiddp-calls", daemon=True).start()

    def _describe(self, role: str) -> dict[str, Any]:
        session = self._session
        return {
            "role": role,
            "rank": session.world.rank,
            "size": session.world.size,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "device": str(session.device),
            "threads": session.threads,
            "backend": session.backend,
            "python": ".".join(map(str, sys.version_info[:2])),
            "directory": os.environ.get(environment.JOB_DIRECTORY, ""),
        }

    def serve(self) -> None:
        """Do calls until the calling process has closed the connection."""
        while (message := self._inbox.get()) is not None:
            if isinstance(message, ConfigurationError):
                self._send_error(message, "")
            else:
                self._do(message)

    def close(self) -> None:
        self._calls.close()

    def _do(self, message: Message) -> None:
        number = message.content["number"]
        value: Any = None
        error: BaseException | None = None
        try:
            try:
                self._running, self._is_interruptible = number, True
                if self._interrupted >= number:
                    raise KeyboardInterrupt
                value = self._run(message)
            finally:
                self._is_interruptible = False
                # The function may have set another handler, and a late signal may come.
                signal.signal(signal.SIGINT, self._interrupt)
        except BaseException as caught:  # Whatever a function raises goes to who has called it.
            error = caught
        self._running = None
        parcel: Parcel | None = None
        if error is None:
            try:
                parcel = Parcel(*pickling.dump(value))
            except BaseException as problem:  # A ``__reduce__`` may raise anything.
                error = ConfigurationError(
                    f"it returned {type(value).__qualname__}, which cannot be sent: "
                    f"{read_message(problem)}"
                )
        self._mark(number)
        if error is not None:
            self._send_error(error, _format(error))
        if parcel is not None:
            with self._sending:
                self._calls.send("value", self._find_state(), parcel)
            parcel.close()

    def _run(self, message: Message) -> Any:
        # The modules that the calling process finds are found here, too.
        sys.path[:0] = [each for each in message.content["folders"] if each not in sys.path]
        for name, lines in message.content["sources"].items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        try:
            function, arguments, keywords = pickling.load(message.body, message.buffers)
        except Exception as error:  # What is imported for it may raise anything.
            raise ConfigurationError(
                f"the function or its arguments cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        check_function(function, message.content["fingerprint"])
        value = function(*arguments, **keywords)
        self._session.do_postponed()
        if self._session.collectives is not None:
            self._session.collectives.finish()
        return value

    def _find_state(self) -> dict[str, Any]:
        """What must be the same on all ranks after a call, as far as it is cheap to find."""
        session = self._session
        return {
            "calls": session.count_calls()[0],
            "exchanges": count_exchanges(session)[0],
            "groups": count_calls(),
            "has_group": not session.has_group or _has_group(),
        }

    def _send_error(self, error: BaseException, text: str) -> None:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        try:
            pickled, buffers = pickling.dump(error)
        except BaseException:  # What cannot be sent is described.
            pickled, buffers = b"", ()
        content = (pickled, name.removeprefix("builtins."), read_message(error), text)
        parcel = Parcel(pickling.dump(content)[0], buffers)
        with contextlib.closing(parcel), self._sending:
            state = {
                **self._find_state(),
                "origin": find_origin(error),
                "is_broken": is_broken(self._session) or has_broken_group(),
            }
            self._calls.send("error", state, parcel)

    def _mark(self, number: int) -> None:
        """End this call's output, so that the calling process knows when it has all of it."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # The function may have closed it.
                stream.flush()
        for connection in self._marks:
            with contextlib.suppress(OSError):
                connection.sendall(make_mark(number))

    def _listen(self) -> None:
        """On a thread: receive messages while the main thread runs a function."""
        try:
            while True:
                self._calls.wait()
                try:
                    message = self._calls.receive()
                except ConfigurationError as error:
                    self._inbox.put(error)
                    continue
                if message.kind == "interrupt":
                    self._interrupted = message.content
                    self._interrupt_main(message.content)
                elif message.kind == "state":
                    counts = {name: begun for name, (begun, _) in read_calls().items()}
                    with self._sending:
                        self._calls.send("state", counts | count_calls(is_own=True))
                else:
                    self._inbox.put(message)
        except (EOFError, OSError):
            self._inbox.put(None)
            self._interrupted = NO_MORE
        if (number := self._running) is not None:
            self._interrupt_main(number)
            time.sleep(LEAVE_SECONDS)
        if self._running is not None:
            lost = PeerLostError("the process that started these ranks has gone")
            find_failure_handler(self._session).fail(lost)

    def _interrupt_main(self, number: int) -> None:
        for _ in range(SIGNALS):
            if self._running != number or not self._is_interruptible:
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(SIGNAL_SECONDS)

    def _interrupt(self, *_: object) -> None:
        """Raise KeyboardInterrupt once in a call: nothing after its function is interrupted."""
        if self._is_interruptible:
            self._is_interruptible = False
            raise KeyboardInterrupt

    def _leave_to_parent(self) -> None:
        """Close, in a forked child, the connections, which would outlive this rank."""
        self._calls.close()
        for connection in self._marks:
            connection.close()


def _redirect(address: Address, describe: Callable[[str], Any]) -> Sequence[socket.socket]:
    """Let both streams lead to the calling process."""
    found = []
    for number, role in OUTPUT.items():
        channel = Channel(connect(address))
        channel.send("hello", describe(role))
        # Programs write to the descriptor, which must block.
        channel.connection.settimeout(None)
        with contextlib.suppress(Exception):
            (sys.stdout if number == 1 else sys.stderr).flush()
        os.dup2(channel.fileno(), number)
        found.append(channel.connection)
    buffer_lines()
    return found


def _has_group() -> bool:
    from torch import distributed

    return bool(distributed.is_initialized())


def _format(error: BaseException) -> str:
    """The traceback, without the calls that lead to the function."""
    trace = error.__traceback__
    folder = os.path.dirname(__file__)
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == folder:
        trace = trace.tb_next
    if trace is None:
        return ""  # It was raised by mpiddp, and its message says all.
    with contextlib.suppress(Exception):  # A ``__str__`` may raise anything.
        return "".join(traceback.format_exception(type(error), error, trace))
    lines = traceback.format_tb(trace)
    return "".join([*lines, f"{type(error).__qualname__}: {read_message(error)}\n"])


def main() -> None:
    """Start, then do calls until the calling process has closed the connection."""
    with FailureHandler((__file__,), outlasts_runs=True) as failure_handler:
        caller = take(environment.CALLER)
        if caller is None:
            raise ConfigurationError("this program is started by mpiddp.ranks(…), and not by hand")
        address = Address.unpack(caller)
        options = read(Options, None, "python -m mpiddp.remote.rank", __doc__ or "")
        with start(options, failure_handler) as session:
            session.keep(options)
            server = CallServer(session, address)
            server.serve()
            session.keep(None)
        # All ranks have closed the session: the calling process takes this for the end.
        server.close()


if __name__ == "__main__":
    # Not as "__main__", which CallServer replaces: pickles name what is in this module.
    from mpiddp.remote import rank

    rank.main()
