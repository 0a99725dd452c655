"""What a companion reports: on the console, in the logs, and in ``outcome.json``."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import PeerLostError
from mpiddp.lifeline.decision import Loss
from mpiddp.lifeline.membership import Membership
from mpiddp.process.background import BackgroundCall, LateError
from mpiddp.process.outcome import Outcome, find_log, write_report
from mpiddp.process.streams.console import print_report

FORWARD_SECONDS = 0.2
"""How long a launcher may take to read a report."""
REPORT_SECONDS = 1.0
"""How long the others' end waits for a report."""


@dataclass(frozen=True)
class Reporter:
    """The rank in whose name a companion reports: its node's first."""

    membership: Membership
    step: int | None
    directory: Path | None
    """Of the run."""
    attempt: int
    own_log: tuple[Path, bool] | None
    """A log of all that the rank prints, and whether standard error leads elsewhere."""

    def report(self, reason: str, table: str, lost: Loss | None) -> None:
        """Say why the job ends, as far as console and files take it within REPORT_SECONDS.

        ``table``: more lines; ``lost``: the rank whose end it was.
        """
        text = f"mpiddp: {reason}\n{table}"
        log = find_log(self.directory, self.membership.rank)
        if self.own_log is not None:
            path, is_missing = self.own_log
            log = path if is_missing else None

        def tell() -> None:
            print_report(text)
            write_report(log, text, self.directory, self._make_outcome(reason, lost))
            # Some launchers forget what they have not read when ranks abort.
            time.sleep(FORWARD_SECONDS)

        with contextlib.suppress(LateError):
            BackgroundCall(tell).finish(REPORT_SECONDS)

    def _make_outcome(self, reason: str, lost: Loss | None) -> Outcome:
        return Outcome(
            code=PeerLostError.exit_code,
            reason=reason,
            rank=self.membership.rank,
            host=self.membership.hostname,
            step=self.step,
            attempt=self.attempt,
            lost_rank=lost.rank if lost is not None else None,
            lost_host=lost.hostname if lost is not None and lost.blames_host else None,
        )
