"""One rank of a start-up that is counted or timed: ``python -m`` this, under mpirun or srun.

Rank 0 notes when each stage begins. If it runs under strace (``trace_first_rank.sh``), which gives
it the name of the trace, it marks the moment there and reports counts, else seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.launching.processes import WORD
from benchmarks.startup_scale.stages import (
    AGREEMENT,
    END,
    MARK,
    OF_MARKS,
    PROCESSOR,
    REST,
    SECONDS,
)
from benchmarks.startup_scale.trace import count
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.options import Options
from mpiddp.launch.session import make_current
from mpiddp.launch.startup import Starter


class StageClock:
    """When each stage began, on the clock and in this process's processor time."""

    def __init__(self) -> None:
        self._moments: list[tuple[str, float, float]] = []

    def enter(self, mark: str) -> None:
        # strace shows the whole name; without it this is a look at a name that does not exist.
        os.access(MARK + mark, os.F_OK)
        self._moments.append((mark, time.monotonic(), time.process_time()))

    def sum_up(self) -> Counter[tuple[str, str]]:
        """Seconds by name of stage and quantity."""
        found: Counter[tuple[str, str]] = Counter()
        for (mark, *begin), (_, *end) in zip(self._moments, self._moments[1:], strict=False):
            for quantity, before, after in zip((SECONDS, PROCESSOR), begin, end, strict=True):
                found[OF_MARKS[mark].name, quantity] += after - before  # type: ignore[assignment]
        return found


class ObservedStarter(Starter):
    """A start-up that says where it is."""

    def __init__(self, options: Options, handler: FailureHandler, clock: StageClock) -> None:
        super().__init__(options, handler, make_group=True)
        self._clock = clock

    def settle(self, work: Callable[[], None]) -> None:
        def observed() -> None:
            self._clock.enter(work.__name__)
            work()
            self._clock.enter(AGREEMENT)

        super().settle(observed)
        self._clock.enter(REST)

    def meet_ranks(self, module: Any) -> None:
        self._clock.enter("meet_ranks")
        super().meet_ranks(module)


def report(counts: Mapping[tuple[str, str], float], finished: float) -> None:
    words = {f"{stage}/{quantity}": value for (stage, quantity), value in counts.items()}
    print(WORD + json.dumps({"finished": finished, "seconds": words}), flush=True)


def main() -> None:
    trace = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    handler, clock = FailureHandler(), StageClock()
    with handler:
        session = ObservedStarter(Options(backend="gloo", quiet=True), handler, clock).run()
        make_current(session)
        clock.enter(END)
        handler.end_start()
        with session:
            if session.world.rank != 0:
                return
            finished, found = time.time(), clock.sum_up()
            if trace is not None:
                with trace.open() as lines:
                    found = count(lines)
                trace.unlink()
            report(found, finished)


if __name__ == "__main__":
    main()
