"""One HTML document of all pictures: tables and bars are drawn here, curves by its script.

Texts of records are escaped; the page fetches nothing, and its policy forbids to.
"""

from __future__ import annotations

import base64
import gzip
import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from benchmarks.judge.winners import MOST_SHOWN
from benchmarks.records.options import describe_value
from benchmarks.show.drawing.holdings import letter
from benchmarks.show.drawing.page import draw_page, fill, read
from benchmarks.show.page.pictures import (
    Alert,
    Bar,
    Bars,
    Chart,
    Fact,
    Grid,
    Highlight,
    Link,
    Panel,
    Section,
    Square,
)
from mpiddp.schedules.registry import Choice, find
from mpiddp.schedules.schedule import Collective

DIGITS = 4
"""Of values in the page; more cannot be seen."""
FOOTER = """\
<p>Bus bandwidth is what each rank must send and receive at least, by the time, as nccl-tests counts
it. Speeds are ratios round by round, and then their median: contenders took turns in every round.
Arrow keys move along a curve that has the focus.</p>"""
HOT = 0.55
"""Heat from which on letters are light."""
LETTER_WIDTH = 0.42
"""Of the names of rows, in rem."""
COLOURS = 10
"""In the page's style, as slot-0 and so on."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the page shows."""

    heading: str
    words: str
    alerts: Sequence[Alert]
    highlights: Sequence[Highlight]
    sections: Sequence[Section]
    machines: Sequence[Fact]
    records: Sequence[str]


def draw_report(report: Report) -> str:
    colours = choose_colours(report.sections)
    sections = [_draw_section(section, colours) for section in report.sections]
    contents = [(section.name, section.heading) for section in report.sections]
    texts = {
        "heading": html.escape(report.heading),
        "words": html.escape(report.words),
        "alerts": "".join(map(_draw_alert, report.alerts)),
        "highlights": "".join(map(_draw_highlight, report.highlights)),
        "contents": "".join(
            f'<a href="#{name}">{html.escape(text)}</a>'
            for name, text in [*contents, ("machines", "Machines")]
        ),
        "sections": "\n".join([*sections, _draw_machines(report), *_draw_explanations(report)]),
        "footer": FOOTER,
        "script": "\n".join(read(name, __package__) for name in ("chart.js", "report.js")),
    }
    data = {
        "sections": {
            section.name: {"panels": list(map(_pack_panel, section.panels)), "colours": colours}
            for section in report.sections
            if section.panels
        }
    }
    style = read("base.css") + read("report.css", __package__)
    return fill(read("report.html", __package__), report.heading, style, texts, data)


def choose_colours(sections: Sequence[Section]) -> dict[str, int]:
    """A colour for each name that is coloured, the same in all sections."""
    colours: dict[str, int] = {}
    for section in sections:
        colours.update(section.roles)
    taken = set(colours.values())
    free = [number for number in range(COLOURS) if number not in taken]
    shown = (name for section in sections for panel in section.panels for name in panel.shown)
    kinds = (
        square.kind
        for section in sections
        for grid in section.pictures
        if isinstance(grid, Grid)
        for row in grid.squares
        for square in row
        if square is not None and square.kind is not None
    )
    others = (name for name in dict.fromkeys([*kinds, *shown]) if name not in colours)
    return {**colours, **{name: free[at % len(free)] for at, name in enumerate(others)}}


# ---- sections -----------------------------------------------------------------------------


def _draw_section(section: Section, colours: Mapping[str, int]) -> str:
    parts = [f"<h2>{html.escape(section.heading)}</h2>"]
    parts += [f"<p>{html.escape(section.words)}</p>"] if section.words else []
    pictures = [_draw_picture(each, section, colours) for each in section.pictures]
    parts += [f'<div class="pictures">{"".join(pictures)}</div>'] if pictures else []
    parts += [_draw_panel(section)] if section.panels else []
    parts += [_draw_links(section.links)] if section.links else []
    return f'<section id="{section.name}">{"".join(parts)}</section>'


def _draw_picture(picture: Grid | Bars, section: Section, colours: Mapping[str, int]) -> str:
    if isinstance(picture, Grid):
        body = _draw_grid(picture, section, colours)
    else:
        body = _draw_bars(picture)
    title, text = html.escape(picture.title), html.escape(picture.text)
    return (
        f'<figure class="card"><figcaption><h3>{title}</h3><p>{text}</p></figcaption>'
        f"{body}</figure>"
    )


