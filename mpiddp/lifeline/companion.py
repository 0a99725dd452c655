"""The process beside the ranks of a node, which watches them without their interpreters' locks.

The ranks of a node enter through a local socket. The companions of the other nodes connect to that
of rank 0, which decides what ends the job (`decision`). Ranks are watched by their processes'
descriptors, companions by heartbeats in both directions. A companion that loses rank 0's decides
for its node.

It ends with its ranks. Standard library only: it starts beside them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from mpiddp.errors import PeerLostError
from mpiddp.lifeline.companion_links import CompanionLinks, Handlers
from mpiddp.lifeline.decision import Decider, Decision, Failure, Leave, Loss
from mpiddp.lifeline.membership import Membership
from mpiddp.lifeline.requests import LOSS_SECONDS, Client, Requests
from mpiddp.lifeline.stacks.positions import StackPosition, read_answers
from mpiddp.lifeline.stall import EndWatch, Finished, StallHandlers, StallWatch
from mpiddp.lifeline.watched_rank import RankEntry, WatchedRank
from mpiddp.lifeline.watches import AttemptWatch
from mpiddp.process.publication import Publication
from mpiddp.process.sockets.event_loop import EventLoop
from mpiddp.process.sockets.links import Link, encode_token
from mpiddp.process.sockets.listener import TokenListener
from mpiddp.process.sockets.ports import PortRange

QUESTIONS = frozenset({"listen", "join", "ask", "fail"})
"""Messages of a rank that get a reply."""
ENTRY_SECONDS = 20.0
"""How long the first rank may take to enter."""
LEAVE_SECONDS = 1.0
"""How long a rank may take to leave before it is killed."""
TURN_SECONDS = 0.5
LAST_TURN = 3
"""Companions that have lost rank 0's act in turns: the first may end the job."""
FLUSH_SECONDS = 1.0


