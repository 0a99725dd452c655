"""Draw how accuracy grows with time while a worker is slow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.palette import COLOURS
from benchmarks.common.statistics import Series
from benchmarks.stragglers.runs import Cell, Outcome
from mpiddp.training.straggler import describe_straggler, parse_straggler

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(path: Path, found: Mapping[Cell, Series[Outcome]], accuracy: float, note: str) -> None:
    """One panel for each straggler; one line for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stragglers = list(dict.fromkeys(cell.straggler for cell in found))
    figure = Figure(figsize=(5.6 * len(stragglers), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(stragglers), squeeze=False, sharey=True)[0]
    for axis, straggler in zip(axes, stragglers, strict=True):
        cells = {cell: series for cell, series in found.items() if cell.straggler == straggler}
        _draw_panel(axis, cells, accuracy)
        title = describe_straggler(parse_straggler(straggler)).removeprefix("Straggler: ")
        axis.set_title(title, loc="left", fontsize=10)
    axes[0].set_ylabel("test accuracy")
    figure.suptitle("Accuracy against time while a worker is slow", fontsize=12)
    figure.supxlabel(note, fontsize=7, color="#555555")
    figure.savefig(path, dpi=150)


def _draw_panel(axis: Axes, cells: Mapping[Cell, Series[Outcome]], accuracy: float) -> None:
    axis.axhline(accuracy, color="#888888", lw=1, ls=":")
    for colour, (cell, series) in zip(itertools.cycle(COLOURS), cells.items(), strict=False):
        for number, outcome in enumerate(series.samples):
            axis.plot(
                [point.seconds for point in outcome.points],
                [point.accuracy for point in outcome.points],
                color=colour,
                lw=1.4,
                marker="o",
                ms=2.5,
                label=cell.way if number == 0 else None,
            )
    axis.set_xlabel("seconds of training, evaluations left out", fontsize=9)
    axis.set_xlim(left=0)
    axis.set_ylim(max(0.0, accuracy - 0.25), 1)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.grid(color="#eeeeee", lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
