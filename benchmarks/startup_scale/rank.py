"""One rank of a start-up that is counted or timed: ``python -m`` this, under mpirun or srun.

Rank 0 notes when each stage begins. If it runs under strace (``trace_first_rank.sh``), which gives
it the name of the trace, it marks the moment there and reports counts, else seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launching.processes import WORD
from benchmarks.startup_scale.stages import (
    AGREEMENT,
    END,
    IMPORT,
    IMPORTED,
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
from mpiddp.wording import print_text


@dataclass(frozen=True)
class Moment:
    """When a stage began."""

    mark: str
    seconds: float
    process: float
    """Processor seconds of all threads until then."""
    thread: float
    """Of this thread alone."""


class StageClock:
    """When each stage began, on the clock and in processor time."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []

    def enter(self, mark: str) -> None:
        # strace shows the whole name; without it this is a look at a name that does not exist.
        os.access(MARK + mark, os.F_OK)
        times = time.monotonic(), time.process_time(), time.thread_time()
        self._moments.append(Moment(mark, *times))

    def sum_up(self) -> dict[tuple[str, str], float]:
        """Seconds by name of stage and quantity.

        torch is imported beside the stages until it is waited for: what other threads take until
        then is the import's.
        """
        found: dict[tuple[str, str], float] = defaultdict(float)
        is_imported = False
        for begin, end in zip(self._moments, self._moments[1:], strict=False):
            stage, total = OF_MARKS[begin.mark].name, end.process - begin.process
            own = total if is_imported else end.thread - begin.thread
            found[stage, SECONDS] += end.seconds - begin.seconds
            found[stage, PROCESSOR] += own
            found[IMPORT, PROCESSOR] += total - own
            is_imported |= begin.mark == IMPORTED
        return dict(found)


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
    print_text(WORD + json.dumps({"finished": finished, "seconds": words}))


def read_counts(trace: Path) -> Mapping[tuple[str, str], float]:
    """What a trace holds; it is deleted."""
    with trace.open() as lines:
        found = count(lines)
    trace.unlink()
    return found


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
            finished = time.time()
            report(clock.sum_up() if trace is None else read_counts(trace), finished)


if __name__ == "__main__":
    main()
