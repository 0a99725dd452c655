"""What the page of a report has: sections of pictures, and what stands around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.judge.fit.fitted import PLACES, WORTHLESS, Fit
from benchmarks.judge.ratios import find_greater
from benchmarks.judge.winners import Group, Verdict
from benchmarks.records.collectives import COLLECTIVES
from benchmarks.records.contenders import POINT_TO_POINT, shorten
from benchmarks.records.material import Material
from benchmarks.records.options import RATE, SECONDS, SPEED, describe_value
from benchmarks.show.charts import Link
from benchmarks.show.drawing.page import OFFERED
from benchmarks.show.machine import find_fit, make_model
from benchmarks.show.page.alerts import list_alerts, list_facts
from benchmarks.show.page.contents import Highlight, ReportPage
from benchmarks.show.pictures import group_sized, list_sections
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.registry import Choice, find, names
from mpiddp.wording import count_noun, describe_size

EXPLAINED = 4
"""Ranks on which an algorithm is explained; with more the picture is crowded."""


def assemble(material: Material, fit_path: Path | None = None) -> ReportPage:
    """Raises ConfigurationError if the fit is none."""
    groups = group_sized(material.cells)
    fit, source = find_fit(fit_path, material.records)
    sizes = sorted({size for each in groups.values() for group in each for size in group.sizes})
    model = make_model(fit, source, [each.cell for each in material.cells], sizes)
    links = {quantity.replace(" ", "-"): _list_links(each) for quantity, each in groups.items()}
    sections = [
        replace(section, links=links.get(section.name, ()))
        for section in list_sections(material.cells, groups, model)
    ]
    benchmarks = ", ".join(dict.fromkeys(record.benchmark for record in material.records))
    dates = [str(each.environment.get("date") or "")[:10] for each in material.records]
    when = " to ".join(sorted({min(dates), max(dates)} - {""}))
    return ReportPage(
        heading="What was measured",
        words=f"{len(material.cells):,} cells of {count_noun(len(dates), 'record')}: "
        f"{benchmarks}{f'; {when}' if when else ''}. Times are the slowest rank's; a band is the "
        "quartiles of the iterations around their median.",
        alerts=list_alerts(material),
        highlights=[*_highlight_collectives(groups), *_highlight_links(fit)],
        sections=sections,
        machines=list_facts(material),
        records=material.names,
    )


def _list_links(groups: Sequence[Group]) -> list[Link]:
    """One for each algorithm that ran, if the collective can be explained, or is not known."""
    quantity = groups[0].place.quantity
    if quantity not in COLLECTIVES:
        return []
    ran = dict.fromkeys(
        each.cell.ran[0].partition(":")[0]
        for group in groups
        for row in group.rows.values()
        for each in row.values()
    )
    links = []
    for name in filter(None, ran):
        if name not in names():
            links.append(Link(quantity, name, None))
        elif (count := _find_ranks(name, quantity)) is not None:
            links.append(Link(quantity, name, count))
    return links


def _find_ranks(name: str, quantity: str) -> int | None:
    """On how many ranks the algorithm, or one of its halves, is that collective in a page."""
    choice = Choice(find(name), collective=COLLECTIVES[quantity])
    counts: Sequence[int] = (EXPLAINED, *OFFERED[1:])
    for count in counts:
        with suppress(ConfigurationError, ScheduleError):
            choice.build(count)
            return count
    return None


def _highlight_collectives(groups: Mapping[str, Sequence[Group]]) -> Iterator[Highlight]:
    """Of each collective the fastest at the largest size on the most ranks where there is one.

    If no contender is faster than another, one headline in twenty names one, however many sizes
    there are.
    """
    for quantity in COLLECTIVES:
        places = [
            (group, size, found)
            for group in reversed(groups.get(quantity, []))
            for size, found in reversed(list(group.verdicts.items()))
            if found.second is not None
        ]
        leads = {number: place[2].lead for number, place in enumerate(places)}
        settled = find_greater({number: lead for number, lead in leads.items() if lead})
        if (number := min(settled, default=None)) is not None:
            yield _highlight_winner(quantity, *places[number])
        elif places:
            yield Highlight(
                title=quantity.capitalize(), value="not settled", section=quantity,
                text="at no size is the fastest told apart from the next one: measure more rounds",
            )  # fmt: skip


def _highlight_winner(quantity: str, group: Group, size: int, found: Verdict) -> Highlight:
    """Beside the framework; beside the next one if the framework wins, or was not measured."""
    others = [(found.framework, found.speed), (found.second, found.lead)]
    other, speed = next((o, s) for o, s in others if o and s and o is not found.winner)
    short = shorten(group.rows)
    return Highlight(
        title=f"{quantity.capitalize()}, {group.place.parts[0]}",
        value=describe_value(speed.estimate, SPEED),
        text=f"as fast as {short[other.name]} at {describe_size(size)}: {short[found.winner.name]}",
        section=quantity,
    )


def _highlight_links(fit: Fit | None) -> Iterator[Highlight]:
    """Latency and bandwidth of each kind of link."""
    for link, curve in fit.links.items() if fit is not None else ():
        smallest, largest = curve.segments[0].latency, curve.segments[-1].seconds_per_byte
        if largest and max(segment.error for segment in curve.segments) < WORTHLESS:
            yield Highlight(
                title=f"Messages {PLACES[link]}",
                value=describe_value(1e-9 / largest, RATE),
                text=f"and {describe_value(smallest, SECONDS)} for the smallest",
                section=POINT_TO_POINT,
            )