def _draw_panel(section: Section) -> str:
    options = "".join(
        f"<option{' selected' * (number == section.start)}>{html.escape(panel.name)}</option>"
        for number, panel in enumerate(section.panels)
    )
    choice = f"<label>Shown <select>{options}</select></label>" if len(section.panels) > 1 else ""
    only = f"<h3>{html.escape(section.panels[0].name)}</h3>" if not choice else ""
    return (
        f'<div class="card panel" data-section="{section.name}"><div class="choice">{only}{choice}'
        f'<div class="chips" role="group" aria-label="Lines, at most {MOST_SHOWN}"></div></div>'
        '<div class="charts"></div></div>'
    )


def _pack_panel(panel: Panel) -> dict[str, Any]:
    names = list(dict.fromkeys(line.name for chart in panel.charts for line in chart.lines))
    return {
        "lines": names,
        "shown": list(panel.shown),
        "charts": [_pack_chart(chart, names) for chart in panel.charts],
    }


def _pack_chart(chart: Chart, names: Sequence[str]) -> dict[str, Any]:
    """Values as median, lower and upper quartile of each place, one after the other."""
    places, lines = chart.places, {line.name: line for line in chart.lines}
    nothing = (None,) * 3
    values, notes = [], {}
    for number, name in enumerate(names):
        line = lines.get(name)
        row: list[float | None] = []
        for place in places:
            point = line.points.get(place) if line is not None else None
            quartiles = point and (point.median, point.lower_quartile, point.upper_quartile)
            row += map(_round, quartiles) if quartiles else nothing
        values.append(row)
        if line is not None and line.notes:
            notes[number] = {places.index(at): text for at, text in line.notes.items()}
    wrong = {
        number: list(map(places.index, lines[name].wrong))
        for number, name in enumerate(names)
        if name in lines and lines[name].wrong
    }
    return {
        "title": chart.title, "text": chart.text, "unit": chart.unit, "isLog": chart.is_log,
        "along": chart.along, "mark": chart.mark, "places": places, "values": values,
        "notes": notes, "wrong": wrong,
    }  # fmt: skip


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


# ---- tables and bars ----------------------------------------------------------------------


def _draw_grid(grid: Grid, section: Section, colours: Mapping[str, int]) -> str:
    heads = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in grid.columns)
    rows = []
    kinds = {square.kind: None for row in grid.squares for square in row if square is not None}
    keys = {kind: letter(number).upper() for number, kind in enumerate(filter(None, kinds))}
    for number, (name, squares) in enumerate(zip(grid.rows, grid.squares, strict=True)):
        label = html.escape(name)
        if section.panels and len(section.panels) > 1:
            label = (
                f'<button type="button" data-picks="{section.name}" data-number="{number}">'
                f"{label}</button>"
            )
        cells = "".join(
            _draw_square(square, keys, colours, run)
            for square, run in zip(squares, _count_runs(squares), strict=True)
        )
        rows.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    legend = _draw_legend(
        {kind: f"slot-{colours[kind]}" for kind in keys}, keys if len(keys) > 1 else {}
    )
    names = " names" if legend else ""
    width = LETTER_WIDTH * max(map(len, grid.rows), default=1) + 2
    return (
        f'<div class="scroll" tabindex="0"><table class="grid{names}" '
        f'style="--columns:{len(grid.columns)};--label:{width:.1f}rem"><thead><tr>'
        f"<th>{html.escape(grid.corner)}</th>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{legend}"
    )