class Companion:
    """One companion's state."""

    def __init__(self, server: socket.socket, token: str) -> None:
        """``server``: a local socket at which ranks that know ``token`` enter."""
        self._ranks: dict[int, WatchedRank] = {}
        """Of this node, by rank; those that have ended, too."""
        self._loop = EventLoop()
        admit = {encode_token(token): self._admit_rank}
        self._entrance = TokenListener([server], self._loop.selector, admit)
        self._links = CompanionLinks(
            self._loop,
            Handlers(
                take_decision=self._take_from_above,
                take_report=self._take_from_below,
                note_parent_lost=self._note_parent_lost,
                note_child_lost=self._note_child_lost,
            ),
        )
        self._askers: list[Client] = []
        """Clients of this companion that wait for an answer of all ranks."""
        self._publication: Publication | None = None
        """Of rank 0's companion: where clients find it."""
        self._membership: Membership | None = None
        self._decider: Decider | None = None
        """Of rank 0's companion."""
        self._requests = Requests((), self._loop)
        self._end_watch = EndWatch(self._make_handlers())
        """Of rank 0's companion."""
        self._attempt = AttemptWatch()
        self._failure: Failure | None = None
        """The rank that reports its error."""
        self._early_losses: list[Loss] = []
        """Of ranks that ended before this companion had joined the others."""
        self._has_joined = False
        self._joining: dict[int, int] = {}
        """By rank, its question that is answered once this companion has joined the others."""
        self._asked: dict[int, int] = {}
        """By rank, its question whether it reports its error."""
        self._has_looked = self._is_looking = False
        """Whether all ranks were asked where they are since one was lost, and whether they still
        may answer."""
        self._others: list[StackPosition] = []
        """What they have answered."""
        self._loss: Loss | None = None
        """The lost rank that ends the job, while the others may answer."""
        self._is_over = False
        """Whether nothing is watched any more: all sessions are closed, or the job ends."""
        self._start = time.monotonic()
        self._end = float("inf")
        """When this process ends at the latest."""

    def run(self) -> None:
        """Watch until all ranks of this node have gone, or have closed their sessions."""
        while not self._is_finished():
            # While this process was stopped, perhaps with all others, no silence was heard.
            self._loop.wait(self._find_time(), self._add_pause)
            now = time.monotonic()
            # Heartbeats wake the loop for it.
            if self._attempt.is_superseded and not self._is_over:
                self._spread("leave", PeerLostError.exit_code)
            self._entrance.refresh(now)
            self._links.refresh(now)
            if self._decider is not None and not self._is_over:
                decision = self._decider.decide(now)
                if decision is not None:
                    self._carry_out(decision)
        if self._publication is not None:
            self._publication.withdraw()

    def _find_time(self) -> float:
        """When something is due, whatever comes."""
        parts = (self._loop, self._entrance, self._links)
        due = [self._end, *(part.find_time() for part in parts)]
        if self._decider is not None and not self._is_over:
            due.append(self._decider.find_time())
        if not self._ranks:
            due.append(self._start + ENTRY_SECONDS)
        return min(due)

    def _add_pause(self, seconds: float) -> None:
        self._links.add_pause(seconds)
        for rank in self._ranks.values():
            rank.add_pause(seconds)

    def _is_finished(self) -> bool:
        if self._end == float("inf") and self._have_ended() and not self._is_needed():
            self._is_over = True
            self._links.say_goodbye()
            self._end = time.monotonic() + FLUSH_SECONDS
        is_ending = self._end < float("inf")
        return is_ending and (time.monotonic() >= self._end or not self._links.has_unsent)

    def _have_ended(self) -> bool:
        if not self._ranks:
            return time.monotonic() >= self._start + ENTRY_SECONDS
        return all(rank.has_ended for rank in self._ranks.values())

    def _is_needed(self) -> bool:
        """Whether other nodes need this companion when its own ranks have ended."""
        # A session is closed once all ranks have met for it: then none is missed.
        have_closed = all(rank.is_closed for rank in self._ranks.values())
        if self._is_over or have_closed or self._membership is None:
            return False
        owes_report = self._decider is not None and self._decider.owes_report()
        owes_report |= self._loss is not None
        return self._links.has_children or owes_report

    # The ranks of this node

    def _admit_rank(self, connection: socket.socket) -> None:
        """Its entry comes next."""

        def enter(_: int) -> None:
            self._loop.selector.unregister(connection)
            try:
                entry = RankEntry.receive(connection)
            except (OSError, ValueError):
                connection.close()
                return
            rank = WatchedRank(self._loop, connection, entry, self._take_from_rank, self._tell_loss)
            self._ranks[rank.number] = rank
            if self._membership is not None:
                rank.watch_stops(self._membership.seconds)

        self._loop.selector.register(connection, selectors.EVENT_READ, enter)

    def _tell_loss(self, kind: str, loss: Loss) -> None:
        own = self._membership
        if own is None:
            self._early_losses.append(loss)
        # A rank that is alone has no others to tell.
        elif own.size > 1 and not self._is_over:
            self._raise(kind, asdict(replace(loss, hostname=own.hostname)))

    def _take_from_rank(self, rank: WatchedRank, kind: str, content: Any) -> None:
        if kind in QUESTIONS:
            self._answer_rank(rank, kind, *content)
        elif kind == "stall":
            StallWatch(content, self._make_handlers()).look(time.monotonic())
        elif kind == "done":
            rank.close()
        else:
            self._raise(kind, content)

    def _answer_rank(self, rank: WatchedRank, kind: str, number: int, content: Any) -> None:
        """A question of a rank: each reply names its number, so that a late one is known."""
        if kind == "listen":
            self._listen(rank.link, number, **content)
        elif kind == "join":
            self._joining[rank.number] = number
            self._join(rank.link, number, content)
        elif kind == "ask":
            self._ask(partial(_reply_answers, rank.link, number), content)
        else:
            self._fail(rank, number, content)

    def _fail(self, rank: WatchedRank, number: int, content: Any) -> None:
        """The rank has failed, and asks whether it reports that."""
        self._asked[rank.number] = number
        is_alone = self._decider is None and not self._links.has_parent
        if self._failure is not None or is_alone:
            rank.link.send("reply", [number, "report" if is_alone else "silent"])
        else:
            self._raise("fail", content)

    def _listen(
        self, link: Link, number: int, address: str, token: str, clients: str, ports: Any
    ) -> None:
        """Listen for the companions of other nodes, and tell the rank where."""
        allowed = PortRange(**ports) if ports is not None else None
        try:
            place = self._links.listen(address, allowed, token, {clients: self._admit_client})
        except OSError as error:
            problem = f"cannot listen on {address}: {error.strerror or error}"
            link.send("problem", [number, problem])
            return
        self._publication = Publication(place, clients)
        link.send("reply", [number, place])

    def _join(self, link: Link, number: int, content: Mapping[str, Any] | None) -> None:
        """Join the other nodes' companions, as the first rank says; the others wait for it."""
        if content is not None:
            self._membership = own = Membership.unpack(content)
            try:
                self._links.connect(own)
            except OSError as error:
                link.send("problem", [number, str(error)])
                return
            for rank in self._ranks.values():
                rank.watch_stops(own.seconds)
            self._attempt.begin(own)
            if not own.address:
                self._decider = Decider(own.size)
                self._requests = Requests(own.hostnames, self._loop)
                if self._publication is not None:
                    log = self._ranks[own.rank].log
                    self._publication.publish(log[0].parent if log is not None else None)
                self._has_joined = True
            for loss in self._early_losses:
                self._tell_loss("lost", loss)
        if self._has_joined:
            self._note_joined()

    def _note_joined(self) -> None:
        self._has_joined = True
        joining, self._joining = self._joining, {}
        for number, question in joining.items():
            self._ranks[number].link.send("reply", [question, None])

    # The other nodes

    def _admit_client(self, link: Link) -> None:
        client = partial(_send_answers, link)
        self._loop.add(link, lambda kind, _: self._ask(client, kind), lambda _: None)

    def _take_from_above(self, kind: str, content: Any) -> None:
        if kind == "welcome":
            self._note_joined()
        elif kind == "closed":
            # All sessions are being closed, or all ranks have been told to leave.
            self._is_over = True
        elif kind == "answers":
            askers, self._askers = self._askers, []
            hostnames, answers = content
            for asker in askers:
                asker(hostnames, dict(answers))
        else:
            self._spread(kind, content)

    def _take_from_below(self, link: Link, kind: str, content: Any) -> None:
        if kind == "ask":
            self._ask(partial(_send_answers, link), content)
        else:
            self._raise(kind, content)

    def _note_child_lost(self, rank: int, how: str) -> None:
        own = self._membership
        if own is not None:
            hostname = own.hostnames[rank] if own.hostnames else own.hostname
            self._raise("lost", asdict(Loss(rank, hostname, how)))

    def _note_parent_lost(self, how: str) -> None:
        assert self._membership is not None
        turn = min(self._membership.node_rank - 1, LAST_TURN)
        # At the end of all sessions each companion ends once those of its node are closed.
        turn += any(rank.is_finished for rank in self._ranks.values())
        when = time.monotonic() + turn * TURN_SECONDS
        self._loop.call_at(when, lambda _: self._take_over(how))

    def _take_over(self, how: str) -> None:
        """Decide without rank 0's companion."""
        assert self._membership is not None
        loss = Loss(0, self._membership.master_hostname, how)
        if not self._is_over:
            self._carry_out(Leave(self._failure.code) if self._failure is not None else loss)

    # Reports go up, decisions down

    def _raise(self, kind: str, content: Any) -> None:
        if self._decider is None:
            self._links.send_up(kind, content)
            return
        now = time.monotonic()
        if kind == "lost":
            self._decider.lose(Loss(**content), now)
            self._look_at_others()
        elif kind == "fail":
            self._decider.fail(Failure(**content), now)
        elif kind == "announce":
            if self._decider.announce(Failure(**content)):
                self._spread("failing", content)
        elif kind == "stopped":
            self._ask(partial(self._decide_stop, Loss(**content)), "stopped")
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
        elif isinstance(decision, Leave):
            self._spread("leave", decision.code)
        else:
            self._loss = decision
            self._end_with_loss()

    def _look_at_others(self) -> None:
        """Ask where all ranks are when the first is lost, at once: a launcher may end them now."""
        if not self._has_looked:
            self._has_looked = self._is_looking = True
            number = self._requests.begin(self._note_others, LOSS_SECONDS)
            self._spread("request", [number, "stacks"])

    def _note_others(self, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
        self._is_looking = False
        assert self._decider is not None
        # The companion of a node whose ranks have all gone may have gone as well.
        lost = self._decider.lost_ranks - answers.keys()
        self._others = [
            replace(each, ended=True) if each.rank in lost else each
            for each in read_answers(hostnames, answers)
        ]
        self._end_with_loss()

    def _end_with_loss(self) -> None:
        """End the job if a lost rank is the reason, and it is known where the others are."""
        if self._loss is not None and not self._is_looking and self._membership is not None:
            loss, self._loss = self._loss, None
            self._end_job(loss.describe(self._membership.size), self._others, loss)

    def _end_job(self, reason: str, positions: Sequence[StackPosition], lost: Loss | None) -> None:
        """Report ``reason``, and have all ranks leave."""
        # Imported when it is needed: it takes as long as all else of this process's start.
        from mpiddp.lifeline.loss_report import report

        assert self._membership is not None
        if not self._is_over:
            report(self._membership, self._ranks[self._membership.rank], reason, positions, lost)
            self._spread("leave", PeerLostError.exit_code)

    def _spread(self, kind: str, content: Any) -> None:
        """Pass a message on to the other nodes, and act on it."""
        self._links.send_down(kind, content)
        if kind == "failing":
            self._failure = Failure(**content)
            for number, question in self._asked.items():
                answer = "report" if number == self._failure.rank else "silent"
                self._ranks[number].link.send("reply", [question, answer])
        elif kind == "leave":
            self._is_over = True
            for rank in self._ranks.values():
                rank.link.send("leave", content)
            self._loop.call_at(time.monotonic() + LEAVE_SECONDS, self._kill_ranks)
        elif kind == "request":
            number, name = content
            for rank in self._ranks.values():
                rank.answer(name, partial(self._send_answer, number, rank.number))

    def _kill_ranks(self, _: float) -> None:
        for rank in self._ranks.values():
            rank.process.kill()

    def _send_answer(self, number: int, rank: int, answer: Any) -> None:
        self._raise("answer", [number, rank, answer])

    def _ask(self, client: Client, name: str) -> None:
        """Give ``client`` the answers of all ranks."""
        if self._decider is not None:
            number = self._requests.begin(client)
            self._spread("request", [number, name])
        elif self._links.has_parent:
            self._askers.append(client)
            self._links.send_up("ask", name)
        else:
            client([], {})

    def _decide_stop(
        self, loss: Loss, hostnames: Sequence[str], answers: Mapping[int, Any]
    ) -> None:
        """A rank that is stopped is lost to the others, unless the whole job was suspended."""
        is_alone = len(answers) < len(hostnames) or not all(answers.values())
        if answers.get(loss.rank) and is_alone and self._decider is not None:
            self._decider.lose(loss, time.monotonic())
            self._look_at_others()

    # A job that stands still

    def _make_handlers(self) -> StallHandlers:
        return StallHandlers(self._ask_all, self._loop.call_at, self._end_job)

    def _ask_all(self, client: Client, name: str) -> None:
        if not self._is_over:
            self._ask(client, name)


def _send_answers(link: Link, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
    link.send("answers", [hostnames, list(answers.items())])


def _reply_answers(
    link: Link, number: int, hostnames: Sequence[str], answers: Mapping[int, Any]
) -> None:
    link.send("reply", [number, [hostnames, list(answers.items())]])


def main() -> None:
    """Arguments: descriptors, of a listening socket, and of a pipe with the ranks' token."""
    server, token = map(int, sys.argv[1:])
    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with socket.socket(fileno=server) as listening, os.fdopen(token) as pipe:
        Companion(listening, pipe.read()).run()
