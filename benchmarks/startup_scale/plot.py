"""Draw what rank 0 does in start-up by number of ranks: measured points, models beyond them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.plotting import COLOURS, finish_lines, open_figure
from benchmarks.startup_scale.measurement import Plan, Starts
from benchmarks.startup_scale.report import (
    OWNERS,
    PREDICTED,
    Models,
    name_place,
    show_value,
    sum_by_owner,
)
from benchmarks.startup_scale.stages import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(path: Path, starts: Sequence[Starts], models: Models, plan: Plan, note: str) -> None:
    """A panel for each quantity, a line for each owner of stages."""
    title = f"Start-up on rank 0: counted, and predicted for {name_place(plan.predicted)}"
    with open_figure(path, 11, 7.5, title, note) as figure:
        grid = figure.subplots(2, 2, squeeze=False)
        for axis, quantity in zip(grid.flat, PREDICTED, strict=True):
            _draw_panel(axis, quantity, starts, models, plan)


def _draw_panel(
    axis: Axes, quantity: str, starts: Sequence[Starts], models: Models, plan: Plan
) -> None:
    axis.set_title(f"{quantity} of rank 0", loc="left", fontsize=10)
    ranks = sorted({*(2**power for power in range(1, plan.predict.bit_length())), plan.predict})
    ends: dict[int, float] = {}
    for place, owner in enumerate(OWNERS):
        values = [
            sum_by_owner(models, quantity, (each, -(-each // plan.ranks_per_node)))[owner]
            for each in ranks
        ]
        if not any(values):
            continue
        axis.plot(ranks, values, color=COLOURS[place], lw=1.5)
        points = [
            sum(
                each.find(stage.name, quantity)
                for stage in STAGES
                if stage.owner == owner and (stage.name, quantity) in models
            )
            for each in starts
        ]
        axis.scatter(
            [each.place[0] for each in starts], points, s=14, color=COLOURS[place], zorder=3
        )
        ends[place] = values[-1]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [each for each in ranks if each in (2, 16, 128, 1024, 8192) or each == plan.predict]
    axis.set_xticks(ticks, [f"{each:,}" for each in ticks], fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_xlabel("ranks", fontsize=8)
    axis.set_xlim(ranks[0], ranks[-1] * 16)
    finish_lines(axis)
    _label_ends(axis, quantity, ranks[-1], ends)


def _label_ends(axis: Axes, quantity: str, x: int, ends: Mapping[int, float]) -> None:
    """Whose line it is and where it ends, none above another; keys are places in OWNERS."""
    low, high = axis.get_ylim()
    gap, free = (high / low) ** 0.06, 0.0
    for place, value in sorted(ends.items(), key=lambda item: item[1]):
        height = max(value, free)
        free = height * gap
        axis.annotate(
            f"{OWNERS[place]} {show_value(value, quantity)}", (x, height), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8, color=COLOURS[place],
        )  # fmt: skip
