"""A training step: what a rank computes above what it sends, with and without overlap.

As a picture; and as a page, in which a reader moves a line through the step.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from benchmarks.records.options import describe_seconds
from benchmarks.show.drawing.diagram import NAMESPACE, STYLE, draw, write
from benchmarks.show.drawing.page import fill, read
from benchmarks.show.drawing.workflow import COMPUTES, SENDS, Span, TrainingStep

LEFT, TOP, ROW, BAR, GAP = 110, 68, 34, 26, 40
LENGTH = 760
"""Of the longer one of the two."""
CHARACTER = 6.0
PLAYED_SECONDS = 12
COLOURS = """
.sent { fill: var(--copy); } .inside { fill: var(--paper); font-size: 10px; }
"""


def _list_plans(step: TrainingStep) -> dict[str, list[Span]]:
    return {
        "buckets go while backward computes": step.plan(),
        "without overlap": step.plan(overlaps=False),
    }


def _name_kind(span: Span) -> str:
    return "sent" if span.lane == SENDS else "full" if span.name == "update" else "part"


def draw_timeline(step: TrainingStep, title: str) -> str:
    """An SVG document, in light or dark as the reader's screen is."""
    plans = _list_plans(step)
    height = TOP + len(plans) * (2 * ROW + GAP) - GAP // 2
    size = {"width": str(LEFT + LENGTH + 60), "height": str(height)}
    view = f"0 0 {size['width']} {height}"
    root = Element("svg", {"xmlns": NAMESPACE, "viewBox": view, "role": "img", **size})
    SubElement(root, "title").text = title
    SubElement(root, "style").text = STYLE + COLOURS
    SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "var(--paper)"})
    write(root, 16, 26, title, "title")
    scale = LENGTH / max(spans[-1].end for spans in plans.values())
    for number, (name, spans) in enumerate(plans.items()):
        _draw_plan(root, TOP + number * (2 * ROW + GAP), f"{name}: ", spans, scale)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _draw_plan(root: Element, top: float, name: str, spans: Sequence[Span], scale: float) -> None:
    rows = {COMPUTES: top, SENDS: top + ROW}
    for lane, y in rows.items():
        write(root, 16, y + 17, lane)
        draw(root, "line", "rank", x1=LEFT, x2=LEFT + LENGTH, y1=y + BAR, y2=y + BAR)
    for span in spans:
        x, y, width = LEFT + span.begin * scale, rows[span.lane], (span.end - span.begin) * scale
        draw(root, "rect", _name_kind(span), x=x, y=y, width=max(width - 1, 1), height=BAR)
        names = (span.name, span.name.split()[-1])
        fitting = [text for text in names if CHARACTER * len(text) < width]
        if fitting:
            write(root, x + width / 2, y + 17, fitting[0], "inside", anchor="middle")
        elif span == spans[-1]:
            write(root, x + width + 6, y + 17, span.name)
    write(root, LEFT, top - 8, name + describe_seconds(spans[-1].end), "quiet")


def draw_timeline_page(step: TrainingStep, title: str) -> str:
    """One HTML document, offline, in any browser."""
    plans = _list_plans(step)
    longest = max(spans[-1].end for spans in plans.values())
    texts = {
        "heading": html.escape(title),
        "plans": "\n".join(_write_plan(*plan, longest) for plan in plans.items()),
    }
    spans = [list(map(asdict, each)) for each in plans.values()]
    data = {"plans": spans, "seconds": PLAYED_SECONDS}
    return fill(read("timeline.html"), title, read("base.css") + read("timeline.css"), texts, data)


def _write_plan(name: str, spans: Sequence[Span], longest: float) -> str:
    lanes = "".join(
        f'<div class="lane">{lane}<div class="track">'
        f"{''.join(_write_span(span, longest) for span in spans if span.lane == lane)}</div></div>"
        for lane in (COMPUTES, SENDS)
    )
    seconds = describe_seconds(spans[-1].end)
    return f"<section><h2>{name.capitalize()} <span>{seconds}</span></h2>{lanes}</section>"


def _write_span(span: Span, longest: float) -> str:
    number = span.name.partition(" ")[2]
    begin, length = span.begin / longest, (span.end - span.begin) / longest
    return (
        f'<div class="span {_name_kind(span)}" title="{span.name}" '
        f'style="--begin:{begin:.5f};--length:{length:.5f}">'
        f'<b class="long">{span.name}</b><b class="short">{number}</b></div>'
    )
