"""A run that all ranks enter together."""

from __future__ import annotations

from pathlib import Path

import waiting_for_a_run


def test_no_rank_times_out_while_rank_0_waits_for_the_lock(pool) -> None:
    # Each broadcast has the session's timeout for itself.
    path = str(Path("runs", "a"))
    result = pool("openmpi", 2).call(waiting_for_a_run.enter)
    assert result.values == [(path, waiting_for_a_run.PAUSES + 1)] * 2
