"""Contenders measured in turns: which of them can take part, then each of them once per round."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, NoReturn, Protocol, TypeVar

from tqdm import tqdm

from benchmarks.measure.launching.remote_job import Job, count_others_seconds
from benchmarks.records.options import Count, CountOrZero, Seconds
from benchmarks.records.schema import Cell, Coordinate, RecordWriter, describe_place
from benchmarks.records.statistics import (
    MOST_ROUNDS,
    Series,
    StoppingRule,
    make_series,
    summarize,
    take_turns,
)
from benchmarks.show.progress import show_progress
from mpiddp.errors import MpiddpError
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument
from mpiddp.process.cpus import find_cpus
from mpiddp.wording import count_noun


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Timed(Protocol):
    @property
    def usual(self) -> float: ...


Key = TypeVar("Key", bound=_Named)
Visit = TypeVar("Visit", bound=_Timed)
Steps = TypeVar("Steps", bound="StepsVisit")


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often contenders are measured, and in which order."""

    repetitions: Count
    """Measured rounds."""
    warm_up: CountOrZero = 0
    """Rounds before them."""
    seed: CountOrZero = 0
    """Of the order within each round, of parameters and of samples."""
    deadline: Seconds
    """For one run, or for a job's start and each of its answers."""


@dataclass(frozen=True, kw_only=True)
class Plan(Rounds):
    """How contenders are measured whose ranks stay for the whole measurement."""

    iterations: Annotated[int | None, Argument("N", at_least(1))] = None
    """Of each contender and round (default: as many as fit into a set time)."""
    link: bool = False
    """With srun: also time a link between two nodes."""


@dataclass(frozen=True)
class Length:
    """How long one visit is if the number of its iterations is not given."""

    seconds: float
    fewest: int
    most: int

    def choose_iterations(self, seconds: float) -> int:
        return max(self.fewest, min(self.most, int(self.seconds / max(seconds, 1e-9))))


class WrongResultError(MpiddpError):
    """A contender does not compute what it should."""


class RefusedError(MpiddpError):
    """The contender cannot run here."""


def check_answers(answers: Sequence[Mapping[str, Any]]) -> None:
    """Raise RefusedError if any rank answered that it cannot run the contender."""
    reasons = [answer["refused"] for answer in answers if "refused" in answer]
    if reasons:
        raise RefusedError(reasons[0])


REFUSED, FAILED, WRONG = "it cannot run", "a run failed", "its results are wrong"


@dataclass(frozen=True)
class Refusal:
    """A contender that was not measured somewhere, and why."""

    quantity: str
    contender: str
    reason: str
    kind: str = REFUSED
    """Or FAILED, or WRONG, for which the command ends in an error."""
    at: Mapping[str, Coordinate] = field(default_factory=dict)

    def write(self, record: RecordWriter) -> None:
        tell = record.refuse if self.kind == REFUSED else record.fail
        tell(self.quantity, self.contender, self.reason, **self.at)

    def __str__(self) -> str:
        return f"{describe_place(self.quantity, self.contender, self.at)}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class StepsVisit:
    """A contender that took some steps, one after the other."""

    steps: int
    by_rank: tuple[float, ...]
    """Seconds of a step, of each rank; empty if they are not told apart."""
    usual: float
    """Of the slowest rank."""


