"""Draw what a checkpoint takes, a bar for each way and a point for each round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpoint.measurement import Measurement, Plan
from benchmarks.checkpoint.report import format_seconds
from benchmarks.common.plotting import COLOURS, finish_bars, open_figure, write_beside

NAMES = {
    "synchronous": "synchronous save",
    "asynchronous": "asynchronous save",
    "raw": "raw write and flush",
    "digest": "XXH3 alone",
}


def draw(path: Path, measured: Sequence[Measurement], plan: Plan, note: str) -> None:
    """A panel for each number of ranks."""
    title = "Seconds that training waits for a checkpoint, and the raw write of its bytes"
    with open_figure(path, 6.4 * len(measured), 3.0, title, note) as figure:
        axes = figure.subplots(1, len(measured), squeeze=False)[0]
        for axis, found in zip(axes, measured, strict=True):
            for place, name in enumerate(NAMES):
                median = found.summarize(name).median
                values = [getattr(each, name) for each in found.rounds]
                axis.barh(place, median, height=0.6, color=COLOURS[place], alpha=0.6)
                axis.plot(values, [place] * len(values), "o", ms=3, color="#333333")
                share = f"{found.find_share(name, plan.save_every):.2%}"
                text = f"{format_seconds(median)}, {share} of {plan.save_every} steps"
                write_beside(axis, text, max(median, *values), place)
            most = max(max(getattr(each, name) for each in found.rounds) for name in NAMES)
            axis.set_xlim(0, 1.8 * most)
            axis.set_xlabel("seconds", fontsize=8)
            axis.set_title(f"{found.ranks} ranks ({found.device})", loc="left", fontsize=10)
            finish_bars(axis, list(NAMES.values()))
