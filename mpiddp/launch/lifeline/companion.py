"""The process beside each rank: it needs no interpreter's lock of anybody, and watches.

Companions form a tree: those of a node connect to its first rank's, and these to rank 0's, which
decides what ends the job (`decision`). Each watches its own rank, and its connections by heartbeats
in both directions. A companion that loses the way to rank 0 decides for those below it.

It ends with its rank. Standard library only: it starts beside every rank.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp import environment
from mpiddp.errors import PeerLostError
from mpiddp.launch import job_directory
from mpiddp.launch.lifeline.decision import (
    FAILED,
    Decider,
    Decision,
    Failure,
    Leave,
    Loss,
    describe_status,
)
from mpiddp.launch.lifeline.event_loop import EventLoop
from mpiddp.launch.lifeline.links import Link
from mpiddp.launch.lifeline.membership import Membership
from mpiddp.launch.lifeline.positions import describe, read_answers
from mpiddp.launch.lifeline.rank_process import POLL_SECONDS, RankProcess
from mpiddp.launch.lifeline.requests import Callback, Client, Requests, publish, withdraw
from mpiddp.launch.lifeline.stack_answers import Reply, StackAnswers
from mpiddp.launch.lifeline.stack_dump import StackReader
from mpiddp.launch.lifeline.stop_watch import StopWatch
from mpiddp.launch.lifeline.tree import Handlers, Tree

STARTING, CLOSING = "during start-up", "while it waited for the others to close their sessions"
LEAVE_SECONDS = 1.0
"""How long a rank may take to leave before it is killed."""
TURN_SECONDS = 0.5
LAST_TURN = 3
"""Companions that have lost the way to rank 0 act in turns: the first may end the job."""
FLUSH_SECONDS = 1.0
STALL_CHECK_SECONDS = 2.0
"""How long a job that stands still has to move after all: longer than `movement.LONGEST_PERIOD`."""
ATTEMPT_CHECK_SECONDS = 3.0
"""How often the companion of a node's first rank looks whether the job was restarted without it."""
SHARED = struct.Struct("qq")
"""What the rank writes into the memory that it shares with its companion: the step, -1 before the
first, and when its main thread was last seen to move, by time.monotonic_ns(); 0 if that is not
watched."""


