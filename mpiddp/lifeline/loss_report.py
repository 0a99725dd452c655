"""What a companion reports: on the console, in the logs, and in ``outcome.json``."""

from __future__ import annotations

import contextlib
import time

from mpiddp.errors import PeerLostError
from mpiddp.lifeline.decision import Loss
from mpiddp.lifeline.membership import Membership
from mpiddp.lifeline.watched_rank import WatchedRank
from mpiddp.process.background import BackgroundCall, LateError
from mpiddp.process.outcome import Outcome, find_log, write_report
from mpiddp.process.streams.console import FORWARD_SECONDS, print_report

REPORT_SECONDS = 1.0
"""How long the end of the other ranks waits for the report."""


def report(
    membership: Membership, rank: WatchedRank, reason: str, table: str, lost: Loss | None
) -> None:
    """Say why the job ends, as far as console and files take it within REPORT_SECONDS.

    ``rank``: the node's first, which the outcome names as its writer. ``table``: where each rank
    is. ``lost``: the rank that was lost; None if the job has stalled.
    """
    text = f"mpiddp: {reason}\n{table}"
    directory, attempt = rank.run if rank.run is not None else (None, 1)
    log = find_log(directory, membership.rank)
    if rank.log is not None:
        path, is_missing = rank.log
        log = path if is_missing else None
    outcome = Outcome(
        code=PeerLostError.exit_code,
        reason=reason,
        rank=membership.rank,
        host=membership.hostname,
        step=rank.read_step(),
        attempt=attempt,
        lost_rank=lost.rank if lost is not None else None,
        lost_host=lost.hostname if lost is not None and lost.blames_host else None,
    )

    def tell() -> None:
        print_report(text)
        write_report(log, text, directory, outcome)
        time.sleep(FORWARD_SECONDS)

    with contextlib.suppress(LateError):
        BackgroundCall(tell).finish(REPORT_SECONDS)
