"""What clients ask rank 0's companion, and the answers of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpiddp.errors import UnreachableError
from mpiddp.lifeline.stacks.positions import StackPosition, read_answers
from mpiddp.process.publication import ADDRESS_FILE, read_address
from mpiddp.process.sockets.event_loop import EventLoop
from mpiddp.process.sockets.links import connect

ANSWER_SECONDS = 2.0
"""How long answers are waited for."""
LOSS_SECONDS = 0.7
"""How long they are once a rank is lost, and the others are about to leave."""

Client = Callable[[Sequence[str], Mapping[int, Any]], object]
"""Takes the hosts of all ranks, and the answers by rank."""


class Requests:
    """Those that have not been answered yet."""

    def __init__(self, hostnames: Sequence[str], loop: EventLoop) -> None:
        """``hostnames``: of all ranks."""
        self._hostnames = hostnames
        self._loop = loop
        self._count = 0
        self._open: dict[int, tuple[Client, dict[int, Any]]] = {}

    def begin(self, client: Client, seconds: float | None = None) -> int:
        """The number of a new request of ``client``, which gets what has come in ``seconds``, by
        default ANSWER_SECONDS."""
        seconds = ANSWER_SECONDS if seconds is None else seconds
        self._count = number = self._count + 1
        self._open[number] = (client, {})
        self._loop.call_at(time.monotonic() + seconds, lambda _: self._finish(number))
        return number

    def add(self, number: int, rank: int, answer: Any) -> None:
        """Add the answer of one rank; the last one completes the request."""
        if number in self._open:
            _, answers = self._open[number]
            answers[rank] = answer
            if len(answers) == len(self._hostnames):
                self._finish(number)

    def _finish(self, number: int) -> None:
        if number in self._open:
            client, answers = self._open.pop(number)
            client(self._hostnames, dict(sorted(answers.items())))


def ask(directory: Path, name: str) -> tuple[list[str], dict[int, Any]]:
    """Ask all ranks of the job that has published its address in ``directory``.

    Returns the hosts of all ranks, and the answers that came in time, by rank. Raises OSError if
    the job does not answer, and ValueError if what it says, or the file, is damaged.
    """
    link = connect(*read_address(directory / ADDRESS_FILE), ANSWER_SECONDS)
    seconds = 2 * ANSWER_SECONDS
    try:
        link.send(name)
        while link.wait(seconds):
            for kind, (hostnames, answers) in link.receive():
                if kind == "answers":
                    return hostnames, dict(answers)
        raise TimeoutError(f"no answer within {seconds:g} s")
    finally:
        link.close()


def gather_stacks(directory: Path) -> list[StackPosition]:
    """Where each rank is of the job that has published its address in ``directory``.

    Raises UnreachableError if it does not answer.
    """
    try:
        hostnames, answers = ask(directory, "stacks")
    except (OSError, ValueError) as error:
        raise UnreachableError(f"the job of {directory} does not answer: {error}") from None
    return read_answers(hostnames, answers)
