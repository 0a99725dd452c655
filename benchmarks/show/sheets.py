"""Sheets of pictures, as matplotlib writes them: a file of several, or the SVG of one in a page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.show import axes
from benchmarks.show.charts import Bars, Chart, Picture
from mpiddp.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

PAGE_WIDTH = 255
"""Of a picture in a page, in points: as wide as a telephone's screen, but for the margins."""
EDGE = 2
"""Of a page's picture, which is left free, in points."""
SLIDE_INCHES, SLIDE_DPI = (13.33, 7.5), 150
ENLARGED = 2.2
"""How many times larger letters and lines are on a slide than on paper."""
TITLE_POINTS, NOTE_POINTS = 12, 7
STYLE = {
    "font.size": axes.POINTS, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"], "xtick.labelsize": axes.POINTS - 0.5,
    "ytick.labelsize": axes.POINTS - 0.5, "text.color": axes.INK, "axes.labelcolor": axes.INK,
    "axes.edgecolor": axes.QUIET, "xtick.color": axes.QUIET, "ytick.color": axes.QUIET,
    "xtick.labelcolor": axes.INK, "ytick.labelcolor": axes.INK, "hatch.linewidth": 0.6,
    "hatch.color": axes.PAPER, "text.parse_math": False, "xtick.bottom": False,
    "ytick.left": False, "svg.fonttype": "none",
    "svg.hashsalt": "mpiddp", "figure.constrained_layout.w_pad": 0.03,
    "figure.constrained_layout.h_pad": 0.03,
}  # fmt: skip
"""Texts stay texts, so that they can be searched and read out; and nothing in a file is random."""
VARIABLES = {
    **{colour: f"--colour-{number}" for number, colour in enumerate(axes.COLOURS)},
    axes.INK: "--ink", axes.QUIET: "--quiet", axes.RULE: "--line", axes.ALARM: "--alarm",
    axes.HOT: "--hot", axes.PAPER: "--surface",
}  # fmt: skip
"""The colours of a page, which has others in the dark."""

SHORTER = {
    rf'<g id="{axes.TIP}([^"]*)">': r'<g pointer-events="all"><title>\1</title>',
    r'<g id="[\w.]*_\d+">': "<g>",
    r' transform="rotate\(-0 [^"]*\)"': "",
    r"\n +": "\n",
}
"""What is written in place of matplotlib's words: titles, and nothing of what nothing needs."""


@contextmanager
def open_sheet(path: Path, width: float, height: float, dpi: int = 150) -> Iterator[Figure]:
    """An empty figure of so many points, which is written to ``path`` at the end of the block."""
    with _open_figure(width, height) as figure:
        yield figure
        write_whole(path, _save(figure, path.suffix.lower().removeprefix(".") or "png", dpi))


@contextmanager
def _open_figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Iterator[Figure]:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):  # type: ignore[arg-type]
        # With so many dots an inch, what `axes` measures is in points.
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout=layout)
        FigureCanvasAgg(figure)
        yield figure


def add_texts(figure: Figure, title: str, note: str) -> None:
    """A heading, and a note below."""
    width = 72 * figure.get_figwidth()
    figure.suptitle(fill(title, int(width / 7.2), break_on_hyphens=False), fontsize=TITLE_POINTS)
    if note:
        text = fill(note, int(width / 4.1), break_on_hyphens=False)
        figure.supxlabel(text, fontsize=NOTE_POINTS, color=axes.QUIET)


def write_sheet(
    path: Path,
    rows: Sequence[Sequence[Picture | None]],
    colours: Mapping[str, int],
    title: str,
    note: str = "",
    width: float = 480,
    shared: Literal["none", "row"] = "none",
) -> None:
    """A row of pictures for each of ``rows``, of so many points each; None leaves a place empty.
    ``shared``: which charts have one axis of values."""
    columns = max(map(len, rows))
    sizes = [[axes.measure(each, width) for each in row if each is not None] for row in rows]
    widest = max(size[0] for row in sizes for size in row)
    heights = [max(size[1] for size in row) + 2 * axes.LINE for row in sizes]
    lines = 3 + len(note) * 4.1 / (columns * widest)
    with open_sheet(path, columns * widest, sum(heights) + lines * 1.5 * axes.LINE) as figure:
        add_texts(figure, title, note)
        places = figure.subplots(
            len(rows), columns, squeeze=False, height_ratios=heights, sharey=shared
        )
        drawn = []
        for row, pictures in zip(places, rows, strict=True):
            for axis, picture in zip(row, [*pictures, *[None] * columns], strict=False):
                if picture is None:
                    axis.axis("off")
                else:
                    axis.set_title(picture.title, loc="left", fontsize=axes.POINTS + 1.5)
                    drawn.append((axis, picture))
        _draw_all(figure, drawn, colours)


