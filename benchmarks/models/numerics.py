"""``python -m benchmarks numerics``: how exact each algorithm's order of summation is.

`summation` says how it is measured, and what the columns depth and growth mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from tqdm import tqdm

from benchmarks.common import results
from benchmarks.common.checks import check_outputs
from benchmarks.common.options import (
    Algorithms,
    Count,
    CountOrZero,
    File,
    Load,
    SeveralRanks,
    describe_algorithms,
    list_algorithms,
    make_reader,
)
from benchmarks.common.plotting import COLOURS, finish_lines, open_figure
from benchmarks.common.trials import show_progress
from benchmarks.models.summation import (
    DTYPES,
    ROUNDING,
    Accumulation,
    Error,
    SummationOrder,
    describe_order,
    draw_inputs,
    list_accumulations,
    measure,
)
from mpiddp.errors import ScheduleError
from mpiddp.options.checks import positive
from mpiddp.options.fields import Argument, pick
from mpiddp.schedules.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Types = Annotated[tuple[str, ...], Argument(choices=tuple(DTYPES), flag="--dtype")]
RANKS = (8, 64, 256)
ELEMENTS = 8192
"""32 of them in each chunk at 256 ranks; they give an RMS error to within one percent or so."""

GENERATOR = "numpy.random.default_rng (PCG64), standard normal in float64, a row per rank"

Kind = tuple[str, Accumulation]
"""A type and a way of adding: a column of the tables, a panel of the plot."""

EPSILONS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number of the type."""

SHORT = {
    Accumulation.NATIVE: "native",
    Accumulation.STEP: "in step",
    Accumulation.THROUGHOUT: "through",
}

MEANINGS = {
    Accumulation.NATIVE: "native: each addition is rounded to the type",
    Accumulation.STEP: "in step: a rank adds in float32 what it has of one step, then rounds; "
    "it sends as many bytes",
    Accumulation.THROUGHOUT: "through: partial sums are kept and sent as float32, twice the "
    "bytes, and rounded once",
}

ERRORS = {
    "rms": "RMS error relative to the RMS of the sum",
    "largest": "worst element's error relative to the RMS of the sum",
}

ALIKE = 0.08
"""Errors that differ by less, relatively, would look the same in the plot."""

MARKERS = "os^DvPXh"
"""One more than colours, so that lines of one colour differ."""
MARKER = 6.0
STRIPE = 2.5
"""Length, in line widths."""

ONE_ROUNDING: dict[str, Any] = {"color": "#777777", "linewidth": 1, "linestyle": ":", "zorder": 0}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is summed."""

    algorithms: Algorithms = ()
    """(default: all)"""
    load: Load = ()
    """Algorithms of your own: Python files or plans."""
    ranks: SeveralRanks = RANKS
    """Numbers of ranks."""
    dtypes: Types = tuple(DTYPES)
    """Types of the elements."""
    elements: Count = ELEMENTS
    """Of each rank's buffer."""
    scale: Annotated[float, Argument("X", positive("a number"))] = 1.0
    """Standard deviation of the inputs."""
    seed: CountOrZero = 0
    """Of the inputs."""
    error: Literal["rms", "largest"] = "rms"
    """The error to print and draw: RMS, or the worst element's."""
    json: File = None
    """Write all results and the environment."""
    plot: File = None
    """Draw error against ranks (.svg, .png or .pdf)."""


@dataclass(frozen=True)
class Row:
    ranks: int
    algorithm: str
    inputs: int
    """How many of the ranks contribute."""
    order: SummationOrder
    errors: Mapping[Kind, Error]


READER = make_reader(
    command="numerics",
    description="Sum normal values in each algorithm's order, adding in the type itself and in "
    "float32, and compare with float64. Needs neither MPI nor a GPU.",
    groups={"options": Options},
    epilog=describe_algorithms("ring:segments=4"),
)


def parse(arguments: Sequence[str]) -> Options:
    options = pick(Options, READER.read(arguments))
    algorithms = options.algorithms or list_algorithms()
    return replace(options, algorithms=algorithms, ranks=tuple(sorted(options.ranks)))


def measure_all(options: Options) -> list[Row]:
    """One row for each number of ranks and algorithm, in this order.

    Raises ConfigurationError for an algorithm that cannot be with so few ranks, before anything
    is measured; ScheduleError where ranks end with different bits.
    """
    schedules = [
        (str(choice), choice.build(ranks))
        for ranks in options.ranks
        for choice in options.algorithms
    ]
    with show_progress(len(schedules), "order") as bar:
        return [_measure_row(name, schedule, options, bar) for name, schedule in schedules]


