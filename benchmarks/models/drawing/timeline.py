"""A training step as a picture: what a rank computes above what it sends, with and without overlap.

A line goes through it in the time of the step; the page lets a reader hold and move that line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from benchmarks.common.options import describe_seconds
from benchmarks.models.drawing.diagram import NAMESPACE, STYLE, draw, write
from benchmarks.models.drawing.page import fill, read
from benchmarks.models.drawing.workflow import COMPUTES, SENDS, Span, TrainingStep

LEFT, TOP, ROW, BAR, GAP = 110, 68, 34, 26, 40
LENGTH = 760
"""Of the longer one of the two."""
CHARACTER = 6.0
LOOP_SECONDS = 12
MOVING = f"""
.now {{ stroke: var(--ink); animation: sweep {LOOP_SECONDS}s linear infinite; }}
.sent {{ fill: var(--copy); }} .inside {{ fill: var(--paper); font-size: 10px; }}
@keyframes sweep {{ to {{ transform: translateX({LENGTH}px); }} }}
@media (prefers-reduced-motion: reduce) {{ .now {{ animation-play-state: paused; }} }}
"""


def draw_timeline(step: TrainingStep, title: str) -> str:
    """An SVG document, in light or dark as the reader's screen is."""
    plans = {
        "buckets go while backward computes": step.plan(),
        "without overlap": step.plan(overlaps=False),
    }
    height = TOP + len(plans) * (2 * ROW + GAP) - GAP // 2
    size = {"width": str(LEFT + LENGTH + 60), "height": str(height)}
    view = f"0 0 {size['width']} {height}"
    root = Element("svg", {"xmlns": NAMESPACE, "viewBox": view, "role": "img", **size})
    SubElement(root, "title").text = title
    SubElement(root, "style").text = STYLE + MOVING
    SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "var(--paper)"})
    write(root, 16, 26, title, "title")
    scale = LENGTH / max(spans[-1].end for spans in plans.values())
    for number, (name, spans) in enumerate(plans.items()):
        _draw_plan(root, TOP + number * (2 * ROW + GAP), f"{name}: ", spans, scale)
    draw(root, "line", "now", x1=LEFT, x2=LEFT, y1=TOP - 6, y2=height - 12)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _draw_plan(root: Element, top: float, name: str, spans: Sequence[Span], scale: float) -> None:
    rows = {COMPUTES: top, SENDS: top + ROW}
    for lane, y in rows.items():
        write(root, 16, y + 17, lane)
        draw(root, "line", "rank", x1=LEFT, x2=LEFT + LENGTH, y1=y + BAR, y2=y + BAR)
    for span in spans:
        x, y, width = LEFT + span.begin * scale, rows[span.lane], (span.end - span.begin) * scale
        kind = "sent" if span.lane == SENDS else "full" if span.name == "update" else "part"
        draw(root, "rect", kind, x=x, y=y, width=max(width - 1, 1), height=BAR)
        names = (span.name, span.name.split()[-1])
        fitting = [text for text in names if CHARACTER * len(text) < width]
        if fitting:
            write(root, x + width / 2, y + 17, fitting[0], "inside", anchor="middle")
        elif span == spans[-1]:
            write(root, x + width + 6, y + 17, span.name)
    write(root, LEFT, top - 8, name + describe_seconds(spans[-1].end), "quiet")


def draw_timeline_page(step: TrainingStep, title: str) -> str:
    """One HTML document that plays the picture, offline, in any browser."""
    plans = [step.plan(), step.plan(overlaps=False)]
    data = {"plans": [list(map(asdict, spans)) for spans in plans], "loop": LOOP_SECONDS}
    texts = {"picture": draw_timeline(step, title)}
    return fill(read("timeline.html"), title, read("timeline.css"), texts, data)
