"""One HTML document of all pictures: each as SVG in it, with a table of its values behind it.

Texts of records are escaped; the page fetches nothing, and its policy forbids to.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from benchmarks.judge.winners import MOST_SHOWN
from benchmarks.show.axes import COLOURS, measure
from benchmarks.show.charts import Bars, Dots, Grid, Panel, Picture, choose_colours, describe
from benchmarks.show.drawing.page import draw_page, fill, read
from benchmarks.show.page.contents import ReportPage
from benchmarks.show.progress import show_progress
from benchmarks.show.sheets import PAGE_WIDTH, draw_inline
from mpiddp.schedules.registry import Choice, find
from mpiddp.schedules.schedule import Collective


@dataclass(frozen=True)
class ValueTable:
    """What a picture shows, in words."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def draw_report(report: ReportPage) -> str:
    colours = choose_colours(report.sections, len(COLOURS))
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    template = environment.from_string(read("report.html", __package__))
    pictures = [picture for section in report.sections for picture in section.pictures]
    panels = [panel for section in report.sections for panel in section.panels]
    total = len(pictures) + sum(len(list(panel.drawn)) for panel in panels)
    with show_progress(total, "picture") as bar:

        def draw(picture: Picture) -> Markup:
            bar.update()
            return Markup(draw_inline(picture, colours))

        body = template.render(
            report=report, draw=draw, make_table=make_table, is_wide=is_wide, most=MOST_SHOWN,
            explanations=_draw_explanations(report),
        )  # fmt: skip
    style = read("base.css") + read("report.css", __package__)
    return fill("@body@", report.heading, style, {"body": body}, {})


def is_wide(picture: Picture) -> bool:
    """Whether the picture is too wide to stand beside others."""
    return measure(picture, PAGE_WIDTH)[0] > 1.7 * PAGE_WIDTH


def make_table(shown: Picture | Panel) -> ValueTable:
    """All values; of a panel all charts' and all lines'."""
    if isinstance(shown, Panel):
        return _make_panel_table(shown)
    if isinstance(shown, Grid):
        rows = [
            [name, *(f"{s.kind or ''} {s.text}".strip() if s else "" for s in squares)]
            for name, squares in zip(shown.rows, shown.squares, strict=True)
        ]
        return ValueTable([shown.corner, *shown.columns], rows)
    if isinstance(shown, Bars):
        parts = [part for part in shown.parts if part]
        say = partial(describe, unit=shown.unit)
        rows = [
            [
                bar.name, say(bar.median),
                "–".join(map(say, (bar.spread.lower_quartile, bar.spread.upper_quartile)))
                if bar.spread else "",
                *(say(bar.parts[part]) if part in bar.parts else "" for part in parts),
                bar.note,
            ]
            for bar in shown.bars
        ]  # fmt: skip
        return ValueTable(["", "median", "quartiles", *parts, ""], rows)
    assert isinstance(shown, Dots)
    rows = [
        [
            row.name,
            *(describe(row.points[n].median, shown.unit) if n in row.points else "–"
              for n in shown.names),
            row.note,
        ]
        for row in shown.rows
    ]  # fmt: skip
    return ValueTable(["", *shown.names, ""], rows)


def _make_panel_table(panel: Panel) -> ValueTable:
    """A row for each line and place."""
    lines = [{line.name: line for line in chart.lines} for chart in panel.charts]
    first = panel.charts[0]
    rows = [
        [
            name, first.describe_place(place),
            *(chart.describe_point(known[name], place) if name in known else "–"
              for chart, known in zip(panel.charts, lines, strict=True)),
        ]
        for name in panel.names
        for place in first.places
        if any(name in known and place in known[name].points for known in lines)
    ]  # fmt: skip
    heads = ["", "Size" if first.along == "bytes" else first.along]
    return ValueTable([*heads, *(chart.title for chart in panel.charts)], rows)


def _draw_explanations(report: ReportPage) -> Iterator[tuple[str, str]]:
    """The animated page of each collective that is linked to, packed."""
    links = [link for section in report.sections for link in section.links if link.ranks]
    for name, link in {link.collective: link for link in links}.items():
        choice = Choice(find(link.algorithm), collective=Collective(name))
        packed = gzip.compress(draw_page(choice, link.ranks or 1).encode(), mtime=0)
        yield name, base64.b64encode(packed).decode()
