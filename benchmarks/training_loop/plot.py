"""Draw the speed of both loops, a panel for each model and number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.plotting import COLOURS, finish_bars, open_figure, write_beside
from benchmarks.common.statistics import summarize
from benchmarks.training_loop.measurement import BARE, TRAINER, Group
from mpiddp.wording import count_noun


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    title = "Samples per second of the trainer and of a bare loop"
    with open_figure(path, 7.5, 1.1 * len(groups) + 1.2, title, note) as figure:
        axes = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
        for axis, group in zip(axes, groups, strict=True):
            for place, name in enumerate((TRAINER, BARE)):
                values = group.series[name].samples
                median = summarize(values).median
                axis.barh(place, median, height=0.6, color=COLOURS[place], alpha=0.6)
                axis.plot(values, [place] * len(values), "o", ms=3, color="#333333")
                write_beside(axis, f"{median:,.4g}", max(median, *values), place)
            most = max(max(each.samples) for each in group.series.values())
            axis.set_xlim(0, 1.2 * most)
            where = f"{group.model}, {count_noun(group.ranks, 'rank')}"
            batch = f"batch {group.batch_size} per rank"
            speed = f"{group.speed.median:.3f} × the bare loop"
            axis.set_title(f"{where}, {batch}: {speed}", loc="left", fontsize=10)
            finish_bars(axis, [TRAINER, BARE])
