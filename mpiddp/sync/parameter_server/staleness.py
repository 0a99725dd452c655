"""The clock of a parameter server: how many steps workers may be apart.

With a bound of S no worker begins a step while it is more than S steps ahead of the slowest one
(stale synchronous parallel: Ho et al., More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server, NIPS 2013). With 0 all workers are in the same step; without a bound no
worker waits.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class Clock:
    """Counts the steps of workers; says which may continue, and how stale a gradient was."""

    def __init__(self, workers: int, bound: int | None) -> None:
        """``bound``: S, in steps; None for none."""
        self._steps = [0] * workers
        """Gradients that each worker has pushed."""
        self.begun = 0
        """Those that each had pushed at least when the clock began, or went on from a state."""
        self.bound = bound
        self.updates = 0
        """So far."""
        self._pulled = [0] * workers
        """The number of updates when each worker last received weights."""
        self._waiting: set[int] = set()
        self.staleness: Counter[int] = Counter()
        """How many gradients were applied so many updates after their worker received weights."""

    @property
    def slowest(self) -> int:
        """Gradients that each worker has pushed at least; may be read in any thread."""
        return min(self._steps)

    def push(self, worker: int) -> None:
        """This worker's gradient has arrived, and it asks for weights."""
        assert worker not in self._waiting, f"worker {worker} pushes without weights"
        self._steps[worker] += 1
        self._waiting.add(worker)

    def update(self, worker: int) -> None:
        """This worker's gradient has been applied by itself."""
        self.staleness[self.updates - self._pulled[worker]] += 1
        self.updates += 1

    def update_together(self) -> None:
        """All workers' gradients have been applied as one."""
        self.staleness[0] += len(self._steps)
        self.updates += 1

    def renew(self) -> None:
        """All workers have received weights between two steps."""
        self._pulled = [self.updates] * len(self._pulled)

    def read_state(self) -> dict[str, Any]:
        """The counts, while all workers wait for weights or have them."""
        return {
            "steps": list(self._steps),
            "updates": self.updates,
            "staleness": dict(self.staleness),
        }

    def load_state(self, state: dict[str, Any], step: int) -> None:
        """Go on from a state. Other workers than those that counted have made ``step`` steps."""
        if len(state["steps"]) == len(self._steps):
            self._steps = list(state["steps"])
            self.updates = state["updates"]
        else:
            self._steps = [step] * len(self._steps)
            self.updates = step if self.bound == 0 else step * len(self._steps)
        self.begun = self.slowest
        self.staleness = Counter(state["staleness"])
        self.renew()

    def release(self) -> list[int]:
        """The waiting workers that may continue, in order; they now receive weights."""
        slowest = self.slowest
        bound = self.bound
        going = sorted(
            worker
            for worker in self._waiting
            if bound is None or self._steps[worker] - slowest <= bound
        )
        for worker in going:
            self._waiting.remove(worker)
            self._pulled[worker] = self.updates
        return going
