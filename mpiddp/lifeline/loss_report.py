"""What a companion reports: on the console, in the logs, and in ``outcome.json``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from mpiddp.errors import PeerLostError
from mpiddp.lifeline.decision import Loss
from mpiddp.lifeline.membership import Membership
from mpiddp.lifeline.stacks.dump import STOPPED
from mpiddp.lifeline.stacks.hang_report import HangReport
from mpiddp.lifeline.stacks.nccl_status import MOST_SECONDS as STATUS_SECONDS
from mpiddp.lifeline.stacks.positions import StackPosition, tabulate
from mpiddp.lifeline.stacks.verdict import describe, find_verdict
from mpiddp.lifeline.watched_rank import WatchedRank
from mpiddp.process.background import BackgroundCall, LateError
from mpiddp.process.outcome import Outcome, find_log, write_report
from mpiddp.process.streams.console import FORWARD_SECONDS, print_report

REPORT_SECONDS = 1.0
"""How long the end of the other ranks waits for the report."""


def report(
    membership: Membership,
    rank: WatchedRank,
    reason: str,
    positions: Sequence[StackPosition],
    lost: Loss | None,
) -> None:
    """Say why the job ends, as far as console and files take it within REPORT_SECONDS.

    ``rank``: the node's first, which the outcome names as its writer. ``positions``: where each
    rank is, as far as it is known. ``lost``: the rank that was lost; None if the job has stalled.
    """
    text = f"mpiddp: {reason}\n"
    with contextlib.suppress(Exception):  # The report does without.
        text += _describe(positions, lost)
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
        with contextlib.suppress(Exception):  # The job ends all the same.
            _write_whole(membership, rank, text, positions)
        time.sleep(FORWARD_SECONDS)

    with contextlib.suppress(LateError):
        BackgroundCall(tell).finish(REPORT_SECONDS + (STATUS_SECONDS if membership.ras else 0.0))


def _describe(positions: Sequence[StackPosition], lost: Loss | None) -> str:
    """Where the ranks are; only whose fault it seems if a process has gone without a word."""
    ended = [each for each in positions if each.ended]
    if lost is None or not ended:
        return describe(positions)
    # A launcher may have ended others by now, which say nothing.
    speaking = [each for each in positions if each.frames or each.state in STOPPED]
    table = tabulate(speaking) if any(each.frames for each in ended) else ""
    return table + "".join(f"  {line}\n" for line in find_verdict(positions))


def _write_whole(
    membership: Membership, rank: WatchedRank, text: str, positions: Sequence[StackPosition]
) -> None:
    """Write the whole report, if something is known beside ``text``, and say where it is."""
    if any(each.frames for each in positions):
        directory = rank.log[0].parent if rank.log is not None else None
        directory = directory or (rank.run[0] if rank.run is not None else None)
        # That a rank has gone is known, and NCCL would wait for it.
        ras = "" if any(each.ended for each in positions) else membership.ras
        path = HangReport(positions, ras, membership.records).write(text, directory)
        if path is not None:
            print_report(f"  the whole report: {path}\n")
