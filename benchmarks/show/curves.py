"""Charts of what is measured by size, and the map of who wins where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.judge.winners import Group, name_kind, name_places
from benchmarks.records.collectives import COLLECTIVES, find_bus_factor
from benchmarks.records.contenders import shorten
from benchmarks.records.material import Measured
from benchmarks.records.options import RATE, SECONDS, SHARE, SPEED, describe_seconds
from benchmarks.records.statistics import Spread
from benchmarks.show.charts import Chart, ChartLine, Grid, Panel, Section, Square
from benchmarks.show.machine import Model
from mpiddp.wording import describe_size


def describe_sizes(groups: Sequence[Group], model: Model) -> Section:
    """The section of one quantity, of which ``groups`` are.

    Its words are what all places have in common, and is not in the panels' names. The framework,
    MPI and mpiddp's own choice have the same colours in all sections.
    """
    quantity = groups[0].place.quantity
    names = shorten(dict.fromkeys(name for group in groups for name in group.rows))
    labels, common = name_places(groups)
    panels = [
        _make_panel(group, label, names, model) for group, label in zip(groups, labels, strict=True)
    ]
    several = any(len(group.rows) > 1 for group in groups)
    roles = {
        names[name]: role
        for group in groups
        for role, found in enumerate((group.frameworks, group.mpi, group.autos))
        for name in found[:1]
    }
    return Section(
        name=quantity.replace(" ", "-"),
        heading=quantity.capitalize(),
        words=", ".join(common),
        pictures=[_make_winners(groups, labels, names)] if several else [],
        panels=panels,
        roles=roles,
    )


def _make_panel(group: Group, label: str, names: Mapping[str, str], model: Model) -> Panel:
    place = group.place
    factor = find_bus_factor(place.quantity, place.ranks)
    framework = _find_framework(group, names)
    has_wrong = any(each.wrong for row in group.rows.values() for each in row.values())

    def find_time(each: Measured) -> Spread:
        return group.times[each.name][each.cell.bytes]

    def find_rate(each: Measured) -> Spread:
        return find_time(each).inverted(factor * each.cell.bytes * 1e-9)

    def find_ratio(each: Measured) -> Spread | None:
        base = group.find_framework(each)
        return None if base is None or base is each else group.find_speed(base, each)

    def find_share(each: Measured) -> Spread | None:
        least = model.bound(each.cell)
        return find_time(each).inverted(least) if least else None

    def find_error(each: Measured) -> Spread | None:
        predicted = model.predict(each.cell)
        return find_time(each).scaled(1 / predicted) if predicted else None

    def make_lines(
        find: Callable[[Measured], Spread | None], *, noted: bool = False
    ) -> list[ChartLine]:
        return list(_list_lines(group, names, find, noted=noted))

    charts = [
        Chart(
            title="Time", unit=SECONDS, is_log=True, lines=make_lines(find_time, noted=True),
            text="Time of the slowest rank by size: medians of the iterations, and quartiles"
            + ("; circles: wrong results." if has_wrong else "."),
        ),
        Chart(
            title="Bus bandwidth" if place.quantity in COLLECTIVES else "Bandwidth",
            unit=RATE, is_log=False, lines=make_lines(find_rate),
            text="What a rank sends or receives at least, by the time; higher is better.",
        ),
        Chart(
            title=f"Speed, relative to {framework}", unit=SPEED, is_log=True,
            lines=make_lines(find_ratio), mark=(1.0, f"as fast as {framework}"),
            text=f"How many times as fast as {framework}, round by round; higher is better.",
        ),
        Chart(
            title="Share of the bound", unit=SHARE, is_log=False, lines=make_lines(find_share),
            mark=(1.0, "lower bound"),
            text=f"The least time that any algorithm needs, by the time; {model.source}.",
        ),
        Chart(
            title="Measured by predicted", unit=SPEED, is_log=True, lines=make_lines(find_error),
            mark=(1.0, "as predicted"),
            text="The measured time by the predicted one, if that is known: above 1 it took "
            f"longer; {model.source}.",
        ),
    ]  # fmt: skip
    drawn = [chart for chart in charts if chart.lines]
    return Panel(name=label, charts=drawn, shown=[names[name] for name in group.choose()])


def _list_lines(
    group: Group,
    names: Mapping[str, str],
    find: Callable[[Measured], Spread | None],
    *,
    noted: bool,
) -> Iterator[ChartLine]:
    """Of each contender that has a point."""
    for name, row in group.rows.items():
        found = {float(size): find(each) for size, each in row.items()}
        points = {size: value for size, value in found.items() if value is not None}
        if points:
            notes = _list_notes(group, name) if noted else {}
            wrong = [size for size in points if row[int(size)].wrong]
            yield ChartLine(names[name], points, notes, wrong)


def _find_framework(group: Group, names: Mapping[str, str]) -> str:
    """What most contenders are compared with; empty if there is no framework."""
    bases = (group.find_framework(each) for row in group.rows.values() for each in row.values())
    counts = Counter(names[base.name] for base in bases if base is not None)
    return max(counts, key=lambda name: counts[name], default="")


def _list_notes(group: Group, name: str) -> dict[float, str]:
    """Which algorithm ran, if the contender's name does not say it; and what is wrong."""
    notes: dict[float, str] = {}
    for size, each in group.rows[name].items():
        ran = each.cell.details.get("ran")
        parts = [f"ran {ran}"] if ran and name in group.autos else []
        parts += [f"{each.wrong} wrong elements"] if each.wrong else []
        if each.cell.details.get("stopped") == "budget":
            parts.append("the budget was spent before the interval was narrow")
        if parts:
            notes[size] = "; ".join(parts)
    return notes


def _make_winners(groups: Sequence[Group], labels: Sequence[str], names: Mapping[str, str]) -> Grid:
    sizes = sorted(set().union(*(group.sizes for group in groups)))
    return Grid(
        title="The fastest contender",
        text="The fastest contender by place and size, and how many times as fast as the "
        "framework it is. Pale, with ≈: not told apart from the next one, with 95 % confidence.",
        corner="",
        rows=labels,
        columns=[describe_size(size) for size in sizes],
        squares=[[_make_winner(group, size, names) for size in sizes] for group in groups],
    )


def _make_winner(group: Group, size: int, names: Mapping[str, str]) -> Square | None:
    found = group.verdicts.get(size)
    if found is None:
        return None

    def describe(each: Measured) -> str:
        return f"{names[each.name]}: {describe_seconds(group.times[each.name][size].median)}"

    words, text, is_settled = [describe(found.winner)], "", found.is_settled
    if found.second is not None:
        tie = "" if is_settled else ", not told apart"
        words.append(f"second {describe(found.second)}{tie}")
    if found.framework is not None and found.speed is not None:
        text = _describe_speed(found.speed.estimate)
        words.append(f"{text} as fast as {names[found.framework.name]}")
    kind = name_kind(found.winner, names[found.winner.name])
    return Square(
        text if is_settled else f"≈{text}", "; ".join(words), kind=kind, is_marked=not is_settled
    )


def _describe_speed(speed: float) -> str:
    return f"{speed:,.0f}×" if speed >= 10 else f"{speed:.2g}×"
