"""Draw samples: one row per contender with every sample, the median and its interval."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.statistics import summarize
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


@dataclass(frozen=True)
class Stack:
    """A bar of parts."""

    name: str
    parts: Mapping[str, float]
    """In the order in which they are laid end to end."""
    values: tuple[float, ...]
    """Samples of their sum."""


@dataclass(frozen=True)
class StackPanel:
    """Bars with the same parts, on a scale of their own."""

    title: str
    stacks: tuple[Stack, ...]
    unit: str


def check_drawable(path: Path) -> None:
    """Raise ConfigurationError if ``path`` is of no known form, or matplotlib is missing."""
    if path.suffix not in SUFFIXES:
        raise ConfigurationError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "drawing needs matplotlib, which is not installed: pip install 'mpiddp[plot]'"
        )


def draw(
    path: Path,
    panels: Sequence[Panel],
    stacks: StackPanel | None = None,
    *,
    title: str,
    unit: str,
    note: str = "",
) -> None:
    """Draw the panels one below the other, all on one scale that begins at 0; ``stacks`` last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [len(panel.rows) for panel in panels]
    heights = rows + ([len(stacks.stacks) + 1] if stacks is not None else [])
    figure = Figure(
        figsize=(9, ROW_INCHES * (sum(heights) + 2 * len(heights)) + 0.9), layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    axes = list(grid[:, 0])
    longest = max(max(row.values) for panel in panels for row in panel.rows)
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, panel)
        axis.set_xlim(0, 1.1 * longest)
        axis.tick_params(axis="x", labelbottom=panel is panels[-1])
    axes[len(panels) - 1].set_xlabel(unit)
    if stacks is not None:
        _draw_stacks(axes[-1], stacks)
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
    _finish(axis, [row.name for row in panel.rows])


def _draw_stacks(axis: Axes, panel: StackPanel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=10)
    colours = (BLUE, ORANGE, GREY)
    for place, stack in enumerate(panel.stacks):
        begin = 0.0
        for colour, (name, length) in zip(colours, stack.parts.items(), strict=False):
            label = name if place == 0 else None
            axis.barh(place, length, left=begin, height=0.62, color=colour, alpha=0.45, label=label)
            begin += length
        axis.scatter(stack.values, [place] * len(stack.values), s=12, color="black", linewidths=0)
        median = summarize(stack.values).median
        axis.vlines(median, place - 0.31, place + 0.31, color="black", linewidth=2)
        axis.annotate(
            f"{median:.0f}",
            (max(begin, *stack.values), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_xlim(0, 1.1 * max(max(stack.values) for stack in panel.stacks))
    axis.set_xlabel(panel.unit)
    _finish(axis, [stack.name for stack in panel.stacks])
    axis.legend(loc="best", fontsize=8, frameon=False)


def _finish(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
