"""``python -m benchmarks numerics``: how exact each algorithm's order of summation is.

`summation` says how it is measured, and what the columns depth and growth mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from tqdm import tqdm

from benchmarks.records.options import (
    Algorithms,
    Count,
    CountOrZero,
    Load,
    SeveralRanks,
    list_algorithms,
    make_model_reader,
)
from benchmarks.records.schema import Coordinate, RecordWriter, make_cell
from benchmarks.records.statistics import exact
from benchmarks.show import results
from benchmarks.show.charts import Chart, ChartLine, choose_names
from benchmarks.show.progress import show_progress
from benchmarks.show.sheets import write_sheet
from benchmarks.study.summation import (
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
from mpiddp.options.outputs import PICTURE, RECORD, Outputs, check_outputs, find, writes
from mpiddp.schedules.schedule import Schedule
from mpiddp.wording import print_text

Types = Annotated[tuple[str, ...], Argument(choices=tuple(DTYPES), flag="--dtype")]
RANKS = (8, 64, 256)
ELEMENTS = 8192
"""32 of them in each chunk at 256 ranks; they give an RMS error to within one percent or so."""

GENERATOR = "numpy.random.default_rng (PCG64), standard normal in float64, a row per rank"

QUANTITY = "rounding error"

Kind = tuple[str, Accumulation]
"""A type and a way of adding: a column of the tables, a chart of the picture."""

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
"""Errors that differ by less, relatively, would look the same in the picture."""

WAYS = {
    Accumulation.NATIVE: "added as it is",
    Accumulation.STEP: "float32 within a step",
    Accumulation.THROUGHOUT: "float32 throughout",
}
"""Titles of charts."""


@dataclass(frozen=True, kw_only=True)
class NumericsOptions:
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
    output: Annotated[Outputs, writes(RECORD, PICTURE)] = ()
    """Write all results, or draw error against ranks."""


@dataclass(frozen=True)
class ErrorRow:
    ranks: int
    algorithm: str
    inputs: int
    """How many of the ranks contribute."""
    order: SummationOrder
    errors: Mapping[Kind, Error]


READER = make_model_reader(
    "numerics",
    "Sum normal values in each algorithm's order, adding in the type itself and in "
    "float32, and compare with float64. Needs neither MPI nor a GPU.",
    NumericsOptions,
    "ring:segments=4",
)


def parse(arguments: Sequence[str]) -> NumericsOptions:
    options = pick(NumericsOptions, READER.read(arguments))
    algorithms = options.algorithms or list_algorithms()
    return replace(options, algorithms=algorithms, ranks=tuple(sorted(options.ranks)))


def measure_all(options: NumericsOptions) -> list[ErrorRow]:
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


def _measure_row(
    name: str, schedule: Schedule, options: NumericsOptions, bar: tqdm[NoReturn]
) -> ErrorRow:
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
    return ErrorRow(schedule.ranks, name, len(schedule.members), describe_order(schedule), errors)


def record_row(record: RecordWriter, row: ErrorRow) -> None:
    """A cell for each error, relative to the RMS of the sum; one that is not finite is a refusal,
    since JSON has no name for it."""
    for (dtype, accumulation), error in row.errors.items():
        details = {
            "inputs": row.inputs, "depth": row.order.depth,
            "growth": row.order.expect(accumulation),
        }  # fmt: skip
        for name in ERRORS:
            value = getattr(error, name)
            at: dict[str, Coordinate] = {
                "type": dtype, "accumulation": accumulation.value, "error": name,
            }  # fmt: skip
            if not math.isfinite(value):
                record.refuse(QUANTITY, row.algorithm, f"{value}", ranks=row.ranks, **at)
                continue
            cell = make_cell(
                [value], quantity=QUANTITY, contender=row.algorithm, ranks=row.ranks, at=at,
                unit="1", details=details,
            )  # fmt: skip
            record.add(cell)


def describe_inputs(options: NumericsOptions) -> str:
    return (
        f"inputs: normal, standard deviation {options.scale:g}, seed {options.seed}, "
        f"{options.elements} elements of each rank"
    )


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    check_outputs(options.output)
    with results.open_model("numerics", options) as record:
        record.write("inputs", generator=GENERATOR)
        rows = measure_all(options)
        for row in rows:
            record_row(record, row)
    print_text(describe_inputs(options) + "\n")
    print_text(report(rows, options.error))
    for path in find(options.output, PICTURE):
        draw_errors(path, rows, options.error, describe_inputs(options))


def list_dtypes(rows: Sequence[ErrorRow]) -> list[str]:
    return list(dict.fromkeys(dtype for dtype, _ in rows[0].errors))


# ---- tables -------------------------------------------------------------------------------


def report(rows: Sequence[ErrorRow], error: str) -> str:
    """All tables, and what their columns mean; ``error`` is ``rms`` or ``largest``."""
    groups = itertools.groupby(rows, key=lambda row: row.ranks)
    tables = [format_table(list(group), error) for _, group in groups]
    return "\n\n".join([*tables, explain(rows, error)])


def format_table(rows: Sequence[ErrorRow], error: str) -> str:
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


def explain(rows: Sequence[ErrorRow], error: str) -> str:
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


# ---- picture ------------------------------------------------------------------------------


Series = dict[str, list[float]]
"""The values of each name, in the same order."""


def collect(rows: Sequence[ErrorRow], kinds: Sequence[Kind], error: str) -> Series:
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


def list_groups(rows: Sequence[ErrorRow], error: str) -> tuple[list[list[str]], int]:
    """The groups of algorithms to draw, each a line, and how many groups are left out.

    Of too many the largest error stays, beside the smallest.
    """
    series = collect(rows, list(rows[0].errors), error)
    groups = group_alike(series)
    firsts = {group[0]: series[group[0]] for group in groups}
    worst = max(firsts, key=lambda name: firsts[name][-1])
    shown, left_out = choose_names(firsts, [worst])
    return [group for group in groups if group[0] in shown], left_out


def draw_errors(path: Path, rows: Sequence[ErrorRow], error: str, note: str) -> None:
    """Error against ranks: a chart for each type and way of adding, a line for each group of
    alike."""
    groups, left_out = list_groups(rows, error)
    if left_out:
        note += f"; {left_out} lines between the others left out"
    grid = [
        [_make_chart(rows, groups, (dtype, way), error) for way in list_accumulations(dtype)]
        for dtype in list_dtypes(rows)
    ]
    numbers = {group[0]: number for number, group in enumerate(groups)}
    lines = [line for row in grid for chart in row for line in chart.lines]
    colours = {line.name: numbers.get(line.name.partition(", ")[0], 0) for line in lines}
    write_sheet(path, grid, colours, f"All-reduce: {ERRORS[error]}", note, 400, "row")


def _make_chart(
    rows: Sequence[ErrorRow], groups: Sequence[Sequence[str]], kind: Kind, error: str
) -> Chart:
    dtype, accumulation = kind
    return Chart(
        title=f"{dtype}, {WAYS[accumulation]}", lines=list_lines(rows, groups, kind, error),
        along="ranks", unit="", is_log=True, is_along_log=True,
        mark=(ROUNDING * EPSILONS[dtype], "one rounding"),
    )  # fmt: skip


def list_lines(
    rows: Sequence[ErrorRow], groups: Sequence[Sequence[str]], kind: Kind, error: str
) -> list[ChartLine]:
    """The lines of a chart: groups that are alike there share one."""
    ranks = list(dict.fromkeys(row.ranks for row in rows))
    series, firsts = collect(rows, [kind], error), [group[0] for group in groups]
    lines = []
    for alike in group_alike({name: series[name] for name in firsts}):
        names = [name for group in groups if group[0] in alike for name in group]
        title = ", ".join(names) if len(alike) < len(groups) or len(groups) == 1 else "all"
        values = zip(ranks, series[alike[0]], strict=True)
        lines.append(
            ChartLine(title, {n: exact(each) for n, each in values if 0 < each < math.inf})
        )
    return lines
