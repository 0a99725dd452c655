"""One rank as its node's companion sees it: its process, what it says, where it is."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.lifeline.decision import FAILED, Loss, describe_status
from mpiddp.lifeline.progress import Progress
from mpiddp.lifeline.stacks.answers import Reply, StackAnswers
from mpiddp.lifeline.stacks.dump import StackReader
from mpiddp.lifeline.watches import SuspensionWatch
from mpiddp.process.rank_process import POLL_SECONDS, RankProcess
from mpiddp.process.sockets.event_loop import EventLoop
from mpiddp.process.sockets.links import Link
from mpiddp.process.sockets.peer_user import find_peer

STARTING, CLOSING = "during start-up", "while it waited for the others to close their sessions"
FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Before these end a process, faulthandler writes its stack."""
ENTRY_BYTES = 1 << 12
MOST_DESCRIPTORS = 3


@dataclass(frozen=True)
class RankEntry:
    """The first message of a rank, with descriptors that its receiver owns."""

    rank: int
    memory: int
    """Descriptor of the rank's `Progress`."""
    stacks: int
    """Descriptor of the file that the rank writes its stack to."""
    own: int | None = None
    """A pidfd of the rank's process; None before Linux 5.3."""

    def send(self, connection: socket.socket) -> None:
        descriptors = [each for each in (self.memory, self.stacks, self.own) if each is not None]
        socket.send_fds(connection, [str(self.rank).encode()], descriptors)

    @staticmethod
    def receive(connection: socket.socket) -> RankEntry:
        """Raises OSError, or ValueError for another message."""
        text, descriptors, *_ = socket.recv_fds(connection, ENTRY_BYTES, MOST_DESCRIPTORS)
        memory, stacks, *own = descriptors
        return RankEntry(int(text), memory, stacks, *own)


