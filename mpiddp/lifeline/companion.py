"""The process beside each rank, which watches it without its interpreter's lock.

Companions form a tree: those of a node connect to its first rank's, and these to rank 0's, which
decides what ends the job (`decision`). Each watches its own rank, and its connections by heartbeats
in both directions. A companion that loses the way to rank 0 decides for those below it.

It ends with its rank. Standard library only: it starts beside every rank.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp.errors import PeerLostError
from mpiddp.lifeline.decision import (
    FAILED,
    Decider,
    Decision,
    Failure,
    Leave,
    Loss,
    describe_status,
)
from mpiddp.lifeline.membership import Membership
from mpiddp.lifeline.progress import Progress
from mpiddp.lifeline.requests import Callback, Client, Requests
from mpiddp.lifeline.stacks.answers import Reply, StackAnswers
from mpiddp.lifeline.stacks.dump import StackReader
from mpiddp.lifeline.stall import EndWatch, Finished, StallHandlers, StallWatch
from mpiddp.lifeline.tree import Handlers, Tree
from mpiddp.lifeline.watches import AttemptWatch, StopWatch
from mpiddp.process.publication import Publication
from mpiddp.process.rank_process import POLL_SECONDS, RankProcess
from mpiddp.process.sockets.event_loop import EventLoop
from mpiddp.process.sockets.links import Link
from mpiddp.process.sockets.ports import PortRange

STARTING, CLOSING = "during start-up", "while it waited for the others to close their sessions"
QUESTIONS = frozenset({"listen", "join", "ask", "fail"})
"""Messages of the rank that get a reply."""
LEAVE_SECONDS = 1.0
"""How long a rank may take to leave before it is killed."""
TURN_SECONDS = 0.5
LAST_TURN = 3
"""Companions that have lost the way to rank 0 act in turns: the first may end the job."""
FLUSH_SECONDS = 1.0


class Companion:
    """One companion's state."""

    def __init__(
        self, process: RankProcess, rank: Link, progress: Progress, stacks: StackReader
    ) -> None:
        self.process = process
        self.answers: dict[str, Callable[[Reply], object]] = {
            "position": lambda reply: reply(self._describe_position()),
            "stacks": lambda reply: self._stacks.ask(reply),
            "idle": lambda reply: reply(self._describe_idleness()),
            "calls": self._ask_for_calls,
            "stopped": lambda reply: reply(self._stop.is_stopped),
        }
        """What this companion answers to requests, by their names."""
        self._rank = rank
        self._progress = progress
        self._loop = EventLoop()
        self._tree = Tree(
            self._loop,
            Handlers(
                joined=self._note_joined,
                take_decision=self._take_from_above,
                take_report=self._take_from_below,
                end=self._note_common_end,
                note_parent_lost=self._note_parent_lost,
                note_child_lost=self._note_child_lost,
            ),
        )
        self._stacks = StackAnswers(stacks, self._loop, lambda: self._rank.send("record"))
        self._stop = StopWatch(self._loop, stacks.find_state, self._tell_stop)
        self._askers: list[Client] = []
        """Those below this companion that wait for an answer of all ranks."""
        self._calls_reply: Reply | None = None
        """Who waits for the rank's last collectives."""
        self._publication: Publication | None = None
        """Of rank 0's companion: where clients find it."""
        self._membership: Membership | None = None
        self._decider: Decider | None = None
        """Of rank 0's companion."""
        self._requests = Requests(())
        self._end_watch = EndWatch(self._make_handlers())
        """Of rank 0's companion."""
        self._attempt = AttemptWatch()
        self._state = STARTING
        """Where the rank is, apart from its step."""
        self._run: tuple[Path, int] | None = None
        """Directory and attempt of a training, for reports."""
        self._log: tuple[Path, bool] | None = None
        """The log of all that the rank prints, and whether standard error leads elsewhere."""
        self._failure: Failure | None = None
        """The rank that reports its error."""
        self._joining = 0
        """The rank's question, answered once this companion has joined the others."""
        self._asked: int | None = None
        """The rank's question whether it reports its error."""
        self._is_gone = False
        """Whether this rank has ended."""
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
            # While this process was stopped, perhaps with all others, no silence was heard.
            self._loop.wait(planned, self._add_pause)
            now = time.monotonic()
            # Heartbeats wake the loop for it.
            if self._attempt.is_superseded and not self._is_over:
                self._spread("leave", PeerLostError.exit_code)
            self._tree.refresh(now)
            self._requests.finish_late(now)
            if self._decider is not None and not self._is_over:
                decision = self._decider.decide(now)
                if decision is not None:
                    self._carry_out(decision)
        if self._publication is not None:
            self._publication.withdraw()

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
        """The process that started the rank has gone; some launchers leave ranks behind then."""
        if self.process.launcher is not None:
            self._loop.selector.unregister(self.process.launcher)
        self._tell_loss("the program that started it has gone", FAILED, blames_host=True)

    def _tell_loss(self, how: str, ending: str, blames_host: bool, kind: str = "lost") -> None:
        own = self._membership
        # A rank that is alone has no others to tell.
        if own is not None and own.size > 1 and not self._is_over:
            position = self._describe_position()
            loss = Loss(own.rank, own.hostname, how, position, ending, blames_host)
            self._raise(kind, asdict(loss))

    def _tell_stop(self, seconds: float) -> None:
        how = f"it has been stopped (SIGSTOP) for {seconds:g} s"
        self._tell_loss(how, FAILED, blames_host=True, kind="stopped")

    def _take_from_rank(self, kind: str, content: Any) -> None:
        if kind in QUESTIONS:
            self._answer_rank(kind, *content)
        elif kind == "started":
            self._state = ""
        elif kind == "run":
            self._run = (Path(content[0]), content[1])
        elif kind == "log":
            self._log = (Path(content[0]), content[1])
        elif kind in ("closing", "reopened"):
            self._state = CLOSING if kind == "closing" else ""
            self._stacks.is_finished = kind == "closing"
            self._raise(kind, content)
        elif kind == "stall":
            self._watch_stall(content)
        elif kind == "stack":
            self._stacks.failed = content
        elif kind == "record":
            self._stacks.take_record(content)
        elif kind == "calls" and self._calls_reply is not None:
            self._calls_reply(content)
        elif kind == "announce":
            self._raise(kind, content)
        elif kind == "done":
            self._finish()

    def _answer_rank(self, kind: str, number: int, content: Any) -> None:
        """A question of the rank: each reply names its number, so that a late one is known."""
        if kind == "listen":
            self._listen(number, **content)
        elif kind == "join":
            self._join(number, Membership.unpack(content))
        elif kind == "ask":
            self._ask(Callback(partial(self._send_answers, number)), content)
        else:
            self._fail(number, content)

    def _send_answers(
        self, number: int, hostnames: Sequence[str], answers: Mapping[int, Any]
    ) -> None:
        self._rank.send("reply", [number, [hostnames, sorted(answers.items())]])

    def _fail(self, number: int, content: Any) -> None:
        """The rank has failed, and asks whether it reports that."""
        self._asked = number
        is_alone = self._decider is None and not self._tree.has_parent
        if self._failure is not None or is_alone:
            self._rank.send("reply", [number, "report" if is_alone else "silent"])
        else:
            self._raise("fail", content)

    def _describe_position(self) -> str:
        step = self._progress.read_step()
        return self._state or (f"at step {step}" if step is not None else "")

    def _ask_for_calls(self, reply: Reply) -> None:
        """The rank's last collectives, and where it is; None if it has come to its end."""
        if self._stacks.is_finished:
            reply(None)
        else:
            self._calls_reply = reply
            self._rank.send("calls")

    def _describe_idleness(self) -> list[Any]:
        """How long the rank has not moved, and whether it is in a collective.

        0 seconds where it is stopped, or not watched.
        """
        is_stopped = self._stacks.reader.find_state() in ("T", "t")
        idle = 0.0 if is_stopped else self._progress.find_idle_seconds()
        return [idle, self._progress.is_in_collective()]

    # The other ranks

    def _listen(
        self, number: int, address: str, token: str, clients: str, ports: dict[str, int] | None
    ) -> None:
        """Listen on an address, or for this node where it is empty; tell the rank the place."""
        allowed = PortRange(**ports) if ports is not None else None
        others: dict[str, Callable[[Link], object]] = {}
        if clients:
            others[clients] = self._admit_client
        try:
            place = self._tree.listen(address, allowed, token, others)
        except OSError as error:
            reason = error.strerror or error
            problem = f"cannot listen on {address or 'this node'}: {reason}"
            self._rank.send("problem", [number, problem])
            return
        if clients:
            self._publication = Publication(place, clients)
        self._rank.send("reply", [number, place])

    def _join(self, number: int, membership: Membership) -> None:
        self._membership, self._joining = membership, number
        try:
            self._tree.connect(membership)
        except OSError as error:
            self._rank.send("problem", [number, str(error)])
            return
        self._stop.begin(membership.seconds)
        self._attempt.begin(membership)
        if not membership.places:
            self._decider = Decider(membership.size)
            self._requests = Requests(membership.hostnames)
            if self._publication is not None:
                self._publication.publish(self._log[0].parent if self._log is not None else None)
            self._note_joined()

    def _note_joined(self) -> None:
        self._rank.send("reply", [self._joining, None])

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
        # At the end of all sessions each companion ends once its own session is closed.
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
            finished = Finished.unpack(content)
            self._decider.close(finished.rank, finished.hostname)
            self._end_watch.add(finished)
        elif kind == "reopened":
            rank, session = content
            self._decider.reopen(rank)
            self._end_watch.reopen(session)
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
        from mpiddp.lifeline.report import Reporter

        assert self._membership is not None
        directory, attempt = self._run if self._run is not None else (None, 1)
        reporter = Reporter(
            self._membership, self._progress.read_step(), directory, attempt, self._log
        )
        reporter.report(reason, table, lost)

    def _spread(self, kind: str, content: Any) -> None:
        """Pass a message on to those below, and heed it."""
        self._tree.send_down(kind, content)
        if kind == "failing":
            self._failure = Failure(**content)
            own = self._membership
            if self._asked is not None and own is not None:
                is_reporter = own.rank == self._failure.rank
                self._rank.send("reply", [self._asked, "report" if is_reporter else "silent"])
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

    def _watch_stall(self, seconds: float) -> None:
        StallWatch(seconds, self._make_handlers()).look(time.monotonic())

    def _make_handlers(self) -> StallHandlers:
        return StallHandlers(self._ask_all, self._loop.call_at, self._end_stalled_job)

    def _ask_all(self, client: Client, name: str) -> None:
        if not self._is_over:
            self._ask(client, name)

    def _end_stalled_job(self, reason: str, table: str, lost: Loss | None) -> None:
        if not self._is_over:
            self._report(reason, table, lost)
            self._spread("leave", PeerLostError.exit_code)


def main() -> None:
    """Arguments: the rank's process, and descriptors: of it, or -1, of a socket, and of files."""
    process, own, connection, memory, stacks = map(int, sys.argv[1:])
    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    link = Link(socket.socket(fileno=connection))
    rank = RankProcess(process, own if own >= 0 else None)
    Companion(rank, link, Progress(memory), StackReader(process, stacks)).run()