def make_steps_cell(
    series: Series[Steps], details: Mapping[str, Any] | None = None, **place: Any
) -> Cell:
    """Of the seconds of a step in each visit; ``place``: the cell's other fields."""
    times = [visit.usual for visit in series.samples]
    by_rank = zip(*(visit.by_rank for visit in series.samples), strict=True)
    steps = [visit.steps for visit in series.samples]
    return Cell(
        samples=tuple(times), summary=summarize(times), by_rank=tuple(map(summarize, by_rank)),
        details={"steps": steps, **(details or {}), "positions": series.positions}, **place,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What was the same for all that was measured on one number of ranks."""

    ranks: int
    nodes: int | None = None
    """Of a cluster; None if all ran on this machine."""
    framework: Mapping[str, Any] = field(default_factory=dict)
    """What the framework's ranks reported of themselves."""
    others_share: float | None = None
    """Of this machine's cores, taken by other programs meanwhile; None on a cluster."""

    @property
    def where(self) -> str:
        """``this machine``, or how many nodes."""
        return "this machine" if self.nodes is None else count_noun(self.nodes, "node")


class Visitor(ABC, Generic[Key, Visit]):
    """Measures contenders; keeps which of them were refused, and whose results were wrong."""

    def __init__(
        self,
        title: str,
        plan: Plan,
        length: Length,
        rule: StoppingRule | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``rule``: when a contender has had enough rounds; None for the plan's."""
        self._title, self._plan, self.length = title, plan, length
        self._rule = rule or StoppingRule(math.inf, plan.repetitions)
        self._clock = clock
        self.refusals: dict[Key, str] = {}
        self.wrong: dict[Key, Any] = {}
        self.visits: dict[Key, list[tuple[int, Visit]]] = {}
        """In order of rounds, with the contender's place in each; whatever was measured so far."""
        self.seconds: dict[Key, float] = {}
        """That were spent on each contender."""
        self._usual: dict[Key, float] = {}
        """Seconds of an iteration in the last visit."""
        self._bar: tqdm[NoReturn] = tqdm(disable=True)

    def find_problem(self, key: Key) -> str:
        """What is wrong with a contender's results; empty if nothing is. Raises RefusedError."""
        return ""

    def check(self, key: Key) -> bool:
        """Visit for the first time if the results are right, and whether they are."""
        if problem := self.find_problem(key):
            self.wrong[key] = problem
            return False
        self.visit(key, self.length.fewest)
        return True

    @abstractmethod
    def measure(self, key: Key, iterations: int) -> Visit:
        """Ask the ranks. Raises RefusedError."""

    def visit(self, key: Key, iterations: int) -> Visit:
        self._bar.set_description(f"{self._title}, {key.name}")
        begin = self._clock()
        visit = self.measure(key, iterations)
        self.seconds[key] = self.seconds.get(key, 0.0) + self._clock() - begin
        self._usual[key] = visit.usual
        self._bar.update()
        return visit

    def admit(self, keys: Sequence[Key]) -> list[Key]:
        admitted = []
        for key in keys:
            try:
                if self.check(key):
                    admitted.append(key)
            except RefusedError as reason:
                self.refusals[key] = str(reason)
        return admitted

    def visit_all(
        self, keys: Sequence[Key], jobs: Mapping[str, Job], *, local: bool
    ) -> float | None:
        """Admit and visit in turns, with progress; returns the share that other programs took."""
        total = len(keys) * (1 + self._plan.warm_up + self._plan.repetitions)
        with self.watch(total, jobs, local=local) as find_share:
            self.visit_in_turns(self.admit(keys))
            return find_share()

    def visit_in_turns(self, admitted: Sequence[Key]) -> dict[Key, Series[Visit]]:
        """Rounds of visits until the rule is content with each contender."""
        warm_up = self._plan.warm_up
        self.visits |= {key: [] for key in admitted}
        for position, key in take_turns(
            admitted,
            rounds=warm_up + max(MOST_ROUNDS, self._plan.repetitions),
            seed=self._plan.seed,
            is_settled=lambda key: bool(self.judge(key)),
        ):
            iterations = self._plan.iterations or self.length.choose_iterations(self._usual[key])
            try:
                self.visits[key].append((position, self.visit(key, iterations)))
            except RefusedError as reason:
                raise RefusedError(f"{key.name}, which was possible before: {reason}") from None
        return {key: self.list_series(key) for key in admitted}

    def keep_whole_rounds(self) -> bool:
        """After an interruption: keep the rounds in which all were visited; whether one counts."""
        whole = min(map(len, self.visits.values()), default=0)
        self.visits = {key: visits[:whole] for key, visits in self.visits.items()}
        return whole > self._plan.warm_up

    def judge(self, key: Key) -> str:
        """Why a contender has had enough rounds; see `StoppingRule`."""
        usual = [visit.usual for visit in self.list_samples(key)]
        return self._rule.judge(usual, self.seconds[key])

    def list_series(self, key: Key) -> Series[Visit]:
        """What was measured of a contender so far."""
        return make_series(self.visits.get(key, []), self._plan.warm_up)

    def list_samples(self, key: Key) -> tuple[Visit, ...]:
        """The visits so far that count."""
        return self.list_series(key).samples

    def list_refusals(self, quantity: str, at: Mapping[str, Coordinate]) -> list[Refusal]:
        """Of all contenders that are not timed."""
        found = {key: (str(why), REFUSED) for key, why in self.refusals.items()}
        found |= {key: (str(why), WRONG) for key, why in self.wrong.items()}
        return [Refusal(quantity, key.name, *each, at) for key, each in found.items()]

    @contextlib.contextmanager
    def watch(
        self, total: int | None, jobs: Mapping[str, Job], *, local: bool
    ) -> Iterator[Callable[[], float | None]]:
        """Show progress; yields what tells the share of the cores that other programs took.

        ``local``: all ranks are on this machine; else None is told.
        """
        begin, before = time.monotonic(), count_others_seconds(jobs.values())

        def find_share() -> float | None:
            others = count_others_seconds(jobs.values()) - before
            share = others / (time.monotonic() - begin) / len(find_cpus())
            return max(0.0, share) if local else None

        with show_progress(total, "visit") as self._bar:
            yield find_share