def _measure_row(name: str, schedule: Schedule, options: Options, bar: tqdm[NoReturn]) -> Row:
    import torch

    bar.set_description(f"{name}, {schedule.ranks} ranks")
    drawn = draw_inputs(schedule.ranks, options.elements, options.seed, options.scale)
    errors = {}
    for dtype in options.dtypes:
        inputs = drawn.to(getattr(torch, dtype))
        for accumulation in list_accumulations(dtype):
            try:
                errors[dtype, accumulation] = measure(schedule, inputs, accumulation)
            except ScheduleError as error:
                raise ScheduleError(f"{name}, {dtype}, {accumulation.value}: {error}") from None
    bar.update()
    return Row(schedule.ranks, name, len(schedule.members), describe_order(schedule), errors)


def describe_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For the record. What is not finite is null: JSON has no name for it."""
    return [
        {
            "ranks": row.ranks,
            "algorithm": row.algorithm,
            "inputs_summed": row.inputs,
            "depth": row.order.depth,
            "errors": [
                {
                    "dtype": dtype,
                    "accumulation": accumulation.value,
                    "growth": row.order.expect(accumulation),
                    "rms": _finite(error.rms),
                    "largest": _finite(error.largest),
                }
                for (dtype, accumulation), error in row.errors.items()
            ],
        }
        for row in rows
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def describe_inputs(options: Options) -> str:
    return (
        f"inputs: normal, standard deviation {options.scale:g}, seed {options.seed}, "
        f"{options.elements} elements of each rank"
    )


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    check_outputs(options.json, plot=options.plot)
    rows = measure_all(options)
    print(describe_inputs(options) + "\n")
    print(report(rows, options.error))
    if options.json is not None:
        results.write_record(
            options.json,
            "numerics",
            {
                "environment": results.describe_environment(None),
                "generator": GENERATOR,
                "seed": options.seed,
                "elements": options.elements,
                "scale": options.scale,
                "results": describe_rows(rows),
            },
        )
    if options.plot is not None:
        draw(options.plot, rows, options.error, describe_inputs(options))


def list_dtypes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(dtype for dtype, _ in rows[0].errors))


# ---- tables -------------------------------------------------------------------------------


def report(rows: Sequence[Row], error: str) -> str:
    """All tables, and what their columns mean; ``error`` is ``rms`` or ``largest``."""
    groups = itertools.groupby(rows, key=lambda row: row.ranks)
    tables = [format_table(list(group), error) for _, group in groups]
    return "\n\n".join([*tables, explain(rows, error)])


def format_table(rows: Sequence[Row], error: str) -> str:
    kinds = list(rows[0].errors)
    width = max(len("algorithm"), *(len(row.algorithm) for row in rows))
    left = f"{'algorithm':{width}}  depth  native  in step"
    groups = [dtype.center(10 * len(list_accumulations(dtype)) - 2) for dtype in list_dtypes(rows)]
    heads = [f"{SHORT[accumulation]:>8}" for _, accumulation in kinds]
    lines = [
        f"{f'{rows[0].ranks} ranks':{width + 7}}  {'growth':^15}  {'  '.join(groups)}",
        f"{left}  {'  '.join(heads)}",
    ]
    for row in rows:
        order = row.order
        cells = [f"{format_error(getattr(row.errors[kind], error)):>8}" for kind in kinds]
        lines.append(
            f"{row.algorithm:{width}}  {order.depth:5}  {order.growth:6.1f}  "
            f"{order.growth_by_step:7.1f}  {'  '.join(cells)}"
        )
    return "\n".join(line.rstrip() for line in lines)


def format_error(value: float) -> str:
    return f"{value:.1e}"


def explain(rows: Sequence[Row], error: str) -> str:
    roundings = ", ".join(
        f"{ROUNDING * EPSILONS[dtype]:.1e} in {dtype}" for dtype in list_dtypes(rows)
    )
    used = dict.fromkeys(accumulation for _, accumulation in rows[0].errors)
    lines = [
        f"errors: {ERRORS[error]}; the sum is float64's, of the inputs as rounded",
        *(MEANINGS[accumulation] for accumulation in used),
        "depth: longest chain of additions; to first order no error exceeds depth · u · Σ|x|",
        "growth: the RMS error to expect, in units of one rounding's, which is about",
        f"  {roundings}",
        "all ranks ended with the same bits",
    ]
    values = [getattr(each, error) for row in rows for each in row.errors.values()]
    if not all(map(math.isfinite, values)):
        lines.append(
            "inf, nan: inputs or sums left their type's range (float16 ends at 65504), or all are 0"
        )
    return "\n".join(lines)


# ---- plot ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    names: Sequence[str]
    colour: str
    marker: str


Series = dict[str, list[float]]
"""The values of each name, in the same order."""


def collect(rows: Sequence[Row], kinds: Sequence[Kind], error: str) -> Series:
    values: Series = {}
    for row in rows:
        values.setdefault(row.algorithm, []).extend(
            getattr(row.errors[kind], error) for kind in kinds
        )
    return values


def group_alike(series: Series) -> list[list[str]]:
    """The names in groups: each value differs by less than ALIKE from that of the group's first."""
    groups: list[list[str]] = []
    for name in series:
        for group in groups:
            if all(map(_is_alike, series[group[0]], series[name])):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _is_alike(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=ALIKE) or (math.isnan(value) and math.isnan(other))


