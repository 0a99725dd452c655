"""Visits: one contender on one size, asked of the ranks once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measure.collectives.options import CollectivesPlan
from benchmarks.measure.launching.remote_job import Job
from benchmarks.measure.trials import Length, Visitor, check_answers
from benchmarks.records.contenders import Task
from benchmarks.records.statistics import StoppingRule, quantile

LENGTH = Length(seconds=0.03, fewest=2, most=300)


@dataclass(frozen=True)
class CallVisit:
    """One contender on one size, measured once."""

    by_rank: tuple[tuple[float, ...], ...]
    """Seconds of each rank's iterations."""
    wrong: tuple[int, ...] = ()
    """Elements of each rank's checked result."""
    speeds: tuple[float, ...] = ()
    """Of each rank's core, in loops per second."""
    checked: float = 0.0
    """Seconds of the call that was checked."""
    ran: str = ""
    compute: float = 0.0
    """Seconds of the computation alone that overlaps with the call; 0 if there is none."""
    alone: float = 0.0
    """Seconds of the call alone, then."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each iteration, of its slowest rank."""
        return tuple(map(max, zip(*self.by_rank, strict=True)))

    @property
    def usual(self) -> float:
        return quantile(self.seconds, 0.5)


def read_visit(answers: Sequence[Mapping[str, Any]]) -> CallVisit:
    """The visit that the ranks' answers describe. Raises RefusedError."""
    check_answers(answers)

    def find_usual(name: str) -> float:
        """Of the slowest rank."""
        return max((quantile(each[name], 0.5) for each in answers if each.get(name)), default=0.0)

    return CallVisit(
        tuple(tuple(each * 1e-9 for each in answer["times"]) for answer in answers),
        tuple(answer["wrong"] for answer in answers),
        tuple(answer["speed"] for answer in answers),
        max(answer["checked"] for answer in answers) * 1e-9,
        answers[0]["ran"],
        find_usual("compute") * 1e-9,
        find_usual("alone") * 1e-9,
    )


class CallVisitor(Visitor[Task, CallVisit]):
    """Visits tasks; ``wrong`` has the number of wrong elements in any check, timed or not."""

    def __init__(
        self,
        jobs: Mapping[str, Job],
        plan: CollectivesPlan,
        ranks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rule = StoppingRule(plan.budget, plan.repetitions)
        super().__init__(f"{ranks} ranks", plan, LENGTH, rule, clock)
        self._jobs = jobs
        self._conditions = {"cold": plan.cold, "overlap": plan.overlap}
        self.first_calls: dict[str, float] = {}
        """Seconds of each maker's first collective."""

    def check(self, key: Task) -> bool:
        return not any(self.visit(key, LENGTH.fewest).wrong)

    def measure(self, key: Task, iterations: int) -> CallVisit:
        job, maker = self._jobs[key.contender.job], key.contender.maker
        spec = {**key.specify(iterations), **self._conditions}
        visit = read_visit(job.ask({"do": "measure", "spec": spec}, f"measuring {key.name}"))
        if visit.checked:
            self.first_calls.setdefault(maker, visit.checked)
        self.wrong[key] = self.wrong.get(key, 0) + sum(visit.wrong)
        return visit
