"""Which one of the failing ranks speaks, so that one failure gives one report."""

from __future__ import annotations

import array
from typing import TYPE_CHECKING, Any

from mpiddp.launch.background import BackgroundCall
from mpiddp.launch.mpi import mpi

if TYPE_CHECKING:
    from mpi4py import MPI

ANSWER_SECONDS = 0.5
"""How long a failing rank waits for the others' or the store's answer before it speaks itself."""
FAILURE_KEY = "failure"


def agree_on_failure(
    communicator: MPI.Intracomm, code: int | None, seconds: float
) -> tuple[int, int] | None:
    """The lowest rank that failed in this phase of start-up, and its exit code. Collective.

    ``code`` is this rank's own exit code, None if it did not fail. Returns None if no rank did,
    or if not all have come within ``seconds``.
    """
    from mpi4py import MPI

    none = communicator.Get_size() << 8
    mine = none if code is None else communicator.Get_rank() << 8 | code
    buffer, lowest = array.array("q", [mine]), array.array("q", [none])
    request = communicator.Iallreduce([buffer, MPI.INT64_T], [lowest, MPI.INT64_T], op=MPI.MIN)
    if not mpi.wait(request, seconds) or lowest[0] >= none:
        return None
    return lowest[0] >> 8, lowest[0] & 0xFF


def claim_report(store: Any) -> bool | None:
    """Whether this rank is the first to claim the report in the store; None without an answer."""
    claim = BackgroundCall(lambda: store.add(FAILURE_KEY, 1))
    try:
        return bool(claim.finish(ANSWER_SECONDS) == 1)
    except Exception:  # The store has gone with rank 0, or stands still.
        return None
