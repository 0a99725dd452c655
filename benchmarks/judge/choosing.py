"""From measured cells to what ``auto`` should choose; nothing is measured here.

An algorithm over a transport replaces today's choice at a size if it is faster for one kind of
buffer at least, by the ratios of its times to those of ``auto`` in the same rounds; all algorithms
and kinds of buffers of a size are judged together (`ratios.find_greater`). For no kind may the 95 %
interval lie above 1, or the median be above LIKE. Of several that are faster, the one with the
smallest ratios is chosen.

The kinds of buffers (private, shared) are weighed together: the ranks of one call may differ in
where their buffers are, and must run the same algorithm all the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from benchmarks.judge.correlation import find_coefficient
from benchmarks.judge.ratios import Ratio, compare_rounds, find_greater
from benchmarks.records.collectives import COLLECTIVES
from benchmarks.records.contenders import CONDITIONS, OWN
from benchmarks.records.schema import Cell
from benchmarks.records.statistics import quantile
from mpiddp.collectives import AUTO
from mpiddp.collectives.tuning import CPU, GPU, Range, Section
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.registry import parse
from mpiddp.schedules.schedule import Collective

LIKE = 1.02
"""Up to here the median of ratios counts as no slower."""
FINALISTS = 2
"""Ways that are measured anew for each size and kind of buffer, beside today's choice."""


class Way(NamedTuple):
    """How a collective is made."""

    algorithm: str
    transport: str

    def __str__(self) -> str:
        return self.algorithm if self.transport == AUTO else f"{self.algorithm} over {self[1]}"


RULE = Way(AUTO, AUTO)
"""Today's choice."""
Cells = Mapping[tuple[str, Way], Cell]
"""What was measured of one size in the same rounds, by kind of buffer and way."""


@dataclass(frozen=True)
class Timing:
    """One way at one size, in one kind of buffer."""

    seconds: float
    """The median of today's choice, times the ratio."""
    ratio: Ratio
    """Of its times to those of today's choice, round by round."""


@dataclass(frozen=True)
class SizeChoice:
    """What was found for buffers of one size."""

    bytes: int
    rule: str
    """What ran as today's choice."""
    chosen: Way
    timings: Mapping[str, Mapping[Way, Timing]]
    """By kind of buffer; today's choice and all ways that were measured beside it."""

    def find_fastest(self, buffer: str) -> Way:
        timings = self.timings[buffer]
        return min(timings, key=lambda way: timings[way].seconds)


def choose(groups: Sequence[Iterable[Cell]]) -> tuple[dict[Section, list[SizeChoice]], list[str]]:
    """What ``auto`` should choose, in order of sizes, by sections that have no ranges yet.

    ``groups``: cells that were measured in the same rounds. Returns what was left out, too, in
    words. Raises ConfigurationError if no cell can be chosen from.
    """
    sizes: dict[Section, dict[int, list[Cells]]] = defaultdict(lambda: defaultdict(list))
    left_out: list[str] = []
    for group in groups:
        found: dict[tuple[Section, int], dict[tuple[str, Way], Cell]] = defaultdict(dict)
        for cell in filter(_is_plain, group):
            problem = _find_problem(cell)
            if problem:
                left_out.append(f"{cell.contender}, {cell.ranks} ranks: {problem}")
                continue
            key = (str(cell.details["buffer"]), find_way(cell))
            found[find_section(cell), cell.bytes][key] = cell
        for (section, size), cells in found.items():
            if any(way == RULE for _, way in cells):
                sizes[section][size].append(cells)
    if not sizes:
        raise ConfigurationError(
            "there is nothing to choose from: expected a collective of mpiddp by algorithm auto "
            "over transport auto, and by other algorithms beside it"
        )
    verdicts = {
        section: [judge(size, cells) for size, cells in sorted(found.items())]
        for section, found in sizes.items()
    }
    return verdicts, list(dict.fromkeys(left_out))


def list_finalists(cells: Iterable[Cell]) -> tuple[Way, ...]:
    """What is among the FINALISTS fastest at some size, in some kind of buffer.

    Those beside today's choice; over the transport that is today's choice, it is ``auto``.
    """
    places: dict[Hashable, dict[Way, float]] = defaultdict(dict)
    todays: dict[Hashable, Way | None] = {}
    for cell in cells:
        if _is_plain(cell) and not _find_problem(cell):
            place: Hashable = (find_section(cell), cell.bytes, str(cell.details["buffer"]))
            if find_way(cell) == RULE:
                todays[place] = _find_ran(cell)
            else:
                places[place][find_way(cell)] = quantile(cell.samples, 0.5)
    found: list[Way] = []
    for where, ways in places.items():
        others = [way for way in ways if way != todays.get(where)]
        found += sorted(others, key=ways.__getitem__)[:FINALISTS]
    usual = {way.transport for way in todays.values() if way is not None}
    return tuple(
        dict.fromkeys(way._replace(transport=AUTO) if way[1] in usual else way for way in found)
    )


