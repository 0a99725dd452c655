"""Makes the cells of a record of what was measured of a size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.judge.guidelines import list_broken
from benchmarks.judge.slow_ranks import SlowRank, find_late_rank, find_slow_core
from benchmarks.measure.collectives.findings import Refusal
from benchmarks.measure.collectives.options import Plan
from benchmarks.measure.collectives.visits import Visit, Visitor
from benchmarks.records.collectives import find_rates
from benchmarks.records.contenders import EVEN, POINT_TO_POINT, PROBE, Task
from benchmarks.records.schema import Cell, Coordinate
from benchmarks.records.statistics import Summary, is_known, quantile, summarize

INTERRUPTED = "interrupted"
"""Why there are no more rounds of a contender, but for what a `StoppingRule` says."""


class CellMaker:
    """Makes cells of visits, and keeps what later cells are compared with."""

    def __init__(self, plan: Plan, ranks: int, places: Sequence[int]) -> None:
        self._plan, self._ranks, self._places = plan, ranks, places
        self._nodes = len(set(places))
        self._times: dict[Task, tuple[float, ...]] = {}
        self._cores: list[tuple[float, ...]] = []
        """Speeds in each visit so far."""
        self._even: list[tuple[tuple[float, ...], ...]] = []
        """Seconds by rank, of each visit in which all ranks do alike."""

    def make(self, block: Sequence[Task], visitor: Visitor) -> Iterator[Cell | Refusal]:
        """The cells and refusals of a block, whatever was measured of it."""
        for task in block:
            if task in visitor.refusals:
                yield self._refuse(task, visitor.refusals[task])
        visits = {task: visitor.list_samples(task) for task in block}
        slow = self._find_slow_rank(visits)
        self._times |= {
            task: tuple(visit.usual for visit in each) for task, each in visits.items() if each
        }
        for task, each in visits.items():
            if task.pairs and each:
                yield from self._make_pairs(task, each, visitor)
            elif each:
                yield self._make_cell(task, each, visitor, slow)
            elif visitor.wrong.get(task):
                reason = f"its result has {visitor.wrong[task]} wrong elements{task.route}"
                yield replace(self._refuse(task, reason), is_wrong=True)

    def _refuse(self, task: Task, reason: str) -> Refusal:
        own, place = task.contender, self._find_place(task)
        return Refusal(quantity=own.quantity, contender=own.label, at=place, reason=reason)

    def _find_slow_rank(self, visits: Mapping[Task, Sequence[Visit]]) -> SlowRank | None:
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

    def _make_cell(
        self, task: Task, visits: Sequence[Visit], visitor: Visitor, slow: SlowRank | None
    ) -> Cell:
        own = task.contender
        details: dict[str, Any] = {
            "algorithm": own.algorithm,
            "transport": own.transport,
            "buffer": own.buffer,
            "wrong": visitor.wrong.get(task, 0),
            "stopped": visitor.judge(task) or INTERRUPTED,
        }
        if slow is not None:
            details |= {"slow_rank": slow.rank, "slow_rank_reason": slow.reason}
        if self._plan.overlap:
            details |= describe_overlap(visits)
        elif broken := list_broken(task, self._times):
            details["guidelines"] = broken
        cell = self._complete(task, visits, [visit.seconds for visit in visits], {}, details)
        return replace(cell, by_rank=_summarize_ranks(visits))

    def _make_pairs(self, task: Task, visits: Sequence[Visit], visitor: Visitor) -> Iterator[Cell]:
        """A cell for each pair: what its sending rank measured."""
        stopped = visitor.judge(task) or INTERRUPTED
        for pair in task.pairs:
            rounds = [visit.by_rank[pair[0]] for visit in visits]
            details = {
                "wrong": sum(visit.wrong[end] for visit in visits for end in pair),
                "stopped": "interval" if is_known([quantile(r, 0.5) for r in rounds]) else stopped,
            }
            source, target = (self._places[rank] if self._nodes > 1 else rank for rank in pair)
            at = {"from": source, "to": target}
            yield self._complete(task, visits, rounds, at, details)

    def _complete(
        self,
        task: Task,
        visits: Sequence[Visit],
        rounds: Sequence[Sequence[float]],
        at: Mapping[str, Coordinate],
        details: Mapping[str, Any],
    ) -> Cell:
        """The cell of seconds by rounds, with what all cells of a task have."""
        own, times = task.contender, summarize([value for each in rounds for value in each])
        rates = find_rates(own.quantity, self._ranks, task.bytes, times.median)
        shared = {"maker": own.maker, "ran": visits[-1].ran, "algbw": rates[0], "busbw": rates[1]}
        return Cell(
            quantity=own.quantity,
            contender=own.label,
            ranks=self._ranks,
            nodes=self._nodes,
            at={**self._find_place(task), **at},
            samples=tuple(quantile(each, 0.5) for each in rounds),
            summary=times,
            details={**shared, **details, "iterations": times.count},
        )


def _summarize_ranks(visits: Sequence[Visit]) -> tuple[Summary, ...]:
    ranks = range(len(visits[0].by_rank))
    return tuple(
        summarize([value for visit in visits for value in visit.by_rank[rank]]) for rank in ranks
    )


def describe_overlap(visits: Sequence[Visit]) -> dict[str, float]:
    """Medians over the visits; ``hidden`` is the share of the collective that takes no time.

    As in OSU's benchmarks of non-blocking collectives: 1 - (both - compute) / alone.
    """
    compute, alone, both = (
        quantile([getattr(visit, name) for visit in visits], 0.5)
        for name in ("compute", "alone", "usual")
    )
    hidden = max(0.0, min(1.0, 1 - (both - compute) / alone)) if alone else 0.0
    return {"compute": compute, "alone": alone, "hidden": hidden}
