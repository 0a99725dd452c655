"""The results of a measurement of start-up: ratios, the table and the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.measure import trials
from benchmarks.measure.launching.processes import Run
from benchmarks.measure.startup.contenders import FLOOR, TORCHRUN, TORCHRUN_STATIC, Contender
from benchmarks.records.options import describe_interval, format_rows
from benchmarks.records.schema import Cell, make_cell
from benchmarks.records.statistics import Series, summarize
from mpiddp.process.cpus import find_cpus
from mpiddp.wording import count_noun

QUANTITY = "start-up"


@dataclass(frozen=True)
class Failure:
    """A run on a cluster that failed and was made again."""

    contender: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Group(trials.Surroundings):
    """Contenders, by name, that were measured in turns; 0 ranks for programs that are no ranks."""

    contenders: tuple[Contender, ...]
    series: Mapping[str, Series[Run]]
    """By the contender's name."""
    failures: tuple[Failure, ...] = ()
    """Runs that count for nothing, each made again at once."""

    @property
    def title(self) -> str:
        where = f" on {self.where}" if self.nodes is not None else ""
        return f"{count_noun(self.ranks, 'rank')}{where}" if self.ranks else "one process"

    def seconds(self, name: str) -> list[float]:
        """Whole-process times of a contender, in order of rounds."""
        return [run.seconds for run in self.series[name].samples]

    def first(self, name: str) -> list[float]:
        """Times to the first all-reduce of a contender; empty if it makes none."""
        samples = self.series[name].samples
        return [run.stamp_seconds for run in samples if run.stamp_seconds is not None]

    @cached_property
    def coefficient(self) -> float:
        """How alike neighbouring rounds are, in the ratios of contenders."""
        return find_common([list(map(self.seconds, self.series))])

    def compare(self, name: str, other: str) -> Ratio:
        """The time of one over that of the other, round by round."""
        return compare_rounds(self.seconds(other), self.seconds(name), self.coefficient)

    @property
    def torchrun(self) -> str:
        return min(TORCHRUN, TORCHRUN_STATIC, key=lambda name: summarize(self.seconds(name)).median)


def format_table(group: Group) -> str:
    """The group's table: seconds, and ratios round by round."""
    heads = ["", "median", "quartiles", "95 % of median", "CPU"]
    if group.ranks:
        heads[4:4] = ["1st all-reduce", "/ torchrun", "/ import torch"]
    rows = [heads, *(_format_row(group, contender.name) for contender in group.contenders)]
    rounds = len(group.seconds(group.contenders[0].name))
    title = f"{group.title}, {rounds} rounds: seconds of the whole process"
    return "\n".join([title, *format_rows(rows)])


def _format_row(group: Group, name: str) -> list[str]:
    summary = summarize(group.seconds(name))
    cells = [
        name,
        f"{summary.median:.3f}",
        f"{summary.lower_quartile:.3f}–{summary.upper_quartile:.3f}",
        describe_interval(summary.interval),
    ]
    if group.ranks:
        first = group.first(name)
        cells.append(f"{summarize(first).median:.3f}" if first else "–")
        for other in (group.torchrun, FLOOR):
            cells.append("1" if name == other else f"{group.compare(name, other).estimate:.2f}")
    cpu = [run.cpu_seconds for run in group.series[name].samples]
    known = [seconds for seconds in cpu if seconds is not None]
    return [*cells, f"{summarize(known).median:.2f}" if known else "–"]


def describe_warm_up(group: Group) -> str:
    """The times of the warm-up rounds, which count for nothing else; empty if there were none."""
    parts = [
        f"{contender.name} " + " ".join(f"{run.seconds:.2f}" for run in runs)
        for contender in group.contenders
        if (runs := group.series[contender.name].warm_up)
    ]
    return f"warm-up: {'; '.join(parts)}" if parts else ""


def describe_others(group: Group) -> str:
    """How busy other programs kept the machine meanwhile; empty if that is unknown."""
    cores = len(find_cpus())
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


def format_group(group: Group) -> str:
    parts = (format_table, describe_warm_up, describe_others, describe_failures)
    return "\n".join(filter(None, (describe(group) for describe in parts)))


def make_cells(group: Group) -> Iterator[Cell]:
    """Of whole processes, and of the time to the first all-reduce, in seconds."""
    for contender in group.contenders:
        series = group.series[contender.name]
        first, place = group.first(contender.name), describe_place(group, contender.name)
        details = {
            "kind": contender.kind,
            "about": contender.about,
            "command": contender.describe(),
            "cpu_seconds": [run.cpu_seconds for run in series.samples],
            "others_cpu_seconds": [run.others_cpu_seconds for run in series.samples],
            "positions": series.positions,
            "warm_up": [run.seconds for run in series.warm_up],
        }
        yield make_cell(group.seconds(contender.name), quantity=QUANTITY, details=details, **place)
        if first:
            yield make_cell(first, quantity=QUANTITY, at={"part": "first all-reduce"}, **place)


def describe_place(group: Group, name: str) -> dict[str, Any]:
    """Fields of a contender's cells."""
    return {"contender": name, "ranks": max(1, group.ranks), "nodes": group.nodes or 1}
