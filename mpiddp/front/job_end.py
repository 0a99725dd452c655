"""How a job ended: its exit code, and the reason for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mpiddp.errors import (
    FAILURE,
    INTERRUPTED,
    MEANINGS,
    NO_CHECKPOINT,
    PREEMPTED,
    SUCCESS,
    ConfigurationError,
    LaunchError,
    PeerLostError,
    StoppedError,
)

FAILED = re.compile(r"srun: error: (Node failure on |.*: tasks? [0-9,-]+: )")
LEFT = re.compile(r" Exited with exit code (\d+)$")
MISTAKES = frozenset({ConfigurationError.exit_code, LaunchError.exit_code, NO_CHECKPOINT})
"""Codes after which another attempt would end in the same way."""
FINAL = MISTAKES | {SUCCESS, PREEMPTED, INTERRUPTED}
"""Codes after which there is no other attempt."""
TERMINATED = StoppedError(signal.SIGTERM).exit_code
CRASHED = re.compile(r"killed by SIG(ABRT|BUS|FPE|ILL|SEGV)")
"""What is said of a rank whose own code ended it, on whatever host."""
EXIT = re.compile(r"SystemExit: \d+$|.*: it left with exit code ")
"""What is said of a script that has chosen an exit code, and names no error."""
SHORT_SECONDS = 120.0
"""An attempt of a script that tells no steps counts as one without a step if it was shorter."""


@dataclass(frozen=True)
class Exit:
    """What is known when the launcher has ended."""

    status: int
    """The launcher's exit code."""
    failure: str = ""
    """What srun said of the rank that failed (`find_failure`)."""
    signal: int | None = None
    """The last one that came to the front."""
    outcome: Mapping[str, Any] | None = None
    """What a rank has written (`mpiddp.process.outcome`)."""
    was_killed: bool = False
    """Whether the launcher did not end after a signal, and was killed with what it had started."""
    seconds: float = 0.0
    """How long it ran."""
    preemption: int | None = None
    """The last signal to preempt the job that its ranks were sent from here."""


@dataclass(frozen=True)
class JobEnd:
    """The exit code of a job, and why it is that one."""

    code: int
    why: str = ""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"exit code {self.code}: {describe_code(self.code)}{why}"


class FailureReader:
    """Collects from srun's standard error what it says of failures."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._rest = b""

    def add(self, data: bytes) -> None:
        """Read what has come."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._lines += [text for text in map(_decode, lines) if FAILED.match(text)]
        self._rest = rest[-4096:]

    def find(self) -> str:
        """What was said of the rank that failed (`find_failure`); empty for nothing."""
        return find_failure([*self._lines, _decode(self._rest)])


def _decode(line: bytes) -> str:
    return line.decode(errors="replace")


def find_failure(lines: Iterable[str]) -> str:
    """What srun said of the node or the rank that failed.

    That is ``Node failure on node3``; else one that crashed, ``node1: task 0: Segmentation fault``;
    else one that left with an exit code, ``node1: task 1: Exited with exit code 3``; else one
    that was killed, ``node2: tasks 2-3: Killed``. Their order is no sign: Slurm kills and
    terminates the others because of the one, may name them before it, and srun's code, the
    highest, is theirs.
    """
    said = [line.partition("srun: error: ")[2] for line in lines if FAILED.match(line)]
    return min(said, key=_order_failure, default="")


def _order_failure(text: str) -> int:
    """The lower, the more likely it is the cause of the others."""
    left = LEFT.search(text)
    if text.startswith("Node failure"):
        return -1
    if left is None and not text.endswith((" Killed", " Terminated")):
        return 0
    if left is not None and int(left[1]) <= 128:
        return 1
    return 2 if text.endswith(" Killed") else 3


