"""The pictures of a record: made of its cells, by quantity; pages, slides and files show them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.judge.winners import Group, make_groups
from benchmarks.records.collectives import COLLECTIVES
from benchmarks.records.contenders import ALL_PAIRS, POINT_TO_POINT, PROBE, REDUCTION
from benchmarks.records.material import Measured
from benchmarks.records.schema import Cell, group_by
from benchmarks.show.axes import COLOURS
from benchmarks.show.charts import Picture, Section, choose_colours
from benchmarks.show.curves import describe_sizes
from benchmarks.show.machine import Model, make_model
from benchmarks.show.pairs import describe_pairs
from benchmarks.show.progress import show_progress
from benchmarks.show.sheets import write_sheet, write_slide
from benchmarks.show.steps import describe_steps
from mpiddp.wording import count_noun

ORDER = (
    *COLLECTIVES, POINT_TO_POINT, ALL_PAIRS, REDUCTION, "training step", "training speed",
    "training loop", "start-up", "start-up phase", "time to accuracy", "training", "checkpoint",
    PROBE,
)  # fmt: skip
"""Of the sections; other quantities follow."""
BESIDE = (PROBE, "training speed", "time to accuracy")
"""Quantities that a record's picture leaves out: what it shows says the same, or explains it."""
CHARTS = 2
"""Of a panel, the times and the rates, that a record's picture shows."""


def write_picture(path: Path, cells: Sequence[Cell], note: str) -> None:
    """Draw the cells of a record in one file; none is written if none of them can be drawn."""
    measured = [Measured(cell, 0, cell.contender) for cell in cells]
    sections = list_sections(measured, group_sized(measured), make_model(None, "", cells, ()))
    beside = {quantity.replace(" ", "-") for quantity in BESIDE}
    sections = [section for section in sections if section.name not in beside]
    rows = [row for section in sections for row in _list_rows(section)]
    if not rows:
        return
    if max(map(len, rows)) == 1 < len(rows):
        single = [picture for (picture,) in rows]
        rows = [single[at : at + 2] for at in range(0, len(single), 2)]
    panels = [panel for section in sections for panel in section.panels]
    count = max((len(panel.names) - len(panel.shown) for panel in panels), default=0)
    left_out = f"{count_noun(count, 'contender')} left out, slower on the whole" if count else ""
    # Of what is measured by size the words are conditions, of other sections sentences.
    sentences = [each.words.rstrip(".") for each in sections if not each.panels]
    heads = [", ".join(filter(None, [e.heading, e.words if e.panels else ""])) for e in sections]
    title = f"{'; '.join(heads)}: medians, and their quartiles"
    text = "; ".join(filter(None, [*sentences, left_out, note]))
    write_sheet(path, rows, choose_colours(sections, len(COLOURS)), title, text)


def _list_rows(section: Section) -> Iterator[list[Picture]]:
    for panel in section.panels:
        first, *others = list(panel.drawn)[:CHARTS]
        yield [replace(first, title=f"{panel.name}: {first.title}"), *others]
    if not section.panels:
        for picture in section.pictures:
            yield [picture]


def group_sized(cells: Sequence[Measured]) -> dict[str, list[Group]]:
    """The groups of what is measured by size, by quantity."""
    sized = [each for each in cells if each.cell.quantity not in (ALL_PAIRS, PROBE)]
    return group_by(make_groups(sized), lambda group: group.place.quantity)


def list_sections(
    cells: Sequence[Measured], groups: Mapping[str, Sequence[Group]], model: Model
) -> list[Section]:
    """One for each quantity that can be drawn."""
    quantities = group_by(cells, lambda each: each.cell.quantity)
    order = {quantity: number for number, quantity in enumerate(ORDER)}
    sections: list[Section | None] = []
    for quantity in sorted(quantities, key=lambda each: (order.get(each, len(order)), each)):
        if quantity == ALL_PAIRS:
            sections.append(describe_pairs(quantities[quantity]))
        elif quantity in groups:
            sections.append(describe_sizes(groups[quantity], model))
        else:
            sections.append(describe_steps(quantities[quantity], cells))
    return [section for section in sections if section is not None]


# ---- slides -------------------------------------------------------------------------------


def write_slides(folder: Path, sections: Sequence[Section]) -> int:
    """Write each picture as PNG into a directory that exists; returns how many. Raises OSError."""
    colours = choose_colours(sections, len(COLOURS))
    slides = list(_list_slides(sections))
    with show_progress(len(slides), "slide") as bar:
        for number, (section, title, picture) in enumerate(slides, start=1):
            name = re.sub(r"[^a-z0-9]+", "-", f"{section.name} {title}".lower()).strip("-")[:80]
            path = folder / f"{number:03}-{name}.png"
            write_slide(path, picture, colours, f"{section.heading}: {title}")
            bar.update()
    return len(slides)


def _list_slides(sections: Sequence[Section]) -> Iterator[tuple[Section, str, Picture]]:
    for section in sections:
        for picture in section.pictures:
            yield section, picture.title, picture
        for panel in section.panels:
            for chart in panel.drawn:
                yield section, f"{chart.title}, {panel.name}", chart
