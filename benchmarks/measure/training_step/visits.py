"""Ask the ranks which synchronisations can run and train rightly, and for their times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import trials
from benchmarks.measure.launching.remote_job import Job
from benchmarks.measure.training_step.synchronisations import (
    BASE,
    CHECKED_STEPS,
    StepPlan,
    Synchronisation,
)
from benchmarks.measure.training_step.traffic import StepTraffic, read_traffic
from benchmarks.measure.trials import Length, StepsVisit, check_answers
from benchmarks.records.contenders import LINK_BYTES
from benchmarks.records.statistics import quantile
from benchmarks.records.workloads import Workload
from mpiddp.errors import ConfigurationError
from mpiddp.training.options.groups.synchronisation import UNLIMITED

LENGTH = Length(seconds=1.0, fewest=3, most=50)
TOLERANCE, NARROW_TOLERANCE = 0.02, 0.1
"""How far off the way may be, relative to its length; where gradients travel in 16 bits, which
rounds them to 8 or 11 of them and loses the smallest."""
PROBES = 3
WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class TrainingVisit(StepsVisit):
    """One contender on one workload, measured once. Seconds are those of a step.

    ``by_rank`` is empty if some ranks only serve.
    """

    compute: float
    """Forward and backward alone, of the slowest rank."""
    update: float
    """The optimizer, of the slowest rank; 0 if servers update."""
    samples_per_second: float
    """Of all workers together."""
    reading: StepTraffic

    @property
    def exposed(self) -> float:
        """The rest: communication that nothing hides. Noise may make it negative."""
        return self.usual - self.compute - self.update


@dataclass(frozen=True)
class TimedLink:
    """Between two nodes, as timed."""

    latency: float
    """Seconds of an empty message, one way."""
    seconds_per_byte: float

    @property
    def megabits(self) -> float:
        return 8e-6 / self.seconds_per_byte


def read_answers(
    answers: Sequence[Mapping[str, Any]], steps: int, *, has_bound: bool = True
) -> TrainingVisit:
    """The visit that the ranks' answers describe. Raises RefusedError.

    ``has_bound``: in the long run all workers go at the pace of the slowest.
    """
    check_answers(answers)
    workers = [answer for answer in answers if "seconds" in answer]
    seconds = [worker["seconds"] for worker in workers]
    slowest = max(seconds)
    counted = [answer["interfaces"] for answer in answers if "interfaces" in answer]
    return TrainingVisit(
        steps=steps,
        usual=slowest / steps,
        compute=max(worker["compute"] for worker in workers) / steps,
        update=max(worker["update"] for worker in workers) / steps,
        samples_per_second=sum(
            worker["samples"] / (slowest if has_bound else worker["seconds"]) for worker in workers
        ),
        reading=read_traffic(counted, steps, len(answers)),
        by_rank=tuple(each / steps for each in seconds) if workers == answers else (),
    )


def find_problem(
    answers: Sequence[Mapping[str, Any]], expected: Sequence[float] | None, *, is_narrow: bool
) -> str:
    """Why ranks' answers to ``checks.take_checked_steps`` are wrong; empty if they are not.

    Ranks without an answer took no part. ``expected`` is the way of one process, None where
    workers go at their own pace.
    """
    known = [answer for answer in answers if answer]
    if len({answer["digest"] for answer in known}) > 1:
        return "the ranks' parameters differ"
    way = known[0]["sample"]
    if not all(map(math.isfinite, way)):
        return "parameters are not finite"
    if expected is None:
        return "" if any(way) else "the parameters have not moved"
    error = math.dist(way, expected) / max(math.hypot(*expected), 1e-30)
    tolerance = NARROW_TOLERANCE if is_narrow else TOLERANCE
    if error <= tolerance:
        return ""
    return (
        f"after {CHECKED_STEPS} steps the parameters are off by {error:.2g} of the way that one "
        f"process with all samples takes them; up to {tolerance:g} would be rounding"
    )


def check_device(wanted: str, greetings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigurationError if GPUs were asked for and ranks compute elsewhere."""
    if wanted == "gpu" and any(greeting["device"] != "cuda" for greeting in greetings):
        raise ConfigurationError(
            "--device gpu: expected a GPU for every rank, found fewer: give fewer --ranks, or "
            "--device cpu"
        )


def probe_link(job: Job) -> TimedLink:
    """Time a short and a long message from one node to the next."""

    def ask(size: int) -> float:
        command = {"do": "probe", "bytes": size, "iterations": PROBES}
        return quantile(job.ask(command, "timing a link")[0], 0.5)

    # Each ends with a word back.
    word, whole = ask(WORD_BYTES), ask(LINK_BYTES)
    return TimedLink(word / 2, max(1e-6, whole - word) / LINK_BYTES)


class StepVisitor(trials.Visitor[Synchronisation, TrainingVisit]):
    """Visits contenders on one workload; ``wrong`` says what is wrong with what they train."""

    def __init__(
        self, jobs: Mapping[str, Job], plan: StepPlan, ranks: int, workload: Workload
    ) -> None:
        super().__init__(f"{ranks} ranks, {workload}", plan, LENGTH)
        self._jobs, self.plan, self.ranks, self.workload = jobs, plan, ranks, workload
        self.notes: dict[Synchronisation, Mapping[str, Any]] = {}
        self._expected: dict[int, Sequence[float]] = {}
        """How far one process moves the parameters, by the number of workers."""

    def _ask(self, contender: Synchronisation, what: str, **more: Any) -> list[Any]:
        spec = self.plan.specify(self.workload, contender)
        command = {"do": what, "spec": asdict(spec), **more}
        name = f"{contender.name} on {self.workload}"
        return self._jobs[contender.job].ask(command, f"{what} {name}")

    def measure(self, key: Synchronisation, iterations: int) -> TrainingVisit:
        answers = self._ask(key, "measure", steps=iterations)
        return read_answers(answers, iterations, has_bound=key.staleness != UNLIMITED)

    def find_problem(self, key: Synchronisation) -> str:
        answers = self._ask(key, "check")
        check_answers(answers)
        self.notes[key] = answers[0]["notes"]
        expected = None
        if key.is_in_step:
            expected = self._compute_alone(key.count_workers(self.ranks))
        is_narrow = key.wire_dtype in ("bfloat16", "float16")
        return find_problem(answers, expected, is_narrow=is_narrow)

    def _compute_alone(self, workers: int) -> Sequence[float]:
        if workers not in self._expected:
            found = self._ask(BASE, "compute alone", workers=workers)[0]
            self._expected[workers] = found["sample"]
        return self._expected[workers]
