"""Draw samples: one row per contender with every sample, the median and its interval."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import summarize
from mpiddp.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png", ".pdf")
ROW_INCHES = 0.42
BLUE, ORANGE, GREY = "#1f77b4", "#d95f02", "#7f7f7f"
"""Told apart by colour-blind eyes, too."""


@dataclass(frozen=True)
class Row:
    """One contender."""

    name: str
    values: tuple[float, ...]
    colour: str = BLUE


@dataclass(frozen=True)
class Panel:
    """Contenders that were measured together."""

    title: str
    rows: tuple[Row, ...]


def check_drawable(path: Path) -> None:
    """Raise ConfigurationError if ``path`` is of no known form, or matplotlib is missing."""
    if path.suffix not in SUFFIXES:
        raise ConfigurationError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "drawing needs matplotlib, which is not installed: pip install 'mpiddp[plot]'"
        )


def draw(path: Path, panels: Sequence[Panel], *, title: str, unit: str, note: str = "") -> None:
    """Draw the panels one below the other, all on one scale that begins at 0."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [len(panel.rows) for panel in panels]
    figure = Figure(
        figsize=(9, ROW_INCHES * (sum(rows) + 2 * len(panels)) + 0.9), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": rows}
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _draw_panel(axis, panel)
    axes[-1, 0].set_xlabel(unit)
    axes[-1, 0].set_xlim(0, 1.1 * max(max(row.values) for panel in panels for row in panel.rows))
    figure.suptitle(title, fontsize=12)
    if note:
        figure.supxlabel(note, fontsize=7, color="#555555")
    figure.savefig(path, dpi=150)


def _draw_panel(axis: Axes, panel: Panel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=10)
    for place, row in enumerate(panel.rows):
        summary, colour = summarize(row.values), row.colour
        axis.barh(place, summary.median, height=0.62, color=colour, alpha=0.25)
        # Spread over the bar's height, in order of rounds: a drift shows as a slope.
        steps = max(1, len(row.values) - 1)
        heights = [place - 0.22 + 0.44 * index / steps for index in range(len(row.values))]
        axis.scatter(row.values, heights, s=12, color=colour, linewidths=0, zorder=3)
        axis.vlines(summary.median, place - 0.31, place + 0.31, color=colour, linewidth=2, zorder=4)
        if summary.interval is not None:
            ends = (summary.interval.low, summary.interval.high)
            axis.hlines(place, *ends, color="black", linewidth=1, zorder=5)
        axis.annotate(
            f"{summary.median:.2f}",
            (max(row.values), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(range(len(panel.rows)), [row.name for row in panel.rows], fontsize=9)
    axis.invert_yaxis()
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