def _draw_legend(classes: Mapping[str, str], keys: Mapping[str, str]) -> str:
    """Names with their classes, and what stands for them; empty if there are none."""
    items = (
        f'<li class="{c}"><i>{keys.get(name, "")}</i>{html.escape(name)}</li>'
        for name, c in classes.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>' if classes else ""


def _count_runs(squares: Sequence[Square | None]) -> list[int]:
    """How many neighbours of one kind begin at each square; 0 within them."""
    runs = []
    for _, group in itertools.groupby(square and square.kind for square in squares):
        length = len(list(group))
        runs += [length, *[0] * (length - 1)]
    return runs


def _draw_square(
    square: Square | None, keys: Mapping[str, str], colours: Mapping[str, int], run: int
) -> str:
    if square is None:
        return "<td></td>"
    classes = ["marked"] if square.is_marked else []
    style = name = ""
    if square.kind is not None:
        classes.append(f"slot-{colours[square.kind]}")
        if run:
            # Over all squares that it is the name of, if it fits; the legend has it anyway.
            short = html.escape(square.kind.removeprefix("mpiddp "))
            name = f'<b style="--run:{run}"><span>{short}</span></b>'
        if len(keys) > 1:
            name += f"<i>{keys[square.kind]}</i> "
    elif square.heat is not None:
        classes.append("hot" if square.heat > HOT else "heat")
        style = f' style="--heat:{square.heat:.2f}"'
    title = f' title="{html.escape(square.title)}"' if square.title else ""
    text = html.escape(square.text)
    return f'<td class="{" ".join(classes)}"{style}{title}>{name}<span>{text}</span></td>'


def _draw_bars(bars: Bars) -> str:
    most = max((_find_end(bar) for bar in bars.bars), default=1.0) or 1.0
    names = list(dict.fromkeys(name for bar in bars.bars for name in bar.parts))
    rows = "".join(_draw_bar(bar, bars.unit, most, names) for bar in bars.bars)
    slots = {name: f"part-{at % MOST_SHOWN}" for at, name in enumerate(names) if name}
    return f'<table class="bars"><tbody>{rows}</tbody></table>{_draw_legend(slots, {})}'


def _find_end(bar: Bar) -> float:
    total = sum(value for value in bar.parts.values() if value > 0)
    return max(total, bar.spread.upper_quartile if bar.spread is not None else 0.0)


def _draw_bar(bar: Bar, unit: str, most: float, names: Sequence[str]) -> str:
    parts = "".join(
        f'<span class="part-{names.index(name) % MOST_SHOWN}" '
        f'style="--length:{max(0.0, value) / most:.4f}" '
        f'title="{html.escape(name)}: {html.escape(describe_value(value, unit))}"></span>'
        for name, value in bar.parts.items()
    )
    whisker = ""
    ends = bar.spread and (bar.spread.lower_quartile, bar.spread.upper_quartile)
    if ends and ends[0] < ends[1]:
        low, high = (max(0.0, end) / most for end in ends)
        whisker = f'<i style="--low:{low:.4f};--high:{high:.4f}"></i>'
    median = bar.spread.median if bar.spread is not None else sum(bar.parts.values())
    note = f"<small>{html.escape(bar.note)}</small>" if bar.note else ""
    return (
        f'<tr><th scope="row">{html.escape(bar.name)}</th>'
        f'<td class="bar"><div>{parts}{whisker}</div></td>'
        f"<td>{html.escape(describe_value(median, unit))}{note}</td></tr>"
    )


# ---- what stands around -------------------------------------------------------------------


def _draw_highlight(highlight: Highlight) -> str:
    return (
        f'<a class="highlight" href="#{highlight.section}"><span>{html.escape(highlight.title)}'
        f"</span><strong>{html.escape(highlight.value)}</strong>"
        f"<small>{html.escape(highlight.text)}</small></a>"
    )


def _draw_alert(alert: Alert) -> str:
    kind = "bad" if alert.is_bad else "warning"
    text = html.escape(alert.text)
    if not alert.lines:
        return f'<p class="alert {kind}">{text}</p>'
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in alert.lines)
    return f'<details class="alert {kind}"><summary>{text}</summary><ul>{lines}</ul></details>'


def _draw_machines(report: Report) -> str:
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in report.records)
    rows = "".join(
        f"<tr{' class=differs' if fact.must_agree and len(set(fact.texts)) > 1 else ''}>"
        f'<th scope="row">{html.escape(fact.name)}</th>'
        f"{''.join(f'<td>{html.escape(text)}</td>' for text in fact.texts)}</tr>"
        for fact in report.machines
    )
    return (
        '<section id="machines"><h2>Machines</h2><div class="card scroll" tabindex="0">'
        f'<table class="facts"><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody>'
        "</table></div></section>"
    )


def _draw_links(links: Sequence[Link]) -> str:
    buttons = "".join(
        f'<button type="button" data-page="page-{link.collective}" data-hash="'
        f'{html.escape(urlencode({"first": link.algorithm, "ranks": link.ranks}))}">'
        f"{html.escape(link.algorithm)}</button>"
        for link in links
        if link.ranks is not None
    )
    parts = [f"How it works, step by step: {buttons}"] if buttons else []
    unknown = html.escape(", ".join(link.algorithm for link in links if link.ranks is None))
    parts += [f"Not known here: {unknown} (report --load FILE explains it, too)"] if unknown else []
    return f'<p class="links">{" ".join(parts)}</p>'


def _draw_explanations(report: Report) -> Iterator[str]:
    """The animated page of each collective that is linked to, packed."""
    links = [link for section in report.sections for link in section.links if link.ranks]
    for name, link in {link.collective: link for link in links}.items():
        choice = Choice(find(link.algorithm), collective=Collective(name))
        packed = gzip.compress(draw_page(choice, link.ranks or 1).encode(), mtime=0)
        text = base64.b64encode(packed).decode()
        yield f'<script type="text/plain" id="page-{name}">{text}</script>'
