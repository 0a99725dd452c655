"""Finds out that a job stands still, or waits for a rank that has come to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mpiddp.lifeline.decision import Loss
from mpiddp.lifeline.requests import Client
from mpiddp.lifeline.stacks.dump import Frame
from mpiddp.lifeline.stacks.positions import StackPosition, name_positions, read_answers
from mpiddp.lifeline.stacks.recorded_call import OWN_GROUP

CHECK_SECONDS = 2.0
"""How long a job that stands still has to move after all: longer than `movement.LONGEST_PERIOD`."""
END_SECONDS = 1.0
"""How long after a rank's end, and how often, the others are asked for what they wait."""


@dataclass(frozen=True)
class StallHandlers:
    """What the watches need of rank 0's companion."""

    ask: Callable[[Client, str], object]
    """Ask all ranks, by the name of a request."""
    call_at: Callable[[float, Callable[[float], object]], object]
    end_job: Callable[[str, Sequence[StackPosition], Loss | None], object]
    """With the reason, where each rank is, and the rank whose end it was."""


class StallWatch:
    """Asks all ranks, when they may have been idle for ``seconds``, how long they have been.

    The job stands still if no rank moves, or if some are in one collective for all that time:
    whatever the others do, they do not come to it.
    """

    def __init__(self, seconds: float, handlers: StallHandlers) -> None:
        self._seconds = seconds
        self._handlers = handlers
        self._stands_still = False
        """Whether the job stood still when the ranks were last asked."""

    def look(self, _: float) -> None:
        """Ask now, and again when that may find something."""
        self._handlers.ask(self._decide, "idle")

    def _decide(self, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
        # A rank that does not answer may be moving.
        all_idle = (
            min(idle for idle, _ in answers.values()) if len(answers) == len(hostnames) else 0.0
        )
        waiting = {rank: idle for rank, (idle, is_inside) in answers.items() if is_inside}
        idle = max(all_idle, *waiting.values(), 0.0)
        # Asked twice, since all may have been stopped together, and have been continued just now.
        between = min(self._seconds / 2, CHECK_SECONDS)
        was_still, self._stands_still = self._stands_still, idle >= self._seconds - between
        if was_still and idle >= self._seconds:
            late = (
                []
                if all_idle >= self._seconds
                else [
                    StackPosition(rank, hostnames[rank], ())
                    for rank, seconds in waiting.items()
                    if seconds >= self._seconds
                ]
            )
            self._handlers.ask(partial(self._end, late), "stacks")
            return
        # Before then the job cannot have stood still for long enough.
        pause = self._seconds - idle
        if not self._stands_still:
            pause -= between
        elif not was_still:
            pause = between
        self._handlers.call_at(time.monotonic() + pause, self.look)

    def _end(
        self, late: Sequence[StackPosition], hostnames: Sequence[str], answers: Mapping[int, Any]
    ) -> None:
        """``late``: the ranks that are in one collective, if others move."""
        reason = f"no rank has made progress for {self._seconds:g} s"
        if late:
            verb = "has" if len(late) == 1 else "have"
            reason = f"{name_positions(late)} {verb} been in one collective for {self._seconds:g} s"
        self._handlers.end_job(reason, read_answers(hostnames, answers), None)


@dataclass(frozen=True)
class Calls:
    """Which collectives a rank has called."""

    numbers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """As `flight_recorder.read_calls` finds them."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """As `flight_recorder.count_calls` finds them."""
    own: tuple[int, int] = (0, 0)
    """Of mpiddp's collectives: the number of the last call, and of the last complete one."""

    def find_last(self, group: str) -> int | None:
        """The number of the last collective of a group (``gloo:0``); None if it is not known."""
        if group == OWN_GROUP:
            return self.own[0]
        if group in self.numbers:
            return self.numbers[group][0]
        return 0 if self.counts.get(group.partition(":")[2]) == 0 else None

    def find_unmatched(self, finished: Calls) -> tuple[str, int] | None:
        """A call that is not complete, and that a rank that has finished did not make.

        The name of the group and the number.
        """
        for group, (last, complete) in {**self.numbers, OWN_GROUP: self.own}.items():
            own = finished.find_last(group)
            if own is not None and max(own, complete) < last:
                return group, last
        return None

    def is_ahead(self, finished: Calls) -> bool:
        """Whether it seems to have made more calls than a rank that has finished.

        Only for ranks without the recorder, which knows better.
        """
        rows = ((number, finished.counts.get(name)) for name, number in self.counts.items())
        return not self.numbers and any(last is not None and last < number for number, last in rows)


@dataclass(frozen=True)
class Finished:
    """A rank that has come to its end: from here on it calls no collective."""

    rank: int
    hostname: str
    seconds: float
    """How long the others may wait if it is not known for which collective."""
    calls: Calls
    session: int = 1
    """Which of its sessions it has closed, counted alike on all ranks."""

    @staticmethod
    def unpack(content: Mapping[str, Any]) -> Finished:
        """From a message."""
        return Finished(**{**content, "calls": Calls(**content["calls"])})

    def describe(self, how: str, waiting: StackPosition, what: str) -> Loss:
        """Its early end. ``how``: a clause; ``what``: the collective that a rank waits in."""
        name = name_positions([waiting])
        text = (
            f"it has closed its session, at the end of its program, {how}. "
            f"R{name[1:]} waits in {what}: {waiting.line}"
        )
        return Loss(self.rank, self.hostname, text, blames_host=False)


class EndWatch:
    """Asks what the others wait for while some ranks have come to their end.

    Those that compute are waited for, and so are those that call collectives without the ranks
    that have finished.
    """

    def __init__(self, handlers: StallHandlers) -> None:
        self._handlers = handlers
        self._finished: dict[int, Finished] = {}
        self._is_asking = False
        self._state: object = None
        """What the others wait in, if all of them seem to wait; and since when."""
        self._since = 0.0

    def add(self, finished: Finished) -> None:
        self._finished[finished.rank] = finished
        if not self._is_asking:
            self._is_asking = True
            self._handlers.call_at(time.monotonic() + END_SECONDS, self._look)

    def reopen(self, session: int) -> None:
        """A rank goes on, so all have closed that session: none waits in it any more."""
        kept = {rank: each for rank, each in self._finished.items() if each.session > session}
        self._finished = kept

    def _look(self, _: float) -> None:
        self._is_asking = bool(self._finished)
        if self._is_asking:
            self._handlers.ask(self._decide, "calls")

    def _decide(self, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
        positions, calls = {}, {}
        for rank, answer in sorted(answers.items()):
            if answer is not None and rank not in self._finished:
                frames = tuple(Frame(*row) for row in answer["frames"])
                positions[rank] = StackPosition(rank, hostnames[rank], frames)
                calls[rank] = Calls(answer["numbers"], answer["counts"], answer["own"])
        loss = self._find_missed(positions, calls)
        if loss is None:
            is_whole = len(positions) + len(self._finished) == len(hostnames)
            loss = self._find_stuck(positions if is_whole else {}, calls)
        if loss is not None:
            self._handlers.ask(partial(self._end, loss), "stacks")
            return
        self._handlers.call_at(time.monotonic() + END_SECONDS, self._look)

    def _find_missed(
        self, positions: Mapping[int, StackPosition], calls: Mapping[int, Calls]
    ) -> Loss | None:
        """The early end of a rank that a collective needs that others have begun."""
        for rank, position in positions.items():
            for each in self._finished.values():
                found = calls[rank].find_unmatched(each.calls)
                if found is not None:
                    group, number = found
                    name = group.partition(":")[2]
                    where = "the default group" if name == "0" else f"group {name}"
                    where = OWN_GROUP if group == OWN_GROUP else where
                    how = f"after collective {each.calls.find_last(group)} of {where}"
                    return each.describe(how, position, f"collective {number}")
        return None

    def _find_stuck(
        self, positions: Mapping[int, StackPosition], calls: Mapping[int, Calls]
    ) -> Loss | None:
        """If the recorder does not tell: all others have waited in collectives for long."""
        now = time.monotonic()
        waits = [position.waits for position in positions.values()]
        ended = list(self._finished.values())
        is_sure = True in waits or any(
            calls[rank].is_ahead(each.calls) for rank in positions for each in ended
        )
        state = [(rank, position.line, calls[rank]) for rank, position in positions.items()]
        if not ended or not is_sure or False in waits:
            self._state = None
        elif state != self._state:
            self._state, self._since = state, now
        elif now - self._since >= ended[0].seconds:
            how = f"and the others have waited in collectives for {ended[0].seconds:g} s"
            return ended[0].describe(how, next(iter(positions.values())), "one")
        return None

    def _end(self, loss: Loss, hostnames: Sequence[str], answers: Mapping[int, Any]) -> None:
        positions = read_answers(hostnames, answers)
        self._handlers.end_job(loss.describe(len(hostnames)), positions, loss)
