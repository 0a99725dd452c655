"""What this project promises of its start-up, and what was measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.judge.targets import Target
from benchmarks.measure.startup import phases
from benchmarks.measure.startup.contenders import FLOOR, FRONT, HELP, MPIDDP, MPIDDP_TUNED
from benchmarks.measure.startup.report import Group
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


def judge(groups: Sequence[Group], seed: int) -> list[Target]:
    """The targets that these groups say something about.

    Ratios are those of rounds; that of the medians stands beside them.
    """
    return [*_judge_processes(groups), *_judge_phases(groups, seed)]


def _judge_processes(groups: Sequence[Group]) -> Iterator[Target]:
    for group in groups:
        if group.ranks == RANKS and group.nodes is None:
            ours = MPIDDP_TUNED if MPIDDP_TUNED in group.series else MPIDDP
            for other, limit in ((group.torchrun, TORCHRUN_TARGET), (FLOOR, FLOOR_TARGET)):
                ratio = group.compare(ours, other)
                mine, others = (summarize(group.seconds(each)).median for each in (ours, other))
                note = f"round by round{_describe(ratio.interval)}, of medians {mine / others:.3f}"
                text = f"({ours}) / ({other}) on {group.title}, at most {limit:g}"
                yield Target(text, {"": ratio}, at_most=limit, note=note)
            if FRONT in group.series:
                front, tuned = (summarize(group.seconds(each)).median for each in (FRONT, ours))
                text = f"seconds of ({FRONT}) - ({ours}) on {group.title}, at most {FRONT_TARGET:g}"
                yield Target(text, {"": front - tuned}, at_most=FRONT_TARGET)
        if HELP in group.series:
            median = summarize(group.seconds(HELP)).median
            text = f"seconds of {HELP}, at most {HELP_TARGET:g}"
            yield Target(text, {"": median}, at_most=HELP_TARGET)


def _judge_phases(groups: Sequence[Group], seed: int) -> Iterator[Target]:
    named = [
        group
        for group in phases.measured(groups)
        if group.nodes == NODES and group.ranks <= MOST_RANKS
    ]
    for group in named:
        summary = summarize(phases.own_seconds(group))
        text = f"seconds of {phases.OWN_TITLE} on {group.title}, at most {OWN_TARGET:g}"
        note = f"median{_describe(summary.interval)}"
        yield Target(text, {"": summary.median}, at_most=OWN_TARGET, note=note)
    growth = phases.find_growth(named, seed)
    if growth is not None:
        text = (
            f"milliseconds of the same per added rank, {growth.fewest} to {growth.most} ranks, at "
            f"most {GROWTH_TARGET:g}"
        )
        note = f"median{_describe(growth.interval)}"
        yield Target(text, {"": growth.milliseconds}, at_most=GROWTH_TARGET, note=note)


def _describe(interval: Interval | None) -> str:
    return f" ({interval.low:.3f}–{interval.high:.3f})" if interval else ""
