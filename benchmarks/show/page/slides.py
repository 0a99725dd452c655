"""Each picture as a PNG for slides: 13.3 by 7.5 inches, with letters that the last row can read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.show.axes import COLOURS
from benchmarks.show.charts import Picture, Section, choose_colours
from benchmarks.show.progress import show_progress
from benchmarks.show.sheets import write_slide

WIDTH, HEIGHT, DPI = 13.33, 7.5, 150
ENLARGED = 2.2
"""How many times larger letters and lines are than on paper."""


def write_slides(folder: Path, sections: Sequence[Section]) -> int:
    """Write all pictures into a directory that exists; returns how many. Raises OSError."""
    colours = choose_colours(sections, len(COLOURS))
    slides = list(_list_slides(sections))
    size = 72 * WIDTH / ENLARGED, 72 * HEIGHT / ENLARGED
    with show_progress(len(slides), "slide") as bar:
        for number, (section, title, picture) in enumerate(slides, start=1):
            name = re.sub(r"[^a-z0-9]+", "-", f"{section.name} {title}".lower()).strip("-")[:80]
            path = folder / f"{number:03}-{name}.png"
            heading = f"{section.heading}: {title}"
            write_slide(path, picture, colours, heading, size, round(DPI * ENLARGED))
            bar.update()
    return len(slides)


def _list_slides(sections: Sequence[Section]) -> Iterator[tuple[Section, str, Picture]]:
    for section in sections:
        for picture in section.pictures:
            yield section, picture.title, picture
        for panel in section.panels:
            for chart in panel.drawn:
                yield section, f"{chart.title}, {panel.name}", chart
