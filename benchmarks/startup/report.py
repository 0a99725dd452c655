"""What a measurement of start-up comes to: ratios, targets, the table and the record."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.statistics import Interval, Series, Summary, compare, summarize
from benchmarks.launching.processes import Run
from benchmarks.startup.contenders import (
    FLOOR,
    HELP,
    MPIDDP,
    MPIDDP_TUNED,
    TORCHRUN,
    TORCHRUN_STATIC,
    Contender,
)

TORCHRUN_TARGET = 0.5
"""Most that mpiddp's median may be of torchrun's."""
FLOOR_TARGET = 1.1
"""Most that it may be of the floor's."""
HELP_TARGET = 0.4
"""Seconds that the trainer's ``--help`` may take."""
TARGET_RANKS = 2


@dataclass(frozen=True)
class Failure:
    """A run on a cluster that failed and was made again."""

    contender: str
    message: str
    """With the run's output."""


@dataclass(frozen=True)
class Group:
    """Contenders that were measured in turns with each other."""

    ranks: int
    """0 for programs that are no ranks."""
    contenders: tuple[Contender, ...]
    series: Mapping[str, Series[Run]]
    nodes: int | None = None
    """Of a cluster; None where all ran on this machine."""
    failures: tuple[Failure, ...] = ()
    """Runs that count for nothing, each made again at once."""

    @property
    def title(self) -> str:
        """What stands over the group."""
        noun = "rank" if self.ranks == 1 else "ranks"
        where = f" on {self.places}" if self.nodes is not None else ""
        return f"{self.ranks} {noun}{where}" if self.ranks else "one process"

    @property
    def places(self) -> str:
        """Where it ran."""
        if self.nodes is None:
            return "this machine"
        return f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'}"

    def seconds(self, name: str) -> list[float]:
        """Whole-process times of a contender, in order of rounds."""
        return [run.seconds for run in self.series[name].samples]

    def first(self, name: str) -> list[float]:
        """Times to the first all-reduce of a contender; empty if it makes none."""
        samples = self.series[name].samples
        return [run.stamp_seconds for run in samples if run.stamp_seconds is not None]

    @property
    def torchrun(self) -> str:
        """The quicker of torchrun's two forms, by its median."""
        return min(TORCHRUN, TORCHRUN_STATIC, key=lambda name: summarize(self.seconds(name)).median)