def _draw_all(
    figure: Figure, pictures: Sequence[tuple[Any, Picture]], colours: Mapping[str, int]
) -> None:
    if any(isinstance(picture, Bars) for _, picture in pictures):
        # Texts are broken by the width that the axes get.
        figure.draw_without_rendering()
    for axis, picture in pictures:
        axes.draw(axis, picture, colours)
    if any(isinstance(picture, Chart) for _, picture in pictures):
        figure.draw_without_rendering()
    for axis, picture in pictures:
        if isinstance(picture, Chart):
            axes.label_lines(axis, picture, colours)


def write_slide(path: Path, picture: Picture, colours: Mapping[str, int], title: str) -> None:
    """One picture on a sheet for a projector, with letters that the last row can read."""
    width, height = (72 * inches / ENLARGED for inches in SLIDE_INCHES)
    needed = axes.measure(picture, width)
    # What needs more room has smaller letters.
    scale = max(1.0, needed[0] / width, (needed[1] + 6 * axes.LINE) / height)
    dpi = round(SLIDE_DPI * ENLARGED / scale)
    with open_sheet(path, scale * width, scale * height, dpi=dpi) as figure:
        add_texts(figure, title, getattr(picture, "text", ""))
        _draw_all(figure, [(figure.subplots(), picture)], colours)


def draw_inline(picture: Picture, colours: Mapping[str, int]) -> str:
    """A picture as an element of a page, whose style has the colours."""
    width, height = axes.measure(picture, PAGE_WIDTH)
    with _open_figure(width, height, None) as figure:
        axis = figure.add_axes((0, 0, 1, 1))
        axes.draw(axis, picture, colours)
        _fit(axis)
        if isinstance(picture, Chart):
            axes.label_lines(axis, picture, colours)
            _make_room(axis, axis.texts)
        text = _save(figure, "svg", 72).decode()
    text = text[text.index("<svg") :]
    head, _, body = text.partition(">")
    frame = re.search(r'viewBox="[^"]*"', head)
    label = html.escape(". ".join(filter(None, [picture.title, getattr(picture, "text", "")])))
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;]*; ", "", body)
    body = re.sub(r'style="[^"]*"', _name_colours, body)
    # What is wider than a screen scrolls.
    least = f"min-width: {width / 12:.1f}rem; " * (width > PAGE_WIDTH)
    widest = width / (7.5 if width == PAGE_WIDTH else 10.5)
    role = f'role="img" aria-label="{label}" style="{least}max-width: {widest:.1f}rem"'
    return f"<svg {role} {frame[0] if frame else ''}>{body}"


def _fit(axis: Axes) -> None:
    """Make the axes as large as the figure lets all that is around them; matplotlib's own layout
    takes three times as long."""
    figure = axis.figure
    box = axis.get_tightbbox()
    assert box is not None
    room = figure.bbox
    left, bottom = max(0.0, -box.x0) + EDGE, max(0.0, -box.y0) + EDGE
    right, top = max(0.0, box.x1 - room.x1) + EDGE, max(0.0, box.y1 - room.y1) + EDGE
    axis.set_position((
        left / room.width, bottom / room.height, 1 - (left + right) / room.width,
        1 - (bottom + top) / room.height,
    ))  # fmt: skip


def _make_room(axis: Axes, texts: Sequence[Text]) -> None:
    """To the right of the axes, for texts that begin beside them."""
    widest = max((text.get_window_extent().width for text in texts), default=0.0)
    place, room = axis.get_position(), axis.figure.bbox.width
    width = (room - widest - EDGE) / room - place.x0
    axis.set_position((place.x0, place.y0, width / (axes.NAMES + 0.01), place.height))


def _name_colours(style: re.Match[str]) -> str:
    return re.sub(
        "#[0-9a-f]{6}",
        lambda colour: f"var({VARIABLES[colour[0]]})" if colour[0] in VARIABLES else colour[0],
        style[0],
    )


def _save(figure: Figure, kind: str, dpi: int) -> bytes:
    """The file. In an SVG the titles stand in the elements that they are said of."""
    file = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    if kind != "svg":
        return file.getvalue()
    text = file.getvalue().decode()
    for found, put in SHORTER.items():
        text = re.sub(found, put, text)
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', _round, text)
    return text.encode()


def _round(attribute: re.Match[str]) -> str:
    numbers = re.sub(r"(\.\d)\d+", r"\1", attribute[0])
    return re.sub(r" ?\n([LCQ]) ", r"\1", numbers)
