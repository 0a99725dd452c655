"""What this project promises of its start-up, and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.judge.targets import Target
from benchmarks.measure.engine import CellGroup
from benchmarks.measure.startup.launches import FLOOR, FRONT, HELP, MPIDDP, MPIDDP_TUNED
from benchmarks.measure.startup.tables import (
    OWN_TITLE,
    choose_torchrun,
    find_growth,
    find_median,
    list_phased,
    name_group,
    sum_own,
)
from benchmarks.measure.trials import Rounds
from benchmarks.records.statistics import Interval, summarize

TORCHRUN_TARGET = 0.5
"""Most that mpiddp's median may be of torchrun's."""
FLOOR_TARGET = 1.1
"""Most that it may be of the floor's."""
FRONT_TARGET = 0.15
"""Seconds that it may take longer where mpiddp starts mpirun, than with a line typed by hand."""
HELP_TARGET = 0.4
"""Seconds that the trainer's ``--help`` may take."""
RANKS = 2
OWN_TARGET = 0.3
"""Seconds that mpiddp's own phases may take together on a cluster."""
GROWTH_TARGET = 2.0
"""Milliseconds that an added rank may add to them."""
NODES = 4
MOST_RANKS = 16


def judge(groups: Sequence[CellGroup], plan: Rounds) -> list[Target]:
    """The targets that these groups say something about.

    Ratios are those of rounds; that of the medians stands beside them.
    """
    return [*_judge_processes(groups), *_judge_phases(groups, plan.seed)]


def _judge_processes(groups: Sequence[CellGroup]) -> Iterator[Target]:
    for group in groups:
        if group.ranks == RANKS and group.nodes is None:
            ours = MPIDDP_TUNED if group.find(MPIDDP_TUNED) else MPIDDP
            title = name_group(group)
            for other, limit in ((choose_torchrun(group), TORCHRUN_TARGET), (FLOOR, FLOOR_TARGET)):
                ratio = group.divide(ours, other)
                mine, others = (find_median(group, each) for each in (ours, other))
                between = _describe(ratio.interval if ratio else None)
                note = f"round by round{between}, of medians {mine / others:.3f}"
                text = f"({ours}) / ({other}) on {title}, at most {limit:g}"
                yield Target(text, {"": ratio}, at_most=limit, note=note)
            if group.find(FRONT):
                longer = find_median(group, FRONT) - find_median(group, ours)
                text = f"seconds of ({FRONT}) - ({ours}) on {title}, at most {FRONT_TARGET:g}"
                yield Target(text, {"": longer}, at_most=FRONT_TARGET)
        if group.find(HELP):
            text = f"seconds of {HELP}, at most {HELP_TARGET:g}"
            yield Target(text, {"": find_median(group, HELP)}, at_most=HELP_TARGET)


def _judge_phases(groups: Sequence[CellGroup], seed: int) -> Iterator[Target]:
    named = [
        group for group in list_phased(groups) if group.nodes == NODES and group.ranks <= MOST_RANKS
    ]
    for group in named:
        summary = summarize(sum_own(group))
        text = f"seconds of {OWN_TITLE} on {name_group(group)}, at most {OWN_TARGET:g}"
        note = f"median{_describe(summary.interval)}"
        yield Target(text, {"": summary.median}, at_most=OWN_TARGET, note=note)
    growth = find_growth(named, seed)
    if growth is not None:
        text = (
            f"milliseconds of the same per added rank, {growth.fewest} to {growth.most} ranks, at "
            f"most {GROWTH_TARGET:g}"
        )
        note = f"median{_describe(growth.interval)}"
        yield Target(text, {"": growth.milliseconds}, at_most=GROWTH_TARGET, note=note)


def _describe(interval: Interval | None) -> str:
    return f" ({interval.low:.3f}–{interval.high:.3f})" if interval else ""
