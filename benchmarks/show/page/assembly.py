"""Puts the sections of a report together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.judge.ratios import find_greater
from benchmarks.judge.winners import Group, Verdict, make_groups
from benchmarks.records.collectives import COLLECTIVES
from benchmarks.records.contenders import ALL_PAIRS, POINT_TO_POINT, PROBE, REDUCTION, shorten
from benchmarks.records.material import Material
from benchmarks.records.options import SPEED, describe_value
from benchmarks.records.schema import group_by
from benchmarks.show.drawing.page import OFFERED
from benchmarks.show.page.curves import draw_curves
from benchmarks.show.page.findings import list_alerts, list_facts
from benchmarks.show.page.machine import Model, find_fit, highlight_links, make_model
from benchmarks.show.page.page import Report
from benchmarks.show.page.pairs import draw_pairs
from benchmarks.show.page.pictures import Highlight, Link, Section
from benchmarks.show.page.steps import draw_steps
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.registry import Choice, find, names
from mpiddp.wording import count_noun, describe_size

ORDER = (
    *COLLECTIVES, POINT_TO_POINT, ALL_PAIRS, REDUCTION, "training step", "training speed",
    "training loop", "start-up", "start-up phase", "time to accuracy", "training", "checkpoint",
    PROBE,
)  # fmt: skip
"""Of the sections; other quantities follow."""
EXPLAINED = 4
"""Ranks on which an algorithm is explained; with more the picture is crowded."""


def assemble(material: Material, fit_path: Path | None = None) -> Report:
    """Raises ConfigurationError if the fit is none."""
    sized = [each for each in material.cells if each.cell.quantity not in (ALL_PAIRS, PROBE)]
    groups = make_groups(sized)
    by_quantity = group_by(groups, lambda group: group.place.quantity)
    fit, source = find_fit(fit_path, material.records)
    sizes = sorted({size for group in groups for size in group.sizes})
    model = make_model(fit, source, [each.cell for each in material.cells], sizes)
    sections = list(_list_sections(material, by_quantity, model))
    benchmarks = ", ".join(dict.fromkeys(record.benchmark for record in material.records))
    dates = [str(each.environment.get("date") or "")[:10] for each in material.records]
    when = " to ".join(sorted({min(dates), max(dates)} - {""}))
    return Report(
        heading="What was measured",
        words=f"{len(material.cells):,} cells of {count_noun(len(dates), 'record')}: "
        f"{benchmarks}{f'; {when}' if when else ''}. Times are the slowest rank's; a band is the "
        "quartiles of the iterations around their median.",
        alerts=list_alerts(material),
        highlights=[*_highlight_collectives(by_quantity), *highlight_links(fit)],
        sections=sections,
        machines=list_facts(material),
        records=material.names,
    )


def _list_sections(
    material: Material, groups: dict[str, list[Group]], model: Model
) -> Iterator[Section]:
    quantities = dict.fromkeys(each.cell.quantity for each in material.cells)
    order = {quantity: number for number, quantity in enumerate(ORDER)}
    for quantity in sorted(quantities, key=lambda each: (order.get(each, len(order)), each)):
        if quantity == ALL_PAIRS:
            section = draw_pairs(material.of(ALL_PAIRS))
        elif quantity in groups:
            section = draw_curves(groups[quantity], model, _list_links(groups[quantity]))
        else:
            section = draw_steps(material.of(quantity), quantity)
        if section is not None:
            yield section


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


def _highlight_collectives(groups: dict[str, list[Group]]) -> Iterator[Highlight]:
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