def find_end(found: Exit, launcher: str | None) -> JobEnd:
    """What the job's exit code is: the outcome's, else what srun's messages and signals say.

    Without a launcher it is that of the program itself.
    """
    if launcher is None:
        return JobEnd(found.status, _describe_signal(found.signal) if found.signal else "")
    end = _choose(found)
    if end is None:
        return JobEnd(found.status)
    if end.code != found.status:
        return JobEnd(end.code, f"{end.why}; {launcher}'s code was {found.status}")
    return end


def repeats(found: Exit, before: Exit) -> bool:
    """Whether two attempts in a row ended with the same error at the same step, or without one.

    Numbers in the text do not count if the step is known, or the text is mpiddp's own: in a
    script's they may tell how far it came. Errors of two machines are not the same.
    """
    errors = [_describe_error(each) for each in (before, found)]
    return errors[0] is not None and errors[0] == errors[1]


def _describe_error(found: Exit) -> tuple[Any, ...] | None:
    """What tells an attempt's error from another's; None if it may have taken steps, or is unknown.

    A crash is the script's own wherever it happens; a lost or faulty host is that host's. An exit
    code alone stands for any error.
    """
    outcome = found.outcome or {}
    reason, path, step = outcome.get("reason"), outcome.get("path"), outcome.get("step")
    is_long = path is None and found.seconds > SHORT_SECONDS
    if not reason or is_long or EXIT.match(reason):
        return None
    host = outcome.get("lost_host") if not CRASHED.search(reason) else None
    if outcome.get("node_fault"):
        host = outcome.get("host")
    if path is not None or outcome.get("lost_rank") is not None:
        reason = re.sub(r"\d+", "", reason)
    return outcome["code"], reason, step, host


def _choose(found: Exit) -> JobEnd | None:
    code = (found.outcome or {}).get("code")
    if isinstance(code, int):
        # When a rank is killed, srun terminates the others at once, and they may write down that
        # before they notice the loss. What ends the whole job signals the front as well.
        if code == TERMINATED and found.signal is None and found.failure.endswith(": Killed"):
            return JobEnd(PeerLostError.exit_code, f"{found.failure}; srun terminated the others")
        # Ranks that were told to end, and did so at once, are missed by those that were slower.
        # After Ctrl-C in start-up the launcher terminates them.
        if code in (PeerLostError.exit_code, TERMINATED) and found.signal is not None:
            return _choose_after_signal(found, found.signal)
        return JobEnd(code, _describe_outcome(found.outcome or {}))
    if found.status == SUCCESS:
        return None
    if found.signal is not None:
        return _choose_after_signal(found, found.signal)
    if found.failure:
        # Without an outcome, a rank that ended without an exit code is a lost rank.
        left = LEFT.search(found.failure)
        is_own = left is not None and int(left[1]) <= 128
        code = int(left[1]) if left is not None and is_own else PeerLostError.exit_code
        return JobEnd(code, found.failure)
    return None


def _choose_after_signal(found: Exit, number: int) -> JobEnd | None:
    """A script may choose its exit code. After a signal 1 is mpirun's; MPICH names what it sent."""
    taken = (PeerLostError.exit_code, number, signal.SIGTERM, signal.SIGKILL)
    if FAILURE < found.status <= 128 and found.status not in taken:
        return None
    return JobEnd(128 + number, _describe_signal(number))


def _describe_outcome(outcome: Mapping[str, Any]) -> str:
    """The path of the run's outcome file, and the reason in it."""
    reason = str(outcome.get("reason") or "").partition("\n")[0] if outcome["code"] else ""
    return ": ".join(filter(None, (outcome.get("path"), reason)))


def _describe_signal(number: int) -> str:
    return f"mpiddp was sent {signal.Signals(number).name}"


def describe_code(code: int) -> str:
    """What an exit code means, by the table of `mpiddp.errors`."""
    if code in MEANINGS:
        return MEANINGS[code]
    try:
        return f"signal {code - 128} ({signal.Signals(code - 128).name}) killed it"
    except ValueError:
        return "a code that the program chose"
