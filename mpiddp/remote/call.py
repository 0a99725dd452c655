"""One call of a function on all ranks, as the calling process sees it.

While a function runs, this process prints what the ranks print, and collects their answers. The
first error, a lost rank, the deadline or Ctrl-C begins the end of the call: the other ranks may
finish, then they are interrupted, and a rank that still does not answer has the job ended.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpiddp.errors import (
    OWN,
    ConfigurationError,
    MpiddpError,
    PeerLostError,
    RankFailedError,
    RemoteError,
    UnreachableError,
)
from mpiddp.lifeline.requests import gather_stacks
from mpiddp.lifeline.stacks.verdict import describe
from mpiddp.remote import pickling
from mpiddp.remote.channel import Message, Parcel
from mpiddp.remote.job import Member, RankJob, describe_ranks
from mpiddp.wording import name_ranks, read_message

FINISH_SECONDS = 2.0
"""How long other ranks may go on after the first error."""
STOP_SECONDS = 5.0
"""How long a rank that was interrupted may take to answer."""
LOST_SECONDS = 5.0
"""Timeout for the job's report once a rank was lost; usually it takes under 1 s."""
PRINT_SECONDS = 1.0
"""If nothing arrives for so long, the ranks' output before their answers is taken as complete."""
LINE_SECONDS = 0.2
"""Period of the checks for lines without an end."""


@dataclass(frozen=True)
class Request:
    """What is asked of each rank."""

    number: int
    name: str
    """Of the function, for messages."""
    parcel: Parcel
    fingerprint: str
    sources: Mapping[str, Sequence[str]]
    """Lines of files that only this process has, such as a notebook's cells, for tracebacks."""
    seconds: float
    """How long it may take."""


