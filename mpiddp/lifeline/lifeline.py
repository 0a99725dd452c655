"""A rank's own end of its lifeline: it starts the node's companion, and talks with it."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpiddp.errors import OWN, UnreachableError
from mpiddp.lifeline.decision import SUSPICION_SECONDS, Failure
from mpiddp.lifeline.membership import Entrance, Membership
from mpiddp.lifeline.progress import Progress
from mpiddp.lifeline.requests import ANSWER_SECONDS as REQUEST_SECONDS
from mpiddp.lifeline.stacks.dump import StackWriter, read_thread, read_traceback
from mpiddp.lifeline.stacks.flight_recorder import count_calls, read_calls, read_record
from mpiddp.lifeline.stacks.positions import StackPosition, read_answers
from mpiddp.lifeline.stacks.recorded_call import OWN_GROUP, RecordedCall
from mpiddp.lifeline.stall import Calls, Finished
from mpiddp.lifeline.watched_rank import RankEntry
from mpiddp.process import detached
from mpiddp.process.sockets.links import Link, connect, describe_server, listen_locally
from mpiddp.process.sockets.ports import PortRange
from mpiddp.process.streams.output import Redirection

ROOT = Path(__file__).parents[2]
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    "from mpiddp.lifeline.companion import main; main()"
)
TOKEN_BYTES = 16
START_SECONDS = 20.0
"""How long a companion may take to answer; the machine may be busy."""
ANSWER_SECONDS = SUSPICION_SECONDS + 0.5
CLOSE_SECONDS = 2.0


class Lifeline:
    """One rank's connection to the companion process of its node; ``close`` ends it."""

    def __init__(
        self,
        entrance: Entrance,
        rank: int,
        on_job_end: Callable[[int], object],
        on_companion_lost: Callable[[], object],
        output: Redirection | None = None,
    ) -> None:
        """Enter. ``output``: where this rank's output goes, and so its reports.

        Both are called in a thread of this object's: ``on_job_end`` with the exit code when the
        job ends, and ``on_companion_lost`` if the companion has gone before its time. Raises
        UnreachableError.
        """
        self._on_job_end, self._on_companion_lost = on_job_end, on_companion_lost
        self._is_closing = False
        self.entrance = entrance
        """For the other ranks of this node."""
        self._rank = rank
        self._session = 0
        """How many sessions this rank has closed."""
        descriptor = Progress.make_file()
        self.progress = Progress(descriptor)
        """Shared with the companion."""
        self._count_calls: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._describe_call: Callable[[], dict[str, Any]] = dict
        self._stacks = StackWriter()
        try:
            self._link = _enter(entrance, rank, descriptor, self._stacks.descriptor)
        except OSError as error:
            self._stacks.close()
            raise UnreachableError(
                f"cannot connect to the companion process of this node: {error}"
            ) from error
        finally:
            os.close(descriptor)
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, queue.SimpleQueue[tuple[str, Any]]] = {}
        """Questions that wait for a reply, by their numbers; a late reply finds none."""
        self._last: tuple[str, Any] | None = None
        """The reply to all questions once the job ends, or the companion has gone."""
        self._thread = threading.Thread(target=self._listen, name="mpiddp-lifeline", daemon=True)
        self._thread.start()
        if output is not None and output.log is not None:
            self._send("log", [str(output.log), output.console is not None])

    # Start-up

    def listen(self, address: str, token: str, clients: str, ports: PortRange | None = None) -> str:
        """Have the companion listen for those of other nodes at an address; for rank 0.

        ``clients``: a token for those that may ask. ``ports``: those that may be listened on; None
        for any. Returns where, for `Membership.address`.
        """
        content: dict[str, Any] = {"address": address, "token": token, "clients": clients}
        content["ports"] = asdict(ports) if ports is not None else None
        return str(self._ask("listen", content, START_SECONDS))

    def join(self, membership: Membership | None = None) -> None:
        """Return once the companion has joined the others: they know of this rank's end then.

        ``membership``: on the first rank of each node. The others wait for it, as long as the phase
        of start-up may take.
        """
        content = asdict(membership) if membership is not None else None
        self._ask("join", content, START_SECONDS if content is not None else float("inf"))

    # Where this rank is

    def watch_calls(
        self, count: Callable[[], tuple[int, int]], describe: Callable[[], dict[str, Any]]
    ) -> None:
        """``count`` returns the numbers of the last call of mpiddp's collectives and of the last
        complete one. ``describe`` says more of the last one. Both are called in any thread."""
        self._count_calls, self._describe_call = count, describe

    def note_failure(self, error: BaseException) -> None:
        """Where this rank was when ``error`` ended its work; its stack will not show it."""
        frames = read_traceback(error.__traceback__)
        if frames:
            self._send("stack", [frame.pack() for frame in frames])

    def note_run(self, directory: Path, attempt: int) -> None:
        """Where reports are written to."""
        self._send("run", [str(directory.absolute()), attempt])

    def note_started(self) -> None:
        """Start-up is over."""
        self._send("started")

    def note_closing(self, hostname: str, seconds: float = float("inf")) -> None:
        """This rank, on ``hostname``, waits for the others to close their sessions.

        It calls no more collectives. Call it before groups are closed, which tells the others by
        which collective. ``seconds``: how long they may wait in one if nobody can tell.
        """
        self._session += 1
        calls = Calls(read_calls(), count_calls(), self._count_calls())
        content = Finished(self._rank, hostname, seconds, calls, self._session)
        self._send("closing", asdict(content))

    def note_reopened(self) -> None:
        """All have closed their sessions, and this rank goes on."""
        self._send("reopened", [self._rank, self._session])

    def watch_stall(self, seconds: float) -> None:
        """End the job when no rank has moved for so long. For rank 0."""
        self._send("stall", seconds)

    # Ends

    def gather_stacks(self) -> list[StackPosition]:
        """Where each rank is; empty if nobody answers."""
        try:
            hostnames, answers = self._ask("ask", "stacks", 2 * REQUEST_SECONDS)
        except UnreachableError:
            return []
        return read_answers(hostnames, dict(answers))

    def ask(self, code: int, text: str, origin: str) -> str | None:
        """Which rank reports, once this one has failed.

        Returns "report" if this rank does, "silent" if another does, and "leave" if a lost rank has
        been reported; None without an answer. ``origin``: where the error comes from
        (`mpiddp.errors.OWN` and its like).
        """
        failure = asdict(Failure(self._rank, code, origin, text))
        try:
            return str(self._ask("fail", failure, ANSWER_SECONDS))
        except UnreachableError:
            return "leave" if self._last is not None and self._last[0] == "leave" else None

    def announce(self, code: int) -> None:
        """This rank ends the job with ``code``: it is not lost."""
        self._send("announce", asdict(Failure(self._rank, code, OWN)))

    def close(self) -> None:
        """Tell the companion that this rank's end is no loss. It is told once all ranks have closed
        their sessions, or if start-up has failed."""
        self._is_closing = True
        self._send("done")

    def wait(self) -> None:
        """Wait until the companion knows, for CLOSE_SECONDS at most: it may be stopped."""
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._link.connection.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self._link.close()
        self._stacks.close()

    # Messages

    def _send(self, kind: str, content: Any = None) -> None:
        with self._sending:
            self._link.send(kind, content)

    def _ask(self, kind: str, content: Any, seconds: float) -> Any:
        """The reply to a question. Raises UnreachableError if there is none, or a problem."""
        number = next(self._numbers)
        replies = self._open[number] = queue.SimpleQueue()
        try:
            if self._last is not None:
                replies.put(self._last)
            self._send(kind, [number, content])
            limit = None if seconds == float("inf") else seconds
            found, reply = replies.get(timeout=limit)
        except queue.Empty:
            found, reply = "problem", f"its companion process did not answer in {seconds:g} s"
        finally:
            del self._open[number]
        if found != "reply":
            raise UnreachableError(f"this rank has no lifeline: {reply}")
        return reply

    def _end_questions(self, kind: str, content: Any) -> None:
        """Reply to all questions, now and later; what came first counts."""
        self._last = self._last or (kind, content)
        for replies in list(self._open.values()):
            replies.put(self._last)

    def _listen(self) -> None:
        while True:
            self._link.wait(float("inf"))
            try:
                messages = self._link.receive()
            except OSError:
                break
            for kind, content in messages:
                if kind == "leave":
                    self._end_questions("leave", "the job ends")
                    self._on_job_end(content)
                elif kind == "record":
                    self._send("record", [call.pack() for call in self._list_calls()])
                elif kind == "calls":
                    self._send("calls", self._find_calls())
                else:
                    number, reply = content
                    replies = self._open.get(number)
                    if replies is not None:
                        replies.put((kind, reply))
        self._end_questions("problem", "its companion process has gone")
        if not self._is_closing:
            self._on_companion_lost()

    def _list_calls(self) -> list[RecordedCall]:
        """The last collectives of this rank."""
        found = read_record()
        own: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # Of stacks that change meanwhile.
            own = self._describe_call()
        if own.get("number"):
            found.append(RecordedCall(**{"backend": OWN_GROUP, "group": OWN_GROUP, **own}))
        return found

    def _find_calls(self) -> dict[str, Any]:
        """Which collectives this rank has called, and where its main thread is now."""
        frames = read_thread(threading.main_thread().ident or 0)
        calls = Calls(read_calls(), count_calls(), self._count_calls())
        return {"frames": [frame.pack() for frame in frames], **asdict(calls)}