def list_lines(rows: Sequence[Row], error: str) -> list[Line]:
    """What is drawn, with the legend's colours and markers."""
    groups = group_alike(collect(rows, list(rows[0].errors), error))
    return [
        Line(group, COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)])
        for place, group in enumerate(groups)
    ]


def draw(path: Path, rows: Sequence[Row], error: str, note: str) -> None:
    """Draw error against ranks: a panel per type and way of adding, a line per group of alike."""
    dtypes = list_dtypes(rows)
    columns = max(len(list_accumulations(dtype)) for dtype in dtypes)
    lines = list_lines(rows, error)
    full = columns == 1 or "float32" not in dtypes
    height = 2.5 * len(dtypes) + 1.2 + (0.22 * (len(lines) + 1) if full else 0)
    with open_figure(path, 9, height, f"All-reduce: {ERRORS[error]}\n{note}") as figure:
        grid = figure.subplots(len(dtypes), columns, squeeze=False, sharex=True, sharey="row")
        empty = []
        for axes, dtype in zip(grid, dtypes, strict=True):
            for axis, accumulation in itertools.zip_longest(axes, list_accumulations(dtype)):
                if accumulation is None:
                    axis.axis("off")
                    empty.append(axis)
                else:
                    _draw_panel(axis, rows, lines, (dtype, accumulation), error)
        for axis in grid[-1]:
            axis.set_xlabel("ranks", fontsize=9)
        _draw_legend(figure, lines, empty)


def _draw_panel(
    axis: Axes, rows: Sequence[Row], lines: Sequence[Line], kind: Kind, error: str
) -> None:
    dtype, accumulation = kind
    axis.set_title(f"{dtype}: {accumulation.value}", loc="left", fontsize=10)
    ranks = list(dict.fromkeys(row.ranks for row in rows))
    series = collect(rows, [kind], error)
    drawn = {line.names[0]: line for line in lines}
    for names in group_alike({name: series[name] for name in drawn}):
        for place, name in enumerate(names):
            values = [each if 0 < each < math.inf else math.nan for each in series[name]]
            _draw_line(axis, ranks, values, drawn[name], place, len(names))
    axis.axhline(ROUNDING * EPSILONS[dtype], **ONE_ROUNDING)
    _finish(axis, ranks)


def _draw_line(
    axis: Axes, ranks: Sequence[int], values: Sequence[float], line: Line, place: int, count: int
) -> None:
    """A line that is ``place``-th of ``count`` in the same place: they share it, in stripes."""
    stripes = (place * STRIPE, (STRIPE, (count - 1) * STRIPE)) if count > 1 else "-"
    axis.plot(ranks, values, color=line.colour, linewidth=2, linestyle=stripes)
    size = MARKER + 2.5 * (count - 1 - place)
    axis.plot(ranks, values, color=line.colour, linewidth=0, marker=line.marker, markersize=size,
              markeredgecolor="white", markeredgewidth=0.5, zorder=3)  # fmt: skip


def _finish(axis: Axes, ranks: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ranks, [str(each) for each in ranks])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-"))
    )
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.minorticks_off()
    axis.margins(x=0.08, y=0.12)
    axis.tick_params(labelsize=9, labelbottom=True)
    axis.set_axisbelow(True)
    finish_lines(axis)


def _draw_legend(figure: Figure, lines: Sequence[Line], empty: Sequence[Axes]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=line.colour, marker=line.marker, markersize=MARKER, linewidth=2,
               label=", ".join(line.names))
        for line in lines
    ]  # fmt: skip
    handles.append(Line2D([], [], label="RMS error of one rounding", **ONE_ROUNDING))
    look: dict[str, Any] = {
        "handles": handles,
        "title": "stripes: lines in the same place",
        "fontsize": 9.5,
        "title_fontsize": 9.5,
        "alignment": "left",
        "frameon": False,
    }
    if empty:
        # It reaches into the next place, which is empty, too.
        empty[0].legend(**look, loc="center left", labelspacing=0.9).set_in_layout(False)
    else:
        figure.legend(**look, loc="outside lower center")
