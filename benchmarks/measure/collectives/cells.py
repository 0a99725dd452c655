"""What a measurement finds: the cells of each size, what was left out, and the surroundings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from benchmarks.judge.guidelines import list_broken
from benchmarks.judge.slow_ranks import SlowRank, find_late_rank, find_slow_core
from benchmarks.measure.collectives.options import CollectivesPlan
from benchmarks.measure.collectives.visits import CallVisit, CallVisitor
from benchmarks.measure.engine import CellGroup
from benchmarks.measure.trials import WRONG, Refusal
from benchmarks.records.collectives import find_rates
from benchmarks.records.contenders import EVEN, POINT_TO_POINT, PROBE, Task
from benchmarks.records.schema import Cell, Coordinate, group_by
from benchmarks.records.statistics import is_known, quantile, summarize

INTERRUPTED = "interrupted"
"""Why there are no more rounds of a contender, but for what a `StoppingRule` says."""


@dataclass(frozen=True, kw_only=True)
class CallGroup(CellGroup):
    """A size; at the start and at the end one without cells, whose facts the record gets."""

    collectives: Mapping[str, Any] = field(default_factory=dict)
    """How mpiddp's collectives wait."""
    first_calls: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the first collective that each maker made, which never counts."""

    def state(self) -> CallGroup:
        """With what holds for all sizes as its facts."""
        of_size = ("cells", "refusals", "facts")
        return replace(self, facts={n: v for n, v in vars(self).items() if n not in of_size})


def find_probe(cells: Iterable[Cell], *names: str) -> Cell | None:
    """The fastest of these limits of the machine; None if none of them was measured."""
    known = (cell for cell in cells if cell.quantity == PROBE and cell.contender in names)
    return min(known, key=lambda cell: cell.summary.median, default=None)


def group_like(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Those that were measured beside each other, but for the probes."""
    measured = (cell for cell in cells if cell.quantity != PROBE)
    groups = group_by(measured, lambda cell: (cell.quantity, *sorted(cell.at.items())))
    return list(groups.values())


