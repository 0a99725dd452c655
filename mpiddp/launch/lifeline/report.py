"""The report of a lost rank: on the console, in the logs, and in ``outcome.json``."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from mpiddp.errors import PeerLostError
from mpiddp.launch.background import BackgroundCall, LateError
from mpiddp.launch.failure.outcome import Outcome, find_log, write_report
from mpiddp.launch.failure.termination import print_report
from mpiddp.launch.lifeline.membership import Membership
from mpiddp.launch.lifeline.verdict import Loss

FORWARD_SECONDS = 0.2
"""How long a launcher may take to read a report."""
REPORT_SECONDS = 1.0
"""How long the others' end waits for a report."""


def report(
    loss: Loss,
    membership: Membership,
    step: int | None,
    run: tuple[Path, int] | None,
    own_log: tuple[Path, bool] | None,
) -> None:
    """Say that a rank was lost, as far as console and files take it within REPORT_SECONDS.

    Args:
        run: the run's directory and attempt.
        own_log: a log of all that the rank prints, and whether standard error leads elsewhere.
    """
    reason = loss.describe(membership.size)
    text = f"mpiddp: {reason}\n"

    def tell() -> None:
        print_report(text)
        directory, attempt = run if run is not None else (None, 1)
        outcome = Outcome(
            code=PeerLostError.exit_code,
            reason=reason,
            rank=membership.rank,
            host=membership.hostname,
            step=step,
            attempt=attempt,
            lost_rank=loss.rank,
            lost_host=loss.hostname if loss.blames_host else None,
        )
        log = find_log(directory, membership.rank)
        if own_log is not None:
            path, is_missing = own_log
            log = path if is_missing else None
        write_report(log, text, directory, outcome)
        # Some launchers forget what they have not read when ranks abort.
        time.sleep(FORWARD_SECONDS)

    with contextlib.suppress(LateError):
        BackgroundCall(tell).finish(REPORT_SECONDS)
