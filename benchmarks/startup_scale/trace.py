"""What strace wrote of a rank: its connections, messages and bytes, by stage of start-up.

A message is a call of the system that moved bytes over a socket, in either direction. The trace
holds all of a rank's threads and its companion process, whatever library sends: MPI, torch, Gloo
or mpiddp. What passes through shared memory is no message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.startup_scale.stages import (
    AGREEMENT,
    BYTES,
    COMPANION,
    CONNECTIONS,
    END,
    MARK,
    MESSAGES,
    OF_MARKS,
    REST,
)

LINE = re.compile(r"(\d+) +([\d.]+) (.*)")
RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
UNFINISHED = " <unfinished ...>"
CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)(.*)")
STREAM = re.compile(r"\d+<(TCP|TCPv6|UNIX-STREAM):")
SOCKET = re.compile(r"\d+<(TCP|UDP|UNIX)")
BEGUN = "EINPROGRESS"


@dataclass(frozen=True)
class Call:
    """One call of the system."""

    thread: int
    name: str
    arguments: str
    result: int
    rest: str
    """What follows the result: the name of an error, or of a new descriptor."""


def read_calls(lines: Iterable[str]) -> Iterator[Call]:
    """The calls of a trace that have ended, in the order in which they did."""
    begun: dict[int, str] = {}
    for line in lines:
        found = LINE.match(line)
        if found is None:
            continue
        thread, text = int(found[1]), found[3]
        if text.endswith(UNFINISHED):
            begun[thread] = text.removesuffix(UNFINISHED)
            continue
        resumed = RESUMED.match(text)
        if resumed is not None:
            text = begun.pop(thread, "") + resumed[1]
        call = CALL.match(text)
        if call is not None:
            yield Call(thread, call[1], call[2], int(call[3]), call[4])


def count(lines: Iterable[str]) -> Counter[tuple[str, str]]:
    """How much of what was counted, by name of stage and quantity.

    What companions do counts for them whenever it happens. While the ranks agree that a stage has
    ended, rank 0's other threads still serve it for the others: what they do counts for the stage.
    What comes before the first mark or after the last one does not count.
    """
    counts: Counter[tuple[str, str]] = Counter()
    stage: str | None = None
    served, others = "", set[int]()
    first: int | None = None
    for call in read_calls(lines):
        first = call.thread if first is None else first
        if call.name == "execve" and call.thread != first:
            others.add(call.thread)
        mark = find_mark(call)
        if mark == END:
            break
        if mark is not None:
            stage = OF_MARKS[mark].name
            served = served if mark in (AGREEMENT, REST) else stage
        elif stage is not None:
            where = stage if call.thread == first else served
            where = COMPANION if call.thread in others else where
            for quantity, amount in weigh(call):
                counts[where, quantity] += amount
    return counts


def find_mark(call: Call) -> str | None:
    """The mark that a call is; None if it is none."""
    if call.name not in ("access", "faccessat") or MARK not in call.arguments:
        return None
    return call.arguments.partition(MARK)[2].partition('"')[0]


def weigh(call: Call) -> Iterator[tuple[str, int]]:
    """What a call counts for."""
    if call.name in ("accept", "accept4"):
        if call.result >= 0:
            yield CONNECTIONS, 1
    elif call.name == "connect":
        if STREAM.match(call.arguments) and (call.result == 0 or BEGUN in call.rest):
            yield CONNECTIONS, 1
    elif call.result > 0 and SOCKET.match(call.arguments):
        yield MESSAGES, 1
        yield BYTES, call.result