def start_companion(enter: Callable[[Entrance], Lifeline], console: int | None = None) -> Lifeline:
    """Start the companion process of this node, on the node's first rank.

    ``enter``: has this rank enter. It does so before the process starts, which then ends with this
    rank, whenever that is. ``console``: a descriptor for the companion's reports, if this rank's
    standard error leads elsewhere. Raises UnreachableError.
    """
    token = secrets.token_hex(TOKEN_BYTES)
    reading, writing = os.pipe()
    with listen_locally() as server, os.fdopen(writing, "w") as pipe:
        try:
            pipe.write(token)
            lifeline = enter(Entrance(describe_server(server), token))
            inherited = (server.fileno(), reading)
            program = [sys.executable, "-I", "-S", "-c", PROGRAM, *map(str, inherited)]
            detached.start(program, inherited, console)
        finally:
            os.close(reading)
        return lifeline


def _enter(entrance: Entrance, rank: int, memory: int, stacks: int) -> Link:
    """Connect to a companion. Raises OSError."""
    link = connect(entrance.address, entrance.token, START_SECONDS)
    own = None
    with contextlib.suppress(OSError, AttributeError):
        own = os.pidfd_open(os.getpid())
    try:
        RankEntry(rank, memory, stacks, own).send(link.connection)
    except OSError:
        link.close()
        raise
    finally:
        if own is not None:
            os.close(own)
    return link
