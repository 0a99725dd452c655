"""A space-time diagram: ranks below each other, steps from left to right, messages as arrows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from benchmarks.show.drawing.holdings import Holdings, follow
from mpiddp.schedules.schedule import Schedule, Step

NAMESPACE = "http://www.w3.org/2000/svg"
LEFT, TOP, ROW, BOTTOM = 74, 70, 56, 44
CELLS = 44
"""Width of the little bar that shows what a rank holds."""
BAR = 12
MOST_LABELS = 12
"""Arrows in a step, beyond which they are not labelled with their chunks."""

STYLE = """
svg { --paper: #ffffff; --ink: #1f2328; --quiet: #59636e; --line: #d1d9e0;
      --add: #0b6bcb; --copy: #b4540a; --none: #eef1f4; --full: #1a7f37; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #f0f6fc; --quiet: #9da7b1; --line: #3d444d;
        --add: #6cb6ff; --copy: #f0a35e; --none: #21262d; --full: #4ac26b; }
}
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; }
.quiet { fill: var(--quiet); font-size: 11px; }
.label { font-size: 10px; stroke: var(--paper); stroke-width: 3px; paint-order: stroke; }
.rank { stroke: var(--line); stroke-width: 1; }
.seam { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 2 4; }
.add { stroke: var(--add); stroke-width: 1.6; fill: none; }
.copy { stroke: var(--copy); stroke-width: 1.6; fill: none; stroke-dasharray: 5 3; }
.add-head { fill: var(--add); } .copy-head { fill: var(--copy); }
.none { fill: var(--none); } .part { fill: var(--add); } .full { fill: var(--full); }
.frame { fill: none; stroke: var(--quiet); stroke-width: 0.7; }
"""


def draw_diagram(
    schedule: Schedule, title: str, *, notes: Sequence[str] = (), nodes: Sequence[int] | None = None
) -> str:
    """An SVG document, in light or dark as the reader's screen is.

    ``notes`` has a remark for each step, such as its price. Between the steps each rank's chunks
    are shown as a bar: empty, filled as far as contributions are in it, and complete. A line
    parts the ranks of one node, of which ``nodes`` has the numbers, from those of the next.
    """
    return _Diagram(schedule, title, notes, nodes or ()).draw()


class _Diagram:
    def __init__(
        self, schedule: Schedule, title: str, notes: Sequence[str], nodes: Sequence[int]
    ) -> None:
        self._schedule, self._title, self._notes = schedule, title, notes
        self._seams = list(accumulate(nodes))[:-1]
        steps = len(schedule.steps)
        self._stride = CELLS + (110 if steps <= 12 else 64 if steps <= 40 else 36)
        self._width = max(LEFT + steps * self._stride + CELLS + 20, 640)
        self._height = TOP + schedule.ranks * ROW + BOTTOM

    def draw(self) -> str:
        size = {"width": str(self._width), "height": str(self._height)}
        view = f"0 0 {self._width} {self._height}"
        root = Element("svg", {"xmlns": NAMESPACE, "viewBox": view, "role": "img", **size})
        SubElement(root, "title").text = self._title
        SubElement(root, "style").text = STYLE
        _define_heads(root)
        SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "var(--paper)"})
        write(root, 16, 26, self._title, "title")
        self._draw_ranks(root)
        for number, step in enumerate(self._schedule.steps):
            self._draw_head(root, number)
            self._draw_arrows(root, number, step)
        for number, holdings in enumerate(follow(self._schedule)):
            self._draw_holdings(root, number, holdings)
        self._draw_legend(root)
        ElementTree.indent(root, " ")
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    def _x(self, step: int) -> float:
        return LEFT + step * self._stride

    def _y(self, rank: int) -> float:
        return TOP + (rank + 0.5) * ROW

    def _draw_ranks(self, root: Element) -> None:
        end = self._x(len(self._schedule.steps)) + CELLS
        for rank in range(self._schedule.ranks):
            y = self._y(rank)
            write(root, 16, y + 4, f"rank {rank}")
            if rank not in self._schedule.members:
                write(root, 16, y + 18, "server", "quiet")
            draw(root, "line", "rank", x1=LEFT, x2=end, y1=y, y2=y)
        for seam in self._seams:
            y = TOP + seam * ROW
            draw(root, "line", "seam", x1=16, x2=end, y1=y, y2=y)

    def _draw_head(self, root: Element, number: int) -> None:
        middle = self._x(number) + CELLS + (self._stride - CELLS) / 2
        wide = self._stride - CELLS >= 60
        name = f"step {number + 1}" if wide else str(number + 1)
        write(root, middle, 48, name, anchor="middle")
        if self._notes and wide:
            write(root, middle, 62, self._notes[number], "quiet", anchor="middle")

    def _draw_arrows(self, root: Element, number: int, step: Step) -> None:
        messages = Counter(transfer.src for transfer in step)
        named = self._schedule.chunks > 1 and len(step) <= MOST_LABELS
        named = named and max(messages.values(), default=0) == 1
        x1, x2 = self._x(number) + CELLS + 3, self._x(number + 1) - 5
        labels = []
        for src, dst, lo, hi, reduce in step:
            kind, y1, y2 = "add" if reduce else "copy", self._y(src), self._y(dst)
            draw(root, "line", kind, x1=x1, y1=y1, x2=x2, y2=y2, **{"marker-end": f"url(#{kind})"})
            # Near its sender, where arrows that cross are still apart.
            part = 22 / math.hypot(x2 - x1, y2 - y1)
            name = f"{lo}" if hi == lo + 1 else f"{lo}–{hi - 1}"
            labels.append((x1 + part * (x2 - x1), y1 + part * (y2 - y1) + 3.5, name))
        for x, y, name in labels if named else ():
            write(root, x, y, name, "label", anchor="middle")

    def _draw_holdings(self, root: Element, number: int, holdings: Holdings) -> None:
        width = CELLS / self._schedule.chunks
        for rank, row in enumerate(holdings):
            x, y = self._x(number), self._y(rank) - BAR / 2
            draw(root, "rect", "none", x=x, y=y, width=CELLS, height=BAR)
            for chunk, holding in enumerate(row):
                share = len(holding) / len(self._schedule.contributors(chunk))
                height = BAR * share
                if share:
                    kind = "full" if share == 1 else "part"
                    draw(root, "rect", kind, x=x + chunk * width, y=y + BAR - height,
                          width=width, height=height)  # fmt: skip
            draw(root, "rect", "frame", x=x, y=y, width=CELLS, height=BAR)
            if self._schedule.chunks <= 12:
                for chunk in range(1, self._schedule.chunks):
                    x1 = x + chunk * width
                    draw(root, "line", "frame", x1=x1, x2=x1, y1=y, y2=y + BAR)

    def _draw_legend(self, root: Element) -> None:
        y = self._height - 18
        for x, kind, text in ((16, "add", "added"), (106, "copy", "copied")):
            draw(root, "line", kind, x1=x, x2=x + 34, y1=y - 4, y2=y - 4,
                  **{"marker-end": f"url(#{kind})"})  # fmt: skip
            write(root, x + 42, y, text, "quiet")
        for x, kind, text in ((206, "part", "part of the sum"), (326, "full", "all of it")):
            height = BAR if kind == "full" else BAR / 2
            draw(root, "rect", "none", x=x, y=y - 10, width=14, height=BAR)
            draw(root, "rect", kind, x=x, y=y + 2 - height, width=14, height=height)
            draw(root, "rect", "frame", x=x, y=y - 10, width=14, height=BAR)
            write(root, x + 20, y, text, "quiet")
        rest = ["numbers: chunks"] * (self._schedule.chunks > 1)
        rest += ["dotted: between nodes"] * bool(self._seams)
        write(root, 406, y, "; ".join(rest), "quiet")


def _define_heads(root: Element) -> None:
    definitions = SubElement(root, "defs")
    for kind in ("add", "copy"):
        marker = SubElement(
            definitions,
            "marker",
            {"id": kind, "viewBox": "0 0 8 8", "refX": "7", "refY": "4", "orient": "auto",
             "markerWidth": "8", "markerHeight": "8", "markerUnits": "userSpaceOnUse"},
        )  # fmt: skip
        SubElement(marker, "path", {"class": f"{kind}-head", "d": "M0 0 L8 4 L0 8 z"})


def draw(root: Element, shape: str, kind: str, **attributes: float | str) -> None:
    values = {
        name: value if isinstance(value, str) else f"{value:g}"
        for name, value in attributes.items()
    }
    SubElement(root, shape, {"class": kind, **values})


def write(
    root: Element, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start"
) -> None:
    attributes = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    SubElement(root, "text", attributes | ({"class": kind} if kind else {})).text = text