class CellMaker:
    """Makes cells of visits, and keeps what later cells are compared with."""

    def __init__(self, plan: CollectivesPlan, around: CallGroup, places: Sequence[int]) -> None:
        """``places``: the node of each rank."""
        self._plan, self._around, self._places = plan, around, places
        self._ranks = around.ranks
        self._nodes = len(set(places))
        self._times: dict[Task, tuple[float, ...]] = {}
        self._cores: list[tuple[float, ...]] = []
        """Speeds in each visit so far."""
        self._even: list[tuple[tuple[float, ...], ...]] = []
        """Seconds by rank, of each visit in which all ranks do alike."""

    def make(self, block: Sequence[Task], visitor: CallVisitor) -> CallGroup:
        """The cells of a block and what was left out, whatever was measured of it."""
        items = list(self._make_items(block, visitor))
        return replace(
            self._around,
            cells=[each for each in items if isinstance(each, Cell)],
            refusals=[each for each in items if isinstance(each, Refusal)],
        )

    def _make_items(self, block: Sequence[Task], visitor: CallVisitor) -> Iterator[Cell | Refusal]:
        for task in block:
            if task in visitor.refusals:
                yield self._leave_out(task, visitor.refusals[task])
        visits = {task: visitor.list_samples(task) for task in block}
        slow = self._find_slow_rank(visits)
        self._times |= {
            task: tuple(visit.usual for visit in each) for task, each in visits.items() if each
        }
        for task, each in visits.items():
            wrong = visitor.wrong.get(task, 0)
            if each:
                stopped = visitor.judge(task) or INTERRUPTED
                for pair in task.pairs:
                    yield self._make_pair(task, pair, each, stopped)
                if not task.pairs:
                    yield self._make_call(task, each, {"wrong": wrong, "stopped": stopped}, slow)
            elif wrong:
                reason = f"its result has {wrong} wrong elements{task.route}"
                yield replace(self._leave_out(task, reason), kind=WRONG)

    def _leave_out(self, task: Task, reason: str) -> Refusal:
        own, at = task.contender, {"ranks": self._ranks, **self._find_place(task)}
        return Refusal(quantity=own.quantity, contender=own.label, at=at, reason=reason)

    def _find_slow_rank(self, visits: Mapping[Task, Sequence[CallVisit]]) -> SlowRank | None:
        """The rank that stands out among all visits so far, of all contenders."""
        for task, each in visits.items():
            self._cores += [visit.speeds for visit in each]
            if task.contender.quantity in EVEN:
                self._even += [visit.by_rank for visit in each]
        return find_slow_core(self._cores) or find_late_rank(self._even)

    def _find_place(self, task: Task) -> dict[str, Coordinate]:
        place: dict[str, Coordinate] = {"bytes": task.bytes, "type": task.type}
        if task.operator:
            place["operator"] = task.operator
        if task.contender.quantity == POINT_TO_POINT:
            place["link"] = "network" if self._nodes > 1 else "node"
            if task.is_mutual:
                place["direction"] = "both"
        return {**place, **(self._plan.conditions if task.contender.quantity != PROBE else {})}

    def _make_call(
        self,
        task: Task,
        visits: Sequence[CallVisit],
        outcome: Mapping[str, Any],
        slow: SlowRank | None,
    ) -> Cell:
        names = ("algorithm", "transport", "buffer")
        details = {**{name: getattr(task.contender, name) for name in names}, **outcome}
        if slow is not None:
            details |= {"slow_rank": slow.rank, "slow_rank_reason": slow.reason}
        if self._plan.overlap:
            details |= describe_overlap(visits)
        elif broken := list_broken(task, self._times):
            details["guidelines"] = broken
        by_rank = zip(*(visit.by_rank for visit in visits), strict=True)
        summaries = tuple(summarize([*chain.from_iterable(each)]) for each in by_rank)
        cell = self._make_cell(task, visits, [visit.seconds for visit in visits], details)
        return replace(cell, by_rank=summaries)

    def _make_pair(
        self, task: Task, pair: tuple[int, int], visits: Sequence[CallVisit], stopped: str
    ) -> Cell:
        """What the pair's sending rank measured."""
        rounds = [visit.by_rank[pair[0]] for visit in visits]
        details = {
            "wrong": sum(visit.wrong[end] for visit in visits for end in pair),
            "stopped": "interval" if is_known([quantile(r, 0.5) for r in rounds]) else stopped,
        }
        source, target = (self._places[rank] if self._nodes > 1 else rank for rank in pair)
        cell = self._make_cell(task, visits, rounds, details)
        return replace(cell, at={**cell.at, "from": source, "to": target})

    def _make_cell(
        self,
        task: Task,
        visits: Sequence[CallVisit],
        rounds: Sequence[Sequence[float]],
        details: Mapping[str, Any],
    ) -> Cell:
        """Of seconds by rounds, with what all cells of a task have."""
        own, times = task.contender, summarize([*chain.from_iterable(rounds)])
        rates = find_rates(own.quantity, self._ranks, task.bytes, times.median)
        shared = {"maker": own.maker, "ran": visits[-1].ran, "algbw": rates[0], "busbw": rates[1]}
        return Cell(
            quantity=own.quantity,
            contender=own.label,
            ranks=self._ranks,
            nodes=self._nodes,
            at=self._find_place(task),
            samples=tuple(quantile(each, 0.5) for each in rounds),
            summary=times,
            details={**shared, **details, "iterations": times.count},
        )


def describe_overlap(visits: Sequence[CallVisit]) -> dict[str, float]:
    """Medians over the visits; ``hidden`` is the share of the collective that takes no time.

    As in OSU's benchmarks of non-blocking collectives: 1 - (both - compute) / alone.
    """
    compute, alone, both = (
        quantile([getattr(visit, name) for visit in visits], 0.5)
        for name in ("compute", "alone", "usual")
    )
    hidden = max(0.0, min(1.0, 1 - (both - compute) / alone)) if alone else 0.0
    return {"compute": compute, "alone": alone, "hidden": hidden}
