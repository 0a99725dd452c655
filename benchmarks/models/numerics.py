"""``python -m benchmarks numerics``: how exact each algorithm's order of summation is.

Normal values are rounded to a type, summed over the ranks as the algorithm's schedule says, and
compared with their sum in float64; summation.py says how, and what the columns depth and growth
mean. Nothing is sent: the schedules are played in this process, without MPI.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from benchmarks.common import results
from benchmarks.common.checks import check_outputs
from benchmarks.common.options import CommandLine, at_least, make, positive
from benchmarks.common.trials import show_progress
from benchmarks.models import numerics_report
from benchmarks.models.numerics_report import Row
from benchmarks.models.summation import (
    DTYPES,
    describe_order,
    draw_inputs,
    list_accumulations,
    measure,
)
from mpiddp.errors import ScheduleError
from mpiddp.schedules.registry import Choice
from mpiddp.schedules.schedule import Schedule

RANKS = (8, 64, 256)
ELEMENTS = 8192
"""32 of them in each chunk at 256 ranks; they give an RMS error to within one percent or so."""

GENERATOR = "numpy.random.default_rng (PCG64), standard normal in float64, a row per rank"


@dataclass(frozen=True)
class Options:
    """What is measured, and where the results go."""

    algorithms: tuple[Choice, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...]
    elements: int
    """Of each rank's buffer."""
    scale: float
    """Standard deviation of the inputs."""
    seed: int
    error: str
    """``rms`` or ``largest``: the one that is printed and drawn."""
    json: Path | None
    plot: Path | None


def parse(arguments: Sequence[str]) -> Options:
    parser = CommandLine(
        "numerics",
        "Sum normal values in each algorithm's order, adding in the type itself and in float32, "
        "and compare with float64. Needs neither MPI nor a GPU.",
    )
    add = parser.add
    parser.add_algorithms()
    add("ranks", type=at_least(2), default=RANKS)
    add("dtype", choices=DTYPES, nargs="+", default=DTYPES, metavar="TYPE")
    add(
        "elements",
        "elements of each rank's buffer",
        type=at_least(1),
        default=ELEMENTS,
        metavar="N",
    )
    add("scale", "standard deviation of the inputs", type=positive("a number"), default=1.0,
        metavar="X")  # fmt: skip
    add("seed", "seed of the inputs")
    add("error", "the error to print and draw: RMS, or the worst element's",
        choices=("rms", "largest"), default="rms")  # fmt: skip
    add("json", "write all results and the environment")
    add("plot", "draw error against ranks (.svg, .png or .pdf)")
    values = parser.read_values(arguments)
    return make(Options, values, ranks=tuple(sorted(values["ranks"])), dtypes=values["dtype"])


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
    print(numerics_report.report(rows, options.error))
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
        numerics_report.draw(options.plot, rows, options.error, describe_inputs(options))