@dataclass(frozen=True)
class Target:
    """A promise and what was measured."""

    text: str
    limit: float
    value: float
    pairs: Summary | None = None
    """Of the ratios round by round."""
    interval: Interval | None = None
    """Of the value, where it is no ratio."""

    @property
    def reached(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "reached" if self.reached else "missed"
        pairs = f"; round by round {_with_interval(self.pairs)}" if self.pairs else ""
        between = self.interval
        known = f" ({between.low:.3f}–{between.high:.3f})" if between else ""
        return f"{self.text}: {self.value:.3f}{known}, at most {self.limit:g}: {verdict}{pairs}"


def judge(groups: Sequence[Group]) -> list[Target]:
    """The targets that these groups say something about.

    Ratios are of the medians; the median of the ratios round by round stands beside them.
    """
    targets = []
    for group in groups:
        if group.ranks == TARGET_RANKS and group.nodes is None:
            ours = MPIDDP_TUNED if MPIDDP_TUNED in group.series else MPIDDP
            for other, limit in ((group.torchrun, TORCHRUN_TARGET), (FLOOR, FLOOR_TARGET)):
                targets.append(_judge_ratio(group, ours, other, limit))
        if HELP in group.series:
            median = summarize(group.seconds(HELP)).median
            targets.append(Target(f"seconds of {HELP}", HELP_TARGET, median))
    return targets


def _judge_ratio(group: Group, ours: str, other: str, limit: float) -> Target:
    mine, others = group.seconds(ours), group.seconds(other)
    value = summarize(mine).median / summarize(others).median
    text = f"({ours}) / ({other}) on {group.title}"
    return Target(text, limit, value, compare(mine, others))


def format_table(group: Group) -> str:
    """The group's table: seconds, and ratios round by round."""
    heads = ["", "median", "quartiles", "95 % of median", "CPU"]
    if group.ranks:
        heads[4:4] = ["1st all-reduce", "/ torchrun", "/ import torch"]
    rows = [heads, *(_format_row(group, contender.name) for contender in group.contenders)]
    rounds = len(group.seconds(group.contenders[0].name))
    title = f"{group.title}, {rounds} rounds: seconds of the whole process"
    return "\n".join([title, *format_rows(rows)])


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _format_row(group: Group, name: str) -> list[str]:
    summary = summarize(group.seconds(name))
    cells = [
        name,
        f"{summary.median:.3f}",
        f"{summary.lower_quartile:.3f}–{summary.upper_quartile:.3f}",
        _format_interval(summary),
    ]
    if group.ranks:
        first = group.first(name)
        cells.append(f"{summarize(first).median:.3f}" if first else "–")
        for other in (group.torchrun, FLOOR):
            pairs = compare(group.seconds(name), group.seconds(other))
            cells.append("1" if name == other else f"{pairs.median:.2f}")
    cpu = [run.cpu_seconds for run in group.series[name].samples]
    known = [seconds for seconds in cpu if seconds is not None]
    return [*cells, f"{summarize(known).median:.2f}" if known else "–"]


def _format_interval(summary: Summary) -> str:
    interval = summary.interval
    return f"{interval.low:.3f}–{interval.high:.3f}" if interval else "–"


def _with_interval(summary: Summary) -> str:
    interval = summary.interval
    between = f" ({interval.low:.3f}–{interval.high:.3f})" if interval else ""
    return f"{summary.median:.3f}{between}"


def describe_warm_up(group: Group) -> str:
    """The times of the warm-up rounds, which count for nothing else; empty if there were none."""
    parts = [
        f"{contender.name} " + " ".join(f"{run.seconds:.2f}" for run in runs)
        for contender in group.contenders
        if (runs := group.series[contender.name].warm_up)
    ]
    return f"warm-up: {'; '.join(parts)}" if parts else ""


def describe_others(group: Group) -> str:
    """How busy other programs kept the machine meanwhile; empty where that cannot be told."""
    cores = len(os.sched_getaffinity(0))
    shares = [
        run.others_cpu_seconds / run.seconds / cores
        for series in group.series.values()
        for run in series.samples
        if run.others_cpu_seconds is not None
    ]
    if not shares:
        return ""
    summary = summarize(shares)
    quartiles = f"{summary.lower_quartile:.0%}–{summary.upper_quartile:.0%}"
    return (
        f"other programs took {summary.median:.0%} of the cores meanwhile (quartiles {quartiles})"
    )


def describe_failures(group: Group) -> str:
    """Whose runs failed and were made again; empty if none were."""
    names = [failure.contender for failure in group.failures]
    if not names:
        return ""
    counts = ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))
    return f"runs that failed and were made again: {counts} (their output is in the record)"


def describe_groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The groups for a record: every sample, in seconds, and what was computed from them."""
    return [
        {
            "ranks": group.ranks,
            "nodes": group.nodes,
            "failures": [asdict(failure) for failure in group.failures],
            "contenders": [_describe_contender(group, each) for each in group.contenders],
        }
        for group in groups
    ]


def _describe_contender(group: Group, contender: Contender) -> dict[str, Any]:
    series = group.series[contender.name]
    seconds, first = group.seconds(contender.name), group.first(contender.name)
    found: dict[str, Any] = {
        "name": contender.name,
        "kind": contender.kind,
        "about": contender.about,
        "command": contender.describe(),
        "copies": contender.program.copies,
        "warm_up": [_describe_run(run) for run in series.warm_up],
        "samples": [
            {"position": position, **_describe_run(run)}
            for position, run in zip(series.positions, series.samples, strict=True)
        ],
        "seconds": asdict(summarize(seconds)),
        "first_all_reduce_seconds": asdict(summarize(first)) if first else None,
    }
    if group.ranks:
        found["over_torchrun"] = asdict(compare(seconds, group.seconds(group.torchrun)))
        found["over_import_torch"] = asdict(compare(seconds, group.seconds(FLOOR)))
    return found


def _describe_run(run: Run) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "others_cpu_seconds": run.others_cpu_seconds,
        "first_all_reduce_seconds": run.stamp_seconds,
        "phases": dict(run.phases),
    }


def describe_targets(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """The targets for a record."""
    return [{**asdict(target), "reached": target.reached} for target in targets]
