"""What ends a job: a rank that was lost, or one that failed.

A loss has consequences: launchers end the other ranks, and these get errors from their
connections. Their reports may come first. So a decision waits for a moment, and follows the report
that is nearest to the cause.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from mpiddp.errors import OWN, REPEATED, ConfigurationError

WINDOW_SECONDS = 0.05
"""How long the reports of all ranks on one event may take."""
MILD_SECONDS = 0.5
"""How much later than the first rank the last one may end if all were asked to end, or may
report a mistake that all find."""
SUSPICION_SECONDS = 2.0
"""How long a rank whose connection broke waits for word of a lost rank."""
ABANDONED_SECONDS = 2.0
"""How long ranks may outlive one that failed, and was to end the job."""
FAILED, LEFT, ASKED = "failed", "left", "asked"
"""How a rank ended: by an error; with exit code 0; by a signal that asked it to. If all ranks
end in one of the latter ways, none is lost."""
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask processes to end. Launchers send them to all ranks."""


@dataclass(frozen=True)
class Loss:
    """A rank that has gone without closing its session."""

    rank: int
    hostname: str
    how: str
    """A clause: ``it was killed by SIGKILL``."""
    position: str = ""
    """Where it was last known to be: ``at step 7``."""
    ending: str = FAILED
    blames_host: bool = True
    """Whether its host may be the cause: it did not leave by itself."""

    def describe(self, size: int) -> str:
        """One line for the user."""
        position = f" {self.position}" if self.position else ""
        what = "was lost" if self.blames_host else "left early"
        return f"rank {self.rank} of {size} on {self.hostname} {what}{position}: {self.how}"


@dataclass(frozen=True)
class Failure:
    """A rank that has raised an error, which it wants to report, and end the job."""

    rank: int
    code: int
    """Exit code."""
    origin: str
    """Where the error comes from (`mpiddp.errors.OWN` and its like)."""
    text: str = ""
    """What the error says, shortened."""


@dataclass(frozen=True)
class Leave:
    """All ranks are to leave: the one that failed has gone without ending them."""

    code: int


Decision = Loss | Failure | Leave
NEVER = (float("inf"), None)


def describe_status(status: int | None) -> tuple[str, str, bool]:
    """`Loss.how`, ``ending`` and ``blames_host`` of a process, by its status from waitpid()."""
    closing = "without closing its session"
    if status is None:
        return f"it ended {closing}", FAILED, True
    number = status & 0x7F
    if not number:
        code = status >> 8
        return f"it left with exit code {code} {closing}", FAILED if code else LEFT, False
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    how = f"it was killed by {name}"
    if number == signal.SIGKILL:
        how += " (by the kernel if memory ran out: see dmesg)"
    return how, ASKED if number in REQUESTS else FAILED, True


