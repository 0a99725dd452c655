"""Draw how accuracy grows with time while a worker is slow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.plotting import (
    Line,
    choose_names,
    draw_line,
    finish_lines,
    label_lines,
    list_scores,
    note_left_out,
    open_figure,
)
from benchmarks.common.statistics import Series, summarize
from benchmarks.stragglers.measurement import Contender, TrainingRun, find_median
from mpiddp.training.options.groups.straggler import describe_straggler, parse_straggler

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(
    path: Path, found: Mapping[Contender, Series[TrainingRun]], accuracy: float, note: str
) -> None:
    """A panel for each straggler. A band of runs ends with the first run that does."""
    stragglers = list(dict.fromkeys(contender.straggler for contender in found))
    medians = {
        (row.way, row.straggler): find_median(series, accuracy) for row, series in found.items()
    }
    ways, left_out = choose_names(list_scores(medians), [Contender("", None).way])
    title = "Accuracy against time while a worker is slow: median, band of the quartiles"
    note = note_left_out(left_out, "way", note)
    with open_figure(path, 7 * len(stragglers), 4.4, title, note) as figure:
        axes = figure.subplots(1, len(stragglers), squeeze=False, sharey=True)[0]
        panels: dict[Axes, list[Line]] = {}
        for axis, straggler in zip(axes, stragglers, strict=True):
            panels[axis] = [
                make_line(_describe(row), series.samples, ways.index(row.way))
                for row, series in found.items()
                if row.straggler == straggler and row.way in ways
            ]
            _draw_panel(axis, panels[axis], accuracy)
            name = describe_straggler(parse_straggler(straggler)).removeprefix("Straggler: ")
            axis.set_title(name, loc="left", fontsize=10)
        axes[0].set_ylabel("test accuracy")
        label_lines(figure, panels)


def _describe(row: Contender) -> str:
    """What a reader calls it."""
    if row.staleness is None:
        return f"all-reduce of {row.way}" if row.average_every else "all-reduce of gradients"
    return f"parameter {row.way}"


def make_line(name: str, runs: Sequence[TrainingRun], style: int) -> Line:
    """Accuracies at the times at which any run was evaluated, between those of each run."""
    begin = max(run.points[0].seconds for run in runs)
    end = min(run.points[-1].seconds for run in runs)
    times = sorted({point.seconds for run in runs for point in run.points})
    times = [time for time in times if begin <= time <= end]
    return Line(name, times, [summarize([_look_up(run, t) for run in runs]) for t in times], style)


def _look_up(run: TrainingRun, seconds: float) -> float:
    for before, after in itertools.pairwise(run.points):
        if seconds <= after.seconds:
            share = (seconds - before.seconds) / (after.seconds - before.seconds)
            return before.accuracy + share * (after.accuracy - before.accuracy)
    return run.points[-1].accuracy


def _draw_panel(axis: Axes, lines: Sequence[Line], accuracy: float) -> None:
    axis.axhline(accuracy, color="#888888", lw=1, ls=":")
    axis.annotate("to be reached", (0, accuracy), (4, 3), textcoords="offset points", fontsize=7)
    for line in lines:
        draw_line(axis, line)
    axis.set_xlabel("seconds of training, evaluations left out", fontsize=9)
    axis.set_xlim(left=0)
    axis.set_ylim(max(0.0, accuracy - 0.25), 1.01)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    finish_lines(axis)
