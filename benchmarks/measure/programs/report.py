"""The table, the record, the picture and the targets of ``python -m benchmarks programs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.programs.measurement import GLOO, OWN, PROGRAMS, Group
from benchmarks.records.options import describe_interval, describe_seconds, format_rows
from benchmarks.records.schema import Cell, Coordinate, RecordWriter
from benchmarks.records.statistics import quantile, spread, summarize
from benchmarks.show.plotting import COLOURS, finish_bars, open_figure, write_beside
from mpiddp.wording import count_noun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUANTITY = "program"
EXPLANATION = """\
Times of a token, a step or a call of the slowest rank: medians over rounds. × Gloo: how many times
faster it is over mpiddp, round by round, and the 95 % interval of that (–: too few
rounds). Digits: whether every bit of the results is the same over both; else they differ by
rounding."""
HEADS = ("", "ranks", "of a", "Gloo", "mpiddp", "× Gloo", "95 %", "digits")


def describe_programs() -> str:
    return "; ".join(
        f"{name}: {each.title}" if each.title != name else name for name, each in PROGRAMS.items()
    )


def compare(groups: Sequence[Group]) -> dict[tuple[str, int], Ratio]:
    """By program and ranks: how many times faster it is over mpiddp, if it was timed over both."""
    rows = [group for group in groups if len(group.series) == 2]
    pairs = [(group.find_times(OWN), group.find_times(GLOO)) for group in rows]
    coefficient = find_common(pairs)
    return {
        (group.program, group.ranks): compare_rounds(*pair, coefficient)
        for group, pair in zip(rows, pairs, strict=True)
    }


def format_table(groups: Sequence[Group]) -> str:
    speeds = compare(groups)
    lines = format_rows([HEADS, *(_format_row(group, speeds) for group in groups if group.series)])
    for group in groups:
        # Mostly one reason for both.
        for why in dict.fromkeys(group.refusals.values()):
            lines.append(f"left out: {group.program} on {count_noun(group.ranks, 'rank')}: {why}")
    lines += [f"wrong: {text}" for text in list_wrong(groups)]
    shares = [each.others_share for each in groups if each.others_share is not None]
    if shares:
        lines.append(f"other programs took up to {max(shares):.0%} of the cores meanwhile")
    return "\n".join(lines) if groups else ""


def _format_row(group: Group, speeds: Mapping[tuple[str, int], Ratio]) -> list[str]:
    speed = speeds.get((group.program, group.ranks))
    times = (group.find_times(each) for each in (GLOO, OWN))
    return [
        group.program,
        str(group.ranks),
        PROGRAMS[group.program].step,
        *(describe_seconds(quantile(each, 0.5)) if each else "–" for each in times),
        f"{speed.estimate:.2f}" if speed is not None else "–",
        describe_interval(speed.interval, "{:.2f}".format) if speed is not None else "–",
        "the same" if group.has_equal_digits else "rounded" if speed is not None else "–",
    ]


def list_wrong(groups: Sequence[Group]) -> list[str]:
    return [
        f"{group.program} over {contender.name} on {count_noun(group.ranks, 'rank')}: {why}"
        for group in groups
        for contender, why in group.wrong.items()
    ]


def record_group(record: RecordWriter, group: Group) -> None:
    at: dict[str, Coordinate] = {"program": group.program}
    for contender, series in group.series.items():
        ranks = zip(*(visit.by_rank for visit in series.samples), strict=True)
        details = {
            "steps": [visit.steps for visit in series.samples],
            "positions": series.positions,
            "digits": "the same" if group.has_equal_digits else "rounded",
        }
        times = group.find_times(contender)
        cell = Cell(
            quantity=QUANTITY, contender=contender.name, ranks=group.ranks, at=at,
            samples=tuple(times), summary=summarize(times),
            by_rank=tuple(map(summarize, ranks)), details=details,
        )  # fmt: skip
        record.add(cell)
    for contender, why in group.refusals.items():
        record.refuse(QUANTITY, contender.name, why, ranks=group.ranks, **at)
    for contender, why in group.wrong.items():
        record.fail(QUANTITY, contender.name, why, ranks=group.ranks, **at)
    record.write("group", ranks=group.ranks, **at, others_share=group.others_share)


def judge(groups: Sequence[Group]) -> list[Target]:
    """The promises that these groups say something about."""
    found: dict[str, dict[str, Ratio]] = {}
    for (name, ranks), speed in compare(groups).items():
        found.setdefault(name, {})[count_noun(ranks, "rank")] = speed
    return [
        Target(f"{name}: at least {least:g} × Gloo's {kind.step}s", found[name], least)
        for name, kind in PROGRAMS.items()
        if (least := kind.promise) is not None and name in found
    ]


def draw(path: Path, groups: Sequence[Group], note: str) -> None:
    """A panel for each number of ranks, with a row for each program; time is logarithmic."""
    shown, speeds = [group for group in groups if group.series], compare(groups)
    columns = list(dict.fromkeys(group.ranks for group in shown))
    rows = [name for name in PROGRAMS if any(group.program == name for group in shown)]
    title = (
        "Programs of torch.distributed over Gloo and over mpiddp: median of the rounds, band of "
        "their quartiles; ×: how many times as fast over mpiddp"
    )
    height = 0.36 * len(rows) + 1.6
    with open_figure(path, 4.0 * len(columns) + 3.2, height, title, note) as figure:
        axes = figure.subplots(1, len(columns), squeeze=False, sharex=True, sharey=True)[0]
        for axis, ranks in zip(axes, columns, strict=True):
            axis.set_xscale("log")
            for group in shown:
                if group.ranks == ranks:
                    speed = speeds.get((group.program, ranks))
                    _draw_row(axis, rows.index(group.program), group, speed)
            axis.set_title(count_noun(ranks, "rank"), loc="left", fontsize=10)
            axis.xaxis.set_major_formatter(lambda seconds, _: describe_seconds(seconds))
            axis.margins(x=0.18)
            axis.tick_params(axis="x", labelsize=8)
            axis.set_xlabel("time of a token, a step or a call", fontsize=9)
        finish_bars(axes[0], [PROGRAMS[name].title for name in rows])
        for axis in axes[1:]:
            axis.grid(axis="x", color="#dddddd", linewidth=0.6)
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.tick_params(axis="y", length=0)
        axes[0].legend(loc="lower right", fontsize=8, frameon=False)


def _draw_row(axis: Axes, place: int, group: Group, speed: Ratio | None) -> None:
    known = {each: spread(group.find_times(each)) for each in (GLOO, OWN) if each in group.series}
    ends = [each.median for each in known.values()]
    axis.hlines(place, min(ends), max(ends), color="#bbbbbb", linewidth=1.4, zorder=1)
    for contender, found in known.items():
        colour = COLOURS[0] if contender == OWN else COLOURS[1]
        name = "mpiddp" if contender == OWN else "Gloo"
        labelled = name in axis.get_legend_handles_labels()[1]
        axis.hlines(
            place, found.lower_quartile, found.upper_quartile, color=colour, linewidth=6, alpha=0.3
        )
        axis.plot(
            found.median, place, color=colour, marker="o" if contender == OWN else "s",
            linestyle="", ms=6, label=None if labelled else name,
        )  # fmt: skip
    if speed is not None:
        end = max(each.upper_quartile for each in known.values())
        write_beside(axis, f"{speed.estimate:.1f} ×", end, place)