class Decider:
    """Collects reports on a job's ranks, and decides what ends it. Times are time.monotonic()'s."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._losses: dict[int, tuple[float, Loss]] = {}
        self._failures: dict[int, tuple[float, Failure]] = {}
        self._closing: dict[int, str] = {}
        self._reporter: Failure | None = None
        self._is_done = False

    def lose(self, loss: Loss, now: float) -> None:
        self._losses.setdefault(loss.rank, (now, loss))

    @property
    def lost_ranks(self) -> frozenset[int]:
        """All that were lost so far."""
        return frozenset(self._losses)

    def fail(self, failure: Failure, now: float) -> None:
        self._failures.setdefault(failure.rank, (now, failure))

    def close(self, rank: int, hostname: str) -> None:
        """A rank has no more to do, and waits for the others to close their sessions."""
        self._closing[rank] = hostname

    def reopen(self, rank: int) -> None:
        """All ranks have closed their sessions, and this one goes on without."""
        self._closing.pop(rank, None)

    def announce(self, failure: Failure) -> bool:
        """A rank ends the job, and it is settled who reports. Returns whether this is news."""
        is_new = self._reporter is None and not self._is_done
        self._reporter = self._reporter or failure
        return is_new

    def owes_report(self) -> bool:
        """Whether a lost rank is about to be reported."""
        return isinstance(self._find_next()[1], Loss)

    def find_time(self) -> float:
        """When there will be a decision if nothing more comes."""
        return self._find_next()[0]

    def decide(self, now: float) -> Decision | None:
        """The decision that is due. After a Failure a Leave may follow; nothing after others."""
        time, decision = self._find_next()
        if decision is None or time > now:
            return None
        if isinstance(decision, Failure):
            self._reporter = decision
        else:
            self._is_done = True
        return decision

    def _find_next(self) -> tuple[float, Decision | None]:
        """The decision on what is known, and when it is due."""
        if self._is_done:
            return NEVER
        if self._reporter is not None:
            time, loss = self._losses.get(self._reporter.rank, NEVER)
            return time + ABANDONED_SECONDS, Leave(self._reporter.code) if loss else None
        own = [row for row in self._failures.values() if row[1].origin == OWN]
        suspects = [row for row in self._failures.values() if row[1].origin != OWN]
        severe = self._find_severe()
        if severe is not None:
            return severe
        if own:
            return self._choose_own(own)
        if self._losses and (suspects or len(self._losses) < self._size):
            time, loss = next(iter(self._losses.values()))
            return (suspects[0][0] + WINDOW_SECONDS if suspects else time + MILD_SECONDS), loss
        if suspects:
            time = suspects[0][0]
            # A rank that only repeats another's failure reports only if no rank says more.
            failure = min(suspects, key=lambda row: row[1].origin == REPEATED)[1]
            early = self._find_early(failure)
            if early is not None:
                return time + MILD_SECONDS, early
            return time + SUSPICION_SECONDS, failure
        return NEVER

    def _choose_own(self, own: list[tuple[float, Failure]]) -> tuple[float, Failure]:
        """The first failure. If others say the same, the lowest of these ranks reports: what all
        ranks find, for example a data set that is not there, is best said by rank 0."""
        time, first = min(own, key=lambda row: row[0])
        same = [each for _, each in own if (each.code, each.text) == (first.code, first.text)]
        is_mistake = first.code == ConfigurationError.exit_code and len(same) < self._size
        due = time + (MILD_SECONDS if is_mistake else WINDOW_SECONDS)
        return due, min(same, key=lambda each: each.rank)

    def _find_severe(self) -> tuple[float, Loss] | None:
        """The loss behind others; None if all ranks may be ending by themselves.

        When one rank fails, or just leaves, launchers end the others: they ask them first, or kill
        them. A rank that leaves with its own error, since it has had no answer for too long, is not
        lost.
        """
        losses = [row for row in self._losses.values() if not self._has_reported(row[1])]
        failed = [time for time, loss in losses if loss.ending == FAILED]
        if failed:
            return failed[0] + WINDOW_SECONDS, next(
                loss for _, loss in losses if loss.ending != ASKED
            )
        asked = [time for time, loss in losses if loss.ending == ASKED]
        if asked and losses[0][1].ending == LEFT:
            return asked[0] + WINDOW_SECONDS, losses[0][1]
        return None

    def _has_reported(self, loss: Loss) -> bool:
        failure = self._failures.get(loss.rank, (0.0, None))[1]
        return failure is not None and failure.origin == OWN and not loss.blames_host

    def _find_early(self, failure: Failure) -> Loss | None:
        """The rank that had closed its session when ``failure`` came."""
        ranks = sorted(self._closing.keys() - self._failures.keys())
        if not ranks:
            return None
        how = (
            "it has closed its session, at the end of its program, while other ranks still called "
            f"collectives. Rank {failure.rank} got: {failure.text}"
        )
        return Loss(ranks[0], self._closing[ranks[0]], how, blames_host=False)
