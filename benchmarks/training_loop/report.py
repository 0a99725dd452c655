"""The table, the picture and the targets of ``python -m benchmarks training-loop``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.options import format_rows
from benchmarks.common.plotting import COLOURS, draw_bar, finish_bars, open_figure
from benchmarks.common.records import Cell, Coordinate, make_cell
from benchmarks.common.statistics import spread, summarize
from benchmarks.common.targets import Target
from benchmarks.judge.promises import make_target
from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.training_loop.measurement import BARE, TRAINER, Group, Plan
from mpiddp.wording import count_noun

SPEED = 0.98
EXPLANATION = """\
Samples per second of all ranks: medians over rounds, each of them a whole training's median epoch.
Speed: the trainer's by the bare loop's, round by round. Batches are samples per rank."""


def compare(groups: Sequence[Group]) -> list[Ratio]:
    """Of each the trainer's samples per second by the bare loop's, round by round."""
    coefficient = find_common(group.rates for group in groups)
    return [compare_rounds(*group.rates, coefficient) for group in groups]


def format_table(groups: Sequence[Group]) -> str:
    rows = [["model", "ranks", "batch", TRAINER, BARE, "speed", "quartiles"]]
    for group, speed in zip(groups, compare(groups), strict=True):
        quarters = spread(speed.ratios.tolist())
        rates = (summarize(group.series[name].samples).median for name in (TRAINER, BARE))
        rows.append(
            [
                group.model,
                str(group.ranks),
                str(group.batch_size),
                *map(format_rate, rates),
                f"{speed.estimate:.3f}",
                f"{quarters.lower_quartile:.3f}–{quarters.upper_quartile:.3f}",
            ]
        )
    return "\n".join(format_rows(rows))


def format_rate(rate: float) -> str:
    """Four figures."""
    return f"{float(f'{rate:.4g}'):,.10g}"


def make_cells(group: Group, plan: Plan) -> Iterator[Cell]:
    at: dict[str, Coordinate] = {"model": group.model, "batch": group.batch_size}
    at["precision"] = plan.precision
    for name in ("channels_last", "compile"):
        if getattr(plan, name):
            at[name] = "on"
    for name, series in group.series.items():
        yield make_cell(
            series.samples, quantity="training loop", contender=name, ranks=group.ranks, at=at,
            unit="samples/s", details={"positions": series.positions, "warm_up": series.warm_up},
        )  # fmt: skip


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    title = "Samples per second: median, band of the quartiles, a point a training"
    with open_figure(path, 7.5, 1.1 * len(groups) + 1.2, title, note) as figure:
        axes = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
        for axis, group, ratio in zip(axes, groups, compare(groups), strict=True):
            for place, name in enumerate((TRAINER, BARE)):
                values = group.series[name].samples
                draw_bar(axis, place, values, COLOURS[place], format_rate(summarize(values).median))
            most = max(max(each.samples) for each in group.series.values())
            axis.set_xlim(0, 1.2 * most)
            where = f"{group.model}, {count_noun(group.ranks, 'rank')}"
            batch = f"batch {group.batch_size} per rank"
            speed = f"{ratio.estimate:.3f} × the bare loop"
            axis.set_title(f"{where}, {batch}: {speed}", loc="left", fontsize=10)
            axis.xaxis.set_major_formatter(lambda rate, _: f"{rate:,.10g}")
            finish_bars(axis, [f"python -m {TRAINER}", "a loop written by hand"])
        axes[-1].set_xlabel("samples per second of all ranks", fontsize=9)


def judge(groups: Sequence[Group]) -> list[Target]:
    return [
        make_target(
            f"the trainer's samples per second: at least {SPEED:g} × a bare loop's",
            {
                f"{each.model}, {count_noun(each.ranks, 'rank')}": ratio
                for each, ratio in zip(groups, compare(groups), strict=True)
            },
            at_least=SPEED,
        )
    ]