class WatchedRank:
    """One rank's state."""

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        entry: RankEntry,
        take: Callable[[WatchedRank, str, Any], object],
        lose: Callable[[str, Loss], object],
    ) -> None:
        """``take`` is called with kind and content of a message that concerns other ranks.

        ``lose``: with ``lost``, or ``stopped`` if the rank has been stopped for too long; the loss
        names no host.
        """
        self.number = entry.rank
        self.link = Link(connection)
        # As the kernel says: a number of another namespace of processes means nothing here.
        number, _ = find_peer(connection)
        self.process = RankProcess(number, entry.own)
        self.state = STARTING
        """What it does, apart from its step."""
        self.run: tuple[Path, int] | None = None
        """Directory and attempt of a training, for reports."""
        self.log: tuple[Path, bool] | None = None
        """The log of all that the rank prints, and whether standard error leads elsewhere."""
        self.has_ended = False
        """Whether it has gone, or closed its session."""
        self.is_closed = False
        """Whether it has closed its session, as all ranks do together."""
        self._loop = loop
        self._hand_on, self._lose = take, lose
        self._progress = Progress(entry.memory)
        self._reader = StackReader(number, entry.stacks)
        self._stacks = StackAnswers(self._reader, loop, lambda: self.link.send("record"))
        self._stop = SuspensionWatch(loop, self._reader.find_state, self._tell_stop)
        self._calls_reply: Reply | None = None
        """Who waits for the rank's last collectives."""
        self._answers: Mapping[str, Callable[[Reply], object]] = {
            "position": lambda reply: reply(self.describe_position()),
            "stacks": self._ask_for_stacks,
            "idle": lambda reply: reply(self._describe_idleness()),
            "calls": self._ask_for_calls,
            "stopped": lambda reply: reply(self._stop.is_stopped),
        }
        """What is answered to requests, by their names."""
        self._has_crashed = False
        self._watch_process()

    def answer(self, name: str, reply: Reply) -> None:
        """Have ``reply`` called with the answer to a request; not if nothing is known of it.

        Of a rank that has gone only its end is known, in place of its stack.
        """
        if not self.has_ended and name in self._answers:
            self._answers[name](reply)
        elif self.has_ended and name == "stacks":
            # Else it is that of a forked child, which writes to the same file.
            frames = self._reader.read_last() if self._has_crashed else []
            reply({"state": "", "frames": [frame.pack() for frame in frames]})

    def watch_stops(self, seconds: float) -> None:
        """From now on, tell if it has been stopped for so long."""
        self._stop.begin(seconds)

    def add_pause(self, seconds: float) -> None:
        """For so long the companion was stopped as well."""
        self._stop.add_pause(seconds)
        self._progress.add_pause(seconds)

    def close(self) -> None:
        """It has closed its session: whatever becomes of it then is no loss."""
        self.has_ended = self.is_closed = True
        self._loop.remove(self.link)
        self._leave_process()

    @property
    def is_finished(self) -> bool:
        """Whether it waits for the others to close their sessions."""
        return self.state == CLOSING

    def read_step(self) -> int | None:
        return self._progress.read_step()

    def describe_position(self) -> str:
        step = self.read_step()
        return self.state or (f"at step {step}" if step is not None else "")

    # Its process

    def _watch_process(self) -> None:
        self._loop.add(self.link, self._take, lambda _: None)
        watched = ((self.process.descriptor, self._note_end), (self.process.launcher, self._orphan))
        for descriptor, note in watched:
            if descriptor is not None:
                self._loop.selector.register(
                    descriptor, selectors.EVENT_READ, lambda _, note=note: note()
                )
        if self.process.descriptor is None:
            self._poll(time.monotonic())

    def _leave_process(self) -> None:
        for descriptor in (self.process.descriptor, self.process.launcher):
            with contextlib.suppress(KeyError, ValueError):
                if descriptor is not None:
                    self._loop.selector.unregister(descriptor)

    def _poll(self, now: float) -> None:
        if self.has_ended:
            return
        if self.process.has_ended():
            self._note_end()
        else:
            self._loop.call_at(now + POLL_SECONDS, self._poll)

    def _note_end(self) -> None:
        """The rank has gone; what it has said before is heard first."""
        status = self.process.find_status()
        self._has_crashed = status is None or status & 0x7F in FATAL
        self._leave_process()
        with contextlib.suppress(OSError, ValueError):
            while messages := self.link.receive():
                for kind, content in messages:
                    self._take(kind, content)
        if not self.has_ended:
            self.has_ended = True
            self._tell_loss(*describe_status(status))

    def _orphan(self) -> None:
        """The process that started the rank has gone; some launchers leave ranks behind then."""
        if self.process.launcher is not None:
            self._loop.selector.unregister(self.process.launcher)
        self._tell_loss("the program that started it has gone", FAILED, blames_host=True)

    def _tell_stop(self, seconds: float) -> None:
        how = f"it has been stopped (SIGSTOP) for {seconds:g} s"
        self._tell_loss(how, FAILED, blames_host=True, kind="stopped")

    def _tell_loss(self, how: str, ending: str, blames_host: bool, kind: str = "lost") -> None:
        loss = Loss(self.number, "", how, self.describe_position(), ending, blames_host)
        self._lose(kind, loss)

    # What it says

    def _take(self, kind: str, content: Any) -> None:
        if kind == "started":
            self.state = ""
        elif kind == "run":
            self.run = (Path(content[0]), content[1])
        elif kind == "log":
            self.log = (Path(content[0]), content[1])
        elif kind == "stack":
            self._stacks.note_failure(content)
        elif kind == "record":
            self._stacks.take_record(content)
        elif kind == "calls":
            if self._calls_reply is not None:
                self._calls_reply(content)
        else:
            if kind in ("closing", "reopened"):
                self.state = CLOSING if kind == "closing" else ""
            self._hand_on(self, kind, content)

    def _ask_for_stacks(self, reply: Reply) -> None:
        self._stacks.ask(lambda answer: reply({**answer, "finished": self.is_finished}))

    def _ask_for_calls(self, reply: Reply) -> None:
        """The rank's last collectives, and where it is; None if it has come to its end."""
        if self.is_finished:
            reply(None)
        else:
            self._calls_reply = reply
            self.link.send("calls")

    def _describe_idleness(self) -> list[Any]:
        """How long the rank has not moved, and whether it is in a collective.

        0 seconds if it is stopped, or not watched. While it was stopped it could not move.
        """
        is_stopped = self._stacks.reader.find_state() in ("T", "t")
        running = 0.0 if is_stopped else time.monotonic() - self._stop.last
        idle = min(self._progress.find_idle_seconds(), running)
        return [idle, self._progress.is_in_collective()]