class Call:
    """One call of a function on all ranks."""

    def __init__(self, job: RankJob, request: Request, wake: int) -> None:
        """``wake``: a descriptor that can be read when the call is to be interrupted."""
        self._job, self._request, self._wake = job, request, wake
        self._waiting: dict[int, Member] = {member.rank: member for member in job.members}
        self._answers: dict[int, Message] = {}
        self._errors: dict[int, Exception] = {}
        self._tracebacks: dict[int, str] = {}
        self._lost: list[int] = []
        self._late: list[int] = []
        """Ranks whose function still ran when its time was up."""
        self._stacks = ""
        self._is_stopping = self._is_interrupted = False
        self._limit = float("inf")
        self._selector = selectors.DefaultSelector()

    def run(self) -> list[Any]:
        """What each rank returned, by rank.

        Raises RankFailedError, and KeyboardInterrupt if it was interrupted. The job has ended then
        if not all ranks have answered, or they are no longer at the same collective.
        """
        with self._selector, self._note_interrupts():
            try:
                self._exchange()
            except BaseException:  # Of a user's sink, or a second Ctrl-C; ranks still answer.
                self._job.kill()
                raise
            return self._finish()

    @contextlib.contextmanager
    def _note_interrupts(self) -> Iterator[None]:
        """Raise Ctrl-C at the end only: within a message it would break the connection."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or (
            threading.current_thread() is not threading.main_thread()
        ):
            yield
            return

        def note(number: int, frame: Any) -> None:
            signal.signal(number, signal.default_int_handler)
            os.eventfd_write(self._wake, 1)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            is_noted = signal.getsignal(signal.SIGINT) is not note
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if is_noted and not self._is_interrupted:
                raise KeyboardInterrupt

    def _exchange(self) -> None:
        for member in self._job.members:
            self._watch(member.calls, partial(self._receive, member))
        for output in self._job.outputs:
            self._watch(output, output.read)
        self._watch(self._wake, self._interrupt)
        self._watch(self._job.report, self._note_end)
        self._limit = time.monotonic() + self._request.seconds
        self._send()
        self._collect()
        self._await_output()

    def _watch(self, file: Any, act: Callable[[], object]) -> None:
        if isinstance(file, int) or file.fileno() >= 0:
            self._selector.register(file, selectors.EVENT_READ, act)

    def _send(self) -> None:
        request = self._request
        content = {
            "number": request.number,
            "fingerprint": request.fingerprint,
            "folders": [os.path.abspath(folder) for folder in sys.path],
            "sources": request.sources,
        }
        self._tell("call", content, request.parcel)

    def _tell(self, kind: str, content: Any, parcel: Parcel | None = None) -> None:
        """Send a message to the ranks that have not answered."""
        for rank, member in list(self._waiting.items()):
            try:
                member.calls.send(kind, content, parcel)
            except OSError:
                self._lose(rank)

    # While ranks work

    def _collect(self) -> None:
        while self._waiting:
            # This process may have been stopped (Ctrl-Z): what arrived meanwhile is in time.
            limit = self._limit if time.monotonic() >= self._limit else None
            self._step(min(self._limit, time.monotonic() + LINE_SECONDS))
            if self._waiting and limit == self._limit and not self._escalate():
                return

    def _step(self, until: float) -> bool:
        """Handle what arrives until then; False if nothing does."""
        found = self._selector.select(max(0.0, until - time.monotonic()))
        for key, _ in found:
            key.data()
            if getattr(key.fileobj, "is_ended", False):
                self._selector.unregister(key.fileobj)
        for output in self._job.outputs:
            output.flush_late()
        return bool(found)

    def _receive(self, member: Member) -> None:
        rank = member.rank
        try:
            message = member.calls.receive()
        except ConfigurationError as error:
            self._add_error(rank, error)
        except (EOFError, OSError):
            self._selector.unregister(member.calls)
            if rank in self._waiting:
                self._lose(rank)
        else:
            self._take(rank, message)

    def _take(self, rank: int, message: Message) -> None:
        self._answers[rank] = message
        self._waiting.pop(rank, None)
        if message.kind != "error":
            return
        pickled, name, text, trace = pickling.load(message.body)
        try:
            error = pickling.ResultUnpickler(pickled, message.buffers).load() if pickled else None
        except Exception:  # Its class need not be here, and may ask for other arguments.
            error = None
        if isinstance(error, KeyboardInterrupt) and (self._is_stopping or self._is_interrupted):
            return
        if not isinstance(error, Exception):
            error = RemoteError(f"{name}: {text}")
        self._add_error(rank, error, trace)

    def _add_error(self, rank: int, error: Exception, trace: str = "") -> None:
        self._waiting.pop(rank, None)
        self._errors[rank], self._tracebacks[rank] = error, trace
        self._shorten(FINISH_SECONDS)

    def _lose(self, rank: int) -> None:
        del self._waiting[rank]
        self._lost.append(rank)
        self._is_stopping = True
        self._shorten(LOST_SECONDS)

    def _note_end(self) -> None:
        """The job has ended: ranks that have not answered are lost."""
        self._selector.unregister(self._job.report)
        self._lost += self._waiting
        self._waiting.clear()

    def _shorten(self, seconds: float) -> None:
        self._limit = min(self._limit, time.monotonic() + seconds)

    def _interrupt(self) -> None:
        """Interrupt the function on all ranks, since the user wants it."""
        os.eventfd_read(self._wake)
        if not self._is_interrupted:
            self._is_interrupted = True
            self._stop()

    def _escalate(self) -> bool:
        """The time is up: go on to the next stage. False if there is none."""
        if self._lost or self._is_stopping:
            return False
        if not self._errors:
            self._late = list(self._waiting)
            self._stacks = find_stacks(self._job)
        self._stop()
        return True

    def _stop(self) -> None:
        self._is_stopping = True
        self._limit = time.monotonic() + STOP_SECONDS
        self._tell("interrupt", self._request.number)

    def _await_output(self) -> None:
        """Print what ranks that have answered have printed before."""
        outputs = [
            output
            for member in self._job.members
            if member.rank in self._answers
            for output in member.outputs
        ]
        number, comes = self._request.number, True
        while comes and not all(each.is_ended or each.call >= number for each in outputs):
            # A second look: this process may have been stopped meanwhile.
            comes = self._step(time.monotonic() + PRINT_SECONDS) or self._step(0.0)

    # The result

    def _finish(self) -> list[Any]:
        problem = ""
        if self._lost:
            self._add_lost()
            self._job.kill()
        elif self._waiting:
            problem = (
                f"{describe_ranks(list(self._waiting.values()))} did not stop within "
                f"{STOP_SECONDS:g} s"
            )
        else:
            problem = self._find_divergence()
        if problem:
            self._job.kill()
        if self._is_interrupted:
            raise KeyboardInterrupt(problem)
        values = self._load() if not (self._errors or self._late or problem) else []
        if self._late:
            self._add_late()
        elif problem and not self._errors:
            self._errors[0] = PeerLostError(problem)
            problem = ""
        if self._errors:
            raise self._make_error(problem)
        return values

    def _add_lost(self) -> None:
        end = self._job.await_end(LOST_SECONDS)
        named = end.lost_rank if end is not None else None
        rank = self._lost[0] if named is None else named
        reason = end.reason if end is not None else ""
        host = self._job.members[rank].host
        # Errors of other ranks that follow from the loss are left out.
        self._errors = {
            each: error
            for each, error in self._errors.items()
            if each not in self._answers or self._answers[each].content["origin"] == OWN
        }
        self._errors[rank] = PeerLostError(reason or f"rank {rank} on {host} was lost")

    def _add_late(self) -> None:
        text = f"{self._request.name} did not return within {self._request.seconds:g} s"
        late = UnreachableError(text)
        if self._stacks:
            late.add_note(f"Where the ranks were:\n{self._stacks}")
        for rank in self._late:
            self._errors.setdefault(rank, late)

    def _load(self) -> list[Any]:
        values = {}
        for rank, answer in sorted(self._answers.items()):
            try:
                values[rank] = pickling.ResultUnpickler(answer.body, answer.buffers).load()
            except Exception as error:  # A class's ``__setstate__`` may raise anything.
                self._errors[rank] = ConfigurationError(
                    f"what it returned cannot be loaded: {type(error).__name__}: "
                    f"{read_message(error)}"
                )
        return list(values.values())

    def _find_divergence(self) -> str:
        """Why the ranks' next collective calls would not match; empty if they would."""
        states = {rank: answer.content for rank, answer in self._answers.items()}
        if not all(state["has_group"] for state in states.values()):
            return f"{self._request.name} has destroyed torch's default group"
        broken = [rank for rank, state in states.items() if state.get("is_broken")]
        if broken:
            return f"{self._request.name} left {name_ranks(broken)} in the middle of a collective"
        found = {
            what: {rank: state[kind] for rank, state in states.items()}
            for what, kind in (("mpiddp's collectives", "calls"), ("the session", "exchanges"))
        }
        if problem := self._compare(found):
            return problem
        by_group: dict[str, set[int]] = defaultdict(set)
        for state in states.values():
            for group, count in state["groups"].items():
                by_group[group].add(count)
        if any(len(each) > 1 for each in by_group.values()):
            return self._examine()
        return ""

    def _examine(self) -> str:
        """Compare how many collectives each rank has begun: answers count messages of pairs too."""
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for member in self._job.members:
            try:
                member.calls.send("state")
                for group, count in member.calls.receive().content.items():
                    found[f"group {group}"][member.rank] = count
            except (EOFError, OSError):
                return f"{describe_ranks([member])} does not answer"
        return self._compare(found)

    def _compare(self, found: Mapping[str, Mapping[int, int]]) -> str:
        """Describes the first of ``found`` whose counts differ between ranks; empty if none do."""
        for what, counts in found.items():
            ranks: dict[int, list[int]] = defaultdict(list)
            for rank, count in counts.items():
                ranks[count].append(rank)
            if len(ranks) > 1:
                texts = [f"{count} on {name_ranks(which)}" for count, which in ranks.items()]
                return (
                    f"{self._request.name} left the ranks at different collective calls of {what}: "
                    f"{', '.join(texts)}"
                )
        return ""

    def _make_error(self, problem: str) -> RankFailedError:
        members = self._job.members
        merged: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for rank, error in sorted(self._errors.items()):
            key = type(error).__qualname__, read_message(error), self._tracebacks.get(rank, "")
            merged[key].append(rank)
        exceptions = []
        for (_, _, trace), ranks in merged.items():
            error = self._errors[ranks[0]]
            where = describe_ranks([members[rank] for rank in ranks])
            _add_note(error, f"on {where}\n{trace}".rstrip())
            exceptions.append(error)
        count = len(self._errors)
        first = next(iter(self._errors.values()))  # The others may follow from it.
        kind = "" if isinstance(first, MpiddpError) else type(first).__qualname__
        text = ": ".join(filter(None, (kind, read_message(first).partition("\n")[0])))
        message = f"{self._request.name} failed on {count} of {len(members)} ranks: {text}"
        if self._job.end is not None:
            why = f"{problem}, so " if problem else ""
            message += f"; {why}the ranks have ended, and restart() starts them again"
        return RankFailedError(message, exceptions, self._errors)


def _add_note(error: Exception, note: str) -> None:
    """As ``add_note`` does, past a class that refuses attributes or has other notes."""
    notes = error.__dict__.get("__notes__")
    error.__dict__["__notes__"] = [*(notes if isinstance(notes, list) else ()), note]


def find_stacks(job: RankJob, *, is_full: bool = False) -> str:
    """Where each rank is, as the table of ``mpiddp stacks``; empty if they do not say."""
    try:
        return describe(gather_stacks(Path(job.members[0].directory)), is_full=is_full)
    except UnreachableError:
        return ""
