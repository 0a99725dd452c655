"""Draw how accuracy grows with time while a worker is slow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure.stragglers.measurement import Contender, TrainingRun, find_median
from benchmarks.records.statistics import Series, summarize
from benchmarks.show.plotting import Line, LinePanel, choose_lines, draw_panels
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
    ways, note = choose_lines(medians, [Contender("", None).way], "way", note)
    title = "Accuracy against time while a worker is slow: median, band of the quartiles"
    panels = [
        LinePanel(
            title=describe_straggler(parse_straggler(straggler)).removeprefix("Straggler: "),
            lines=[
                make_line(_describe(row), series.samples, ways.index(row.way))
                for row, series in found.items()
                if row.straggler == straggler and row.way in ways
            ],
            label="seconds of training, evaluations left out",
            describe=lambda share: f"{share:.0%}",
            base=None,
            mark=accuracy,
            finish=partial(_finish, accuracy=accuracy),
        )
        for straggler in stragglers
    ]
    draw_panels(path, [panels], (7 * len(panels), 4.4), title, note, shared="row")


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


def _finish(axis: Axes, accuracy: float) -> None:
    axis.annotate("to be reached", (0, accuracy), (4, 3), textcoords="offset points", fontsize=7)
    axis.set_ylabel("test accuracy")
    axis.label_outer()
    axis.set_xlim(left=0)
    axis.set_ylim(max(0.0, accuracy - 0.25), 1.01)
