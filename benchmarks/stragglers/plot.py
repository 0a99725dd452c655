"""Draw how accuracy grows with time while a worker is slow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.plotting import COLOURS, finish_lines, open_figure
from benchmarks.common.statistics import Series
from benchmarks.stragglers.measurement import Contender, TrainingRun
from mpiddp.training.options.groups.straggler import describe_straggler, parse_straggler

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(
    path: Path, found: Mapping[Contender, Series[TrainingRun]], accuracy: float, note: str
) -> None:
    stragglers = list(dict.fromkeys(contender.straggler for contender in found))
    title = "Accuracy against time while a worker is slow"
    with open_figure(path, 5.6 * len(stragglers), 4.2, title, note) as figure:
        axes = figure.subplots(1, len(stragglers), squeeze=False, sharey=True)[0]
        for axis, straggler in zip(axes, stragglers, strict=True):
            rows = {row: series for row, series in found.items() if row.straggler == straggler}
            _draw_panel(axis, rows, accuracy)
            name = describe_straggler(parse_straggler(straggler)).removeprefix("Straggler: ")
            axis.set_title(name, loc="left", fontsize=10)
        axes[0].set_ylabel("test accuracy")


def _draw_panel(axis: Axes, rows: Mapping[Contender, Series[TrainingRun]], accuracy: float) -> None:
    axis.axhline(accuracy, color="#888888", lw=1, ls=":")
    for colour, (row, series) in zip(itertools.cycle(COLOURS), rows.items(), strict=False):
        for number, run in enumerate(series.samples):
            axis.plot(
                [point.seconds for point in run.points],
                [point.accuracy for point in run.points],
                color=colour,
                lw=1.4,
                marker="o",
                ms=2.5,
                label=row.way if number == 0 else None,
            )
    axis.set_xlabel("seconds of training, evaluations left out", fontsize=9)
    axis.set_xlim(left=0)
    axis.set_ylim(max(0.0, accuracy - 0.25), 1)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    finish_lines(axis)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