class Companion:
    """One companion's state."""

    def __init__(
        self, process: RankProcess, rank: Link, memory: mmap.mmap, stacks: StackReader
    ) -> None:
        self.process = process
        self.answers: dict[str, Callable[[Reply], object]] = {
            "position": lambda reply: reply(self._describe_position()),
            "stacks": lambda reply: self._stacks.ask(reply),
            "idle": lambda reply: reply(self._find_idle_seconds()),
            "stopped": lambda reply: reply(self._stop.is_stopped),
        }
        """What this companion answers to requests, by their names."""
        self._rank = rank
        self._memory = memory
        self._loop = EventLoop()
        self._tree = Tree(
            self._loop,
            Handlers(
                joined=lambda: self._rank.send("joined"),
                take_decision=self._take_from_above,
                take_report=self._take_from_below,
                end=self._note_common_end,
                note_parent_lost=self._note_parent_lost,
                note_child_lost=self._note_child_lost,
            ),
        )
        self._stacks = StackAnswers(stacks, self._loop, lambda: self._rank.send("record"))
        self._stop = StopWatch(self._loop, stacks.find_state, self._tell_stop)
        self._stall_seconds = 0.0
        """After which a job has stalled; 0 for never. For rank 0's companion."""
        self._stands_still = False
        self._askers: list[Client] = []
        """Those below this companion that wait for an answer of all ranks."""
        self._clients: tuple[str, str] | None = None
        """Where rank 0's companion listens, and the token of clients."""
        self._published: list[Path] = []
        """Files that hold these."""
        self._own_directory: Path | None = None
        """The job's directory, where nobody has made one before."""
        self._membership: Membership | None = None
        self._decider: Decider | None = None
        """Of rank 0's companion."""
        self._requests = Requests(())
        self._state = STARTING
        """Where the rank is, apart from its step."""
        self._run: tuple[Path, int] | None = None
        """Directory and attempt of a training, for reports."""
        self._log: tuple[Path, bool] | None = None
        """The log of all that the rank prints, and whether standard error leads elsewhere."""
        self._failure: Failure | None = None
        """The rank that reports an error of its own."""
        self._is_asked = False
        """Whether this rank waits for the decision on an error of its own."""
        self._is_gone = False
        """Whether this rank has ended."""
        self._is_superseded = False
        """Whether the job was restarted without this rank."""
        self._is_over = False
        """Whether nothing is watched any more: the session is closed, or the job ends."""
        self._end = float("inf")
        """When this process ends at the latest."""

    def run(self) -> None:
        """Watch until the rank has gone, or has closed its session."""
        self._loop.add(self._rank, self._take_from_rank, lambda _: None)
        descriptor = self.process.descriptor
        if descriptor is not None:
            end = selectors.EVENT_READ
            self._loop.selector.register(descriptor, end, lambda _: self._note_end())
        else:
            self._poll_rank(time.monotonic())
        if self.process.launcher is not None:
            self._loop.selector.register(
                self.process.launcher, selectors.EVENT_READ, lambda _: self._note_orphan()
            )
        while not self._is_finished():
            due = (self._loop.find_time(), self._tree.find_time(), self._requests.find_time())
            planned = min(self._end, *due)
            if self._decider is not None and not self._is_over:
                planned = min(planned, self._decider.find_time())
            # While this process was stopped, perhaps with all others, nobody was silent.
            self._loop.wait(planned, self._add_pause)
            now = time.monotonic()
            if self._is_superseded and not self._is_over:
                self._spread("leave", PeerLostError.exit_code)
            self._tree.refresh(now)
            self._requests.finish_late(now)
            if self._decider is not None and not self._is_over:
                decision = self._decider.decide(now)
                if decision is not None:
                    self._carry_out(decision)
        self._withdraw()

    def _add_pause(self, seconds: float) -> None:
        self._tree.add_pause(seconds)
        self._stop.add_pause(seconds)

    def _is_finished(self) -> bool:
        if self._end == float("inf") and self._is_gone and not self._is_needed():
            self._finish()
        is_ending = self._end < float("inf")
        return is_ending and (time.monotonic() >= self._end or not self._tree.has_unsent)

    def _is_needed(self) -> bool:
        """Whether other ranks need this companion when its own rank has gone."""
        if self._is_over or self._membership is None:
            return False
        owes_report = self._decider is not None and self._decider.owes_report()
        return self._tree.has_children or owes_report

    def _finish(self) -> None:
        """End, once the other companions have been told."""
        self._is_over = True
        self._tree.say_goodbye()
        self._end = time.monotonic() + FLUSH_SECONDS

    # The rank

    def _poll_rank(self, now: float) -> None:
        if self.process.has_ended():
            self._note_end()
        else:
            self._loop.call_at(now + POLL_SECONDS, self._poll_rank)

    def _note_end(self) -> None:
        """The rank has gone; what it has said before is heard first."""
        status = self.process.find_status()
        if self.process.descriptor is not None:
            self._loop.selector.unregister(self.process.descriptor)
        self._is_gone = True
        with contextlib.suppress(OSError, ValueError):
            while messages := self._rank.receive():
                for kind, content in messages:
                    self._take_from_rank(kind, content)
        self._tell_loss(*describe_status(status))

    def _note_orphan(self) -> None:
        """Who started the rank has gone, and some launchers leave ranks behind then."""
        if self.process.launcher is not None:
            self._loop.selector.unregister(self.process.launcher)
        self._tell_loss("the program that started it has gone", FAILED, blames_host=True)

    def _tell_loss(self, how: str, ending: str, blames_host: bool, kind: str = "lost") -> None:
        own = self._membership
        # The end of a rank that is alone concerns nobody.
        if own is not None and own.size > 1 and not self._is_over:
            position = self._describe_position()
            loss = Loss(own.rank, own.hostname, how, position, ending, blames_host)
            self._raise(kind, asdict(loss))

    def _tell_stop(self, seconds: float) -> None:
        how = f"it has been stopped (SIGSTOP) for {seconds:g} s"
        self._tell_loss(how, FAILED, blames_host=True, kind="stopped")

    def _take_from_rank(self, kind: str, content: Any) -> None:
        if kind == "listen":
            self._listen(**content)
        elif kind == "join":
            self._join(Membership.unpack(content))
        elif kind == "started":
            self._state = ""
        elif kind == "run":
            self._run = (Path(content[0]), content[1])
        elif kind == "log":
            self._log = (Path(content[0]), content[1])
        elif kind == "closing":
            self._state = CLOSING
            self._raise("closing", content)
        elif kind == "ask":
            self._ask(self._rank, content)
        elif kind == "stall":
            self._stall_seconds = content
            self._look_for_stall(time.monotonic())
        elif kind == "stack":
            self._stacks.failed = content
        elif kind == "record":
            self._stacks.take_record(content)
        elif kind in ("fail", "announce"):
            self._fail(kind, content)
        elif kind == "done":
            self._finish()

    def _fail(self, kind: str, content: Any) -> None:
        """The rank has failed; it is told whether to report that, if it asks."""
        self._is_asked = kind == "fail"
        is_alone = self._decider is None and not self._tree.has_parent
        if self._is_asked and (self._failure is not None or is_alone):
            self._rank.send("decision", "report" if is_alone else "silent")
        else:
            self._raise(kind, content)

    def _describe_position(self) -> str:
        step = self._read_step()
        return self._state or (f"at step {step}" if step is not None else "")

    def _read_step(self) -> int | None:
        step: int = SHARED.unpack_from(self._memory)[0]
        return step if step >= 0 else None

    def _find_idle_seconds(self) -> float:
        """How long the rank's main thread has not moved; 0 where that is not watched."""
        moved: int = SHARED.unpack_from(self._memory)[1]
        is_stopped = self._stacks.reader.find_state() in ("T", "t")
        return 0.0 if not moved or is_stopped else (time.monotonic_ns() - moved) / 1e9

    # The other ranks

    def _listen(self, address: str, token: str, clients: str) -> None:
        """Listen on an address, or for this node where it is empty; tell the rank the place."""
        others: dict[str, Callable[[Link], object]] = {}
        if clients:
            others[clients] = self._admit_client
        try:
            place = self._tree.listen(address, token, others)
        except OSError as error:
            self._rank.send("problem", f"cannot listen on {address or 'this node'}: {error}")
            return
        if clients:
            self._clients = (place, clients)
        self._rank.send("place", place)

    def _join(self, membership: Membership) -> None:
        self._membership = membership
        try:
            self._tree.connect(membership)
        except OSError as error:
            self._rank.send("problem", str(error))
            return
        self._stop.begin(membership.seconds)
        if membership.local_rank == 0 and environment.ATTEMPT_TOKEN in os.environ:
            watch = threading.Thread(target=self._watch_attempt, args=(membership,), daemon=True)
            watch.start()
        if not membership.places:
            self._decider = Decider(membership.size)
            self._requests = Requests(membership.hostnames)
            self._publish()
            self._rank.send("joined")

    def _publish(self) -> None:
        """Write down where clients find this companion: for the job, and beside its logs."""
        directory = job_directory.find()
        if directory is None:
            directory = self._own_directory = job_directory.make_or_none()
        if self._clients is None or job_directory.is_superseded():
            return
        for each in (directory, self._log[0].parent if self._log is not None else None):
            if each is not None:
                with contextlib.suppress(OSError):
                    self._published.append(publish(each, *self._clients))

    def _withdraw(self) -> None:
        for path in self._published:
            assert self._clients is not None
            withdraw(path, self._clients[1])
        if self._own_directory is not None:
            job_directory.remove(self._own_directory)

    def _watch_attempt(self, own: Membership) -> None:
        """Notice that the job was restarted. A thread's work: a file system may not answer.

        Heartbeats wake the loop.
        """
        try:
            while True:
                job_directory.check_attempt()
                time.sleep(ATTEMPT_CHECK_SECONDS)
        except PeerLostError as error:
            self._is_superseded = True
            with contextlib.suppress(OSError):
                sys.stderr.write(
                    f"mpiddp: rank {own.rank} of {own.size} on {own.hostname}: {error}\n"
                )

    def _admit_client(self, link: Link) -> None:
        self._loop.add(
            link,
            lambda kind, _: self._ask(link, kind),
            lambda _: None,
        )

    def _note_common_end(self) -> None:
        """All sessions are being closed, or all ranks have been told to leave."""
        self._is_over = True

    def _take_from_above(self, kind: str, content: Any) -> None:
        if kind == "answers":
            askers, self._askers = self._askers, []
            for asker in askers:
                asker.send(kind, content)
        else:
            self._spread(kind, content)

    def _take_from_below(self, link: Link, kind: str, content: Any) -> None:
        if kind == "ask":
            self._ask(link, content)
        else:
            self._raise(kind, content)

    def _note_child_lost(self, rank: int, how: str) -> None:
        own = self._membership
        if own is not None:
            hostname = own.hostnames[rank] if own.hostnames else own.hostname
            self._raise("lost", asdict(Loss(rank, hostname, how)))

    def _note_parent_lost(self, how: str) -> None:
        assert self._membership is not None
        own = self._membership
        turn = min(own.local_rank or own.node_rank - 1, LAST_TURN)
        # At the end of all sessions, whoever has closed its own just goes.
        turn += self._state == CLOSING
        when = time.monotonic() + turn * TURN_SECONDS
        self._loop.call_at(when, lambda _: self._take_over(how))

    def _take_over(self, how: str) -> None:
        """Decide without rank 0's companion."""
        if self._is_over:
            return
        assert self._membership is not None
        own = self._membership
        if self._failure is not None:
            self._carry_out(Leave(self._failure.code))
        else:
            self._carry_out(Loss(own.parent, own.parent_hostname, how))

    # Reports go up, decisions down

    def _raise(self, kind: str, content: Any) -> None:
        if self._decider is None:
            self._tree.send_up(kind, content)
            return
        now = time.monotonic()
        if kind == "lost":
            self._decider.lose(Loss(**content), now)
        elif kind == "fail":
            self._decider.fail(Failure(**content), now)
        elif kind == "announce":
            if self._decider.announce(Failure(**content)):
                self._spread("failing", content)
        elif kind == "stopped":
            decide = partial(self._decide_stop, Loss(**content))
            self._ask(Callback(decide), "stopped")
        elif kind == "closing":
            self._decider.close(*content)
        elif kind == "answer":
            self._requests.add(*content)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Failure):
            self._spread("failing", asdict(decision))
            return
        code = PeerLostError.exit_code
        if isinstance(decision, Leave):
            code = decision.code
        else:
            assert self._membership is not None
            self._report(decision.describe(self._membership.size), lost=decision)
        self._spread("leave", code)

    def _report(self, reason: str, table: str = "", lost: Loss | None = None) -> None:
        # Imported when it is needed: it takes as long as all else of this process's start.
        from mpiddp.launch.lifeline.report import Reporter

        assert self._membership is not None
        directory, attempt = self._run if self._run is not None else (None, 1)
        reporter = Reporter(self._membership, self._read_step(), directory, attempt, self._log)
        reporter.report(reason, table, lost)

    def _spread(self, kind: str, content: Any) -> None:
        """Pass a message on to those below, and heed it."""
        self._tree.send_down(kind, content)
        if kind == "failing":
            self._failure = Failure(**content)
            own = self._membership
            if self._is_asked and own is not None:
                is_reporter = own.rank == self._failure.rank
                self._rank.send("decision", "report" if is_reporter else "silent")
        elif kind == "leave":
            self._is_over = True
            self._rank.send("leave", content)
            when = time.monotonic() + LEAVE_SECONDS
            self._loop.call_at(when, lambda _: self.process.kill())
        elif kind == "request":
            number, name = content
            answer = self.answers.get(name)
            own = self._membership
            if answer is not None and own is not None:
                rank = own.rank
                answer(lambda found: self._raise("answer", [number, rank, found]))

    def _ask(self, client: Client, name: str) -> None:
        """Have ``client`` be sent the answers of all ranks."""
        if self._decider is not None:
            number = self._requests.begin(client, time.monotonic())
            self._spread("request", [number, name])
        elif self._tree.has_parent:
            self._askers.append(client)
            self._tree.send_up("ask", name)
        else:
            client.send("answers", [[], []])

    def _decide_stop(
        self, loss: Loss, hostnames: Sequence[str], answers: Mapping[int, Any]
    ) -> None:
        """A rank that is stopped is lost to the others, unless the whole job was suspended."""
        is_alone = len(answers) < len(hostnames) or not all(answers.values())
        if answers.get(loss.rank) and is_alone and self._decider is not None:
            self._decider.lose(loss, time.monotonic())

    # A job that stands still

    def _look_for_stall(self, _: float) -> None:
        if not self._is_over:
            self._ask(Callback(self._decide_stall), "idle")

    def _decide_stall(self, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
        # A rank that does not answer may be moving.
        idle = min(answers.values()) if len(answers) == len(hostnames) else 0.0
        # Asked twice, since all may have been stopped together, and have been continued just now.
        between = min(self._stall_seconds / 2, STALL_CHECK_SECONDS)
        was_still, self._stands_still = (
            self._stands_still,
            idle >= self._stall_seconds - between,
        )
        if was_still and idle >= self._stall_seconds:
            self._ask(Callback(self._end_stall), "stacks")
            return
        # Sooner no job can have been still for long enough.
        pause = self._stall_seconds - idle
        if not self._stands_still:
            pause -= between
        elif not was_still:
            pause = between
        self._loop.call_at(time.monotonic() + pause, self._look_for_stall)

    def _end_stall(self, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
        if not self._is_over:
            reason = f"no rank has made progress for {self._stall_seconds:g} s"
            self._report(reason, describe(read_answers(hostnames, answers)))
            self._spread("leave", PeerLostError.exit_code)


def main() -> None:
    """Take over what the rank has left: its process's number and descriptor, the socket, files."""
    process, own, connection, memory, stacks = map(int, sys.argv[1:])
    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    link = Link(socket.socket(fileno=connection))
    shared = mmap.mmap(memory, SHARED.size)
    rank = RankProcess(process, own if own >= 0 else None)
    Companion(rank, link, shared, StackReader(process, stacks)).run()