def judge(size: int, groups: Sequence[Cells]) -> SizeChoice:
    """The choice for buffers of one size."""
    buffers = sorted({buffer for cells in groups for buffer, way in cells if way == RULE})
    timings = {buffer: _time(buffer, groups) for buffer in buffers}
    todays = [cell for cells in groups for (_, way), cell in cells.items() if way == RULE]
    others = set.intersection(*map(set, timings.values())) - {RULE, _find_ran(todays[0])}
    ratios = {way: [timings[buffer][way].ratio for buffer in buffers] for way in sorted(others)}
    told = find_greater(
        {(way, at): each.turned for way, own in ratios.items() for at, each in enumerate(own)}
    )
    faster = {way for way, _ in told}
    allowed = [way for way in ratios if way in faster and not any(map(_is_worse, ratios[way]))]
    chosen = min(
        allowed, key=lambda way: math.prod(each.estimate for each in ratios[way]), default=RULE
    )
    return SizeChoice(size, str(todays[0].details.get("ran", AUTO)), chosen, timings)


def _is_worse(ratio: Ratio) -> bool:
    """Whether today's choice may be better, by the rule of the module's docstring."""
    return ratio.interval is None or ratio.interval.low > 1 or ratio.estimate > LIKE


def _time(buffer: str, groups: Sequence[Cells]) -> dict[Way, Timing]:
    """All ways in one kind of buffer that were measured beside today's choice."""
    rounds: dict[Way, list[tuple[float, float]]] = defaultdict(list)
    for cells in groups:
        today = cells.get((buffer, RULE))
        for (kind, way), cell in cells.items():
            if today is not None and kind == buffer:
                rounds[way] += zip(today.samples, cell.samples, strict=False)
    others = [[own / today for today, own in pairs] for way, pairs in rounds.items() if way != RULE]
    coefficient = find_coefficient([others])
    usual = quantile([today for today, _ in rounds[RULE]], 0.5)
    found = {}
    for way, pairs in rounds.items():
        olds, news = zip(*pairs, strict=True)
        ratio = compare_rounds(olds, news, coefficient)
        found[way] = Timing(usual * ratio.estimate, ratio)
    return found


def _is_plain(cell: Cell) -> bool:
    """Whether it is a call of mpiddp's without conditions."""
    is_sum = cell.at.get("operator", "sum") == "sum"
    is_own = cell.quantity in COLLECTIVES and cell.details.get("maker") == OWN
    return is_own and is_sum and not any(map(cell.at.get, CONDITIONS))


def _find_problem(cell: Cell) -> str:
    """Why ``auto`` cannot choose what was measured; empty if it can."""
    way = find_way(cell)
    if cell.details.get("wrong"):
        return "its results were wrong"
    if cell.ranks % cell.nodes:
        return f"{cell.nodes} nodes cannot have as many each"
    try:
        Range(0, 0, *way)
        if way.algorithm != AUTO and cell.quantity == Collective.ALL_REDUCE.value:
            schedule = parse(way.algorithm).make(cell.ranks, find_section(cell).nodes)
            if len(schedule.members) < cell.ranks:
                return "its servers contribute nothing"
    except (ConfigurationError, ScheduleError) as error:
        return str(error)
    return ""


def find_section(cell: Cell) -> Section:
    """The section that a cell speaks for, without ranges."""
    nodes = (cell.ranks // cell.nodes,) * cell.nodes
    device = GPU if cell.details["buffer"] == "gpu" else CPU
    return Section(cell.quantity, nodes, str(cell.at["type"]), device, ())


def find_way(cell: Cell) -> Way:
    """What ran, or RULE if mpiddp has chosen all of it."""
    wish = Way(str(cell.details["algorithm"]), str(cell.details["transport"]))
    ran = _find_ran(cell)
    return wish if wish == RULE or ran is None else ran


def _find_ran(cell: Cell) -> Way | None:
    """None if the record does not tell the algorithm and the transport that ran."""
    return Way(*cell.ran) if cell.ran[1] else None


def list_ranges(verdicts: Sequence[SizeChoice]) -> tuple[Range, ...]:
    """The ranges of a table, from the smallest measured size to the largest.

    Between two sizes a range ends at their geometric mean; neighbours with the same choice are one.
    """
    sizes = [each.bytes for each in verdicts]
    bounds = [math.isqrt(one * other) for one, other in pairwise(sizes)]
    starts, ends = [sizes[0], *(bound + 1 for bound in bounds)], [*bounds, sizes[-1]]
    ranges: list[Range] = []
    for least, most, verdict in zip(starts, ends, verdicts, strict=True):
        found = Range(least, most, *verdict.chosen)
        if ranges and (ranges[-1].algorithm, ranges[-1].transport) == verdict.chosen:
            found = replace(ranges.pop(), most=most)
        ranges.append(found)
    return tuple(ranges)
