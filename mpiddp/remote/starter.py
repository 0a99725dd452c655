"""The process that runs the front for another process, and reports how the job ended.

    python -m mpiddp.remote.starter DESCRIPTOR -n 4 … -m mpiddp.remote.rank …

The front writes its messages to standard error, as ever. How the job ended is written to a pipe, as
JSON. If the other process closes its end of the pipe, or ends, the ranks are ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from mpiddp.errors import ConfigurationError
from mpiddp.front.front import Job
from mpiddp.launch.launcher.exported_variables import forget_inherited
from mpiddp.launch.script.command_line import read_front, split

LEAVE_SECONDS = 6.0
"""How long ranks may take to end by themselves once the caller has gone: longer than a function may
go on then (`rank.LEAVE_SECONDS`)."""


@dataclass(frozen=True)
class End:
    """How the job of some ranks ended."""

    code: int
    """As `mpiddp.errors` has them."""
    reason: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)
    """The failure that a rank, or its companion, has recorded (`mpiddp.process.outcome`)."""

    @property
    def lost_rank(self) -> int | None:
        """The rank that was lost."""
        return self.outcome.get("lost_rank")


def _run(words: list[str]) -> End:
    try:
        line = split(words)
        end, found = Job(line, read_front(line)).run()
    except ConfigurationError as error:
        return End(error.exit_code, str(error))
    outcome = dict(found.outcome or {})
    return End(end.code, str(outcome.get("reason") or end.why), outcome)


def _follow_caller(report: int) -> None:
    """On a thread: end the ranks that have not ended by themselves once the caller has gone."""
    poller = select.poll()
    poller.register(report, select.POLLERR)  # Once the other end is closed.
    poller.poll()
    # The second one ends ranks that do not react to the first.
    for seconds in (LEAVE_SECONDS, 1.0):
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Start the ranks, wait for their end, and report it."""
    forget_inherited()
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    threading.Thread(target=_follow_caller, args=(report,), daemon=True).start()
    end = _run(sys.argv[2:])
    with contextlib.suppress(BrokenPipeError), os.fdopen(report, "w") as file:
        json.dump(asdict(end), file)


if __name__ == "__main__":
    main()
