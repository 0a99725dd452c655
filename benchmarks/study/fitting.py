"""``python -m benchmarks fit``: a model of this machine from records, and how well it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from benchmarks.judge.fit.check import check_record, describe_checks
from benchmarks.judge.fit.fitted import (
    PLACES,
    WORTHLESS,
    Curve,
    Fit,
    describe_line,
    describe_range,
    fit_records,
    is_fit,
    list_curves,
    read_fit,
    write_fit,
)
from benchmarks.records.contenders import REDUCTION
from benchmarks.records.options import SECONDS, SPEED, format_rows, make_reader
from benchmarks.records.schema import read_record
from benchmarks.records.statistics import exact
from benchmarks.show.charts import Chart, ChartLine
from benchmarks.show.sheets import write_sheet
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import PICTURE, Kind, Outputs, check_outputs, find, writes
from mpiddp.wording import describe_size, print_text

FIT = Kind("fit", (".json",))


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What is fitted, and what is checked."""

    files: Annotated[tuple[Path, ...], Argument("RECORD", is_positional=True)] = ()
    """Records of point-to-point, or one fit (default: those of --check)."""
    check: Annotated[tuple[Path, ...], Argument("RECORD")] = ()
    """Compare these records' collectives with what the fit predicts."""
    contender: Annotated[str | None, Argument("NAME")] = None
    """Whose messages are fitted (default: MPI_Send, or the only one)."""
    type: Annotated[str, Argument("TYPE")] = "float32"
    """Of the additions that are fitted."""
    output: Annotated[Outputs, writes(FIT, PICTURE)] = ()
    """Write the fit, for simulate --fit, or draw what was measured and the lines through it."""


READER = make_reader(
    command="fit",
    description="Fit α, β and γ to measured messages and additions: in pieces, if the protocol or "
    "the cache changes at some size. No collective's time enters a fit; --check predicts them.",
    groups={"options": FitOptions},
    epilog="For example: fit messages.jsonl --output machine.json --check all-reduce.jsonl",
)


def main(arguments: Sequence[str]) -> None:
    options = pick(FitOptions, READER.read(arguments))
    check_outputs(options.output, inputs=(*options.files, *options.check))
    fit = make_fit(options)
    print_text(*describe(fit))
    for path in find(options.output, FIT):
        write_fit(path, fit)
    for path in find(options.output, PICTURE):
        draw_fit(path, fit)
    for path in options.check:
        print_text("", *describe_checks(check_record(fit, read_record(path))))


def make_fit(options: FitOptions) -> Fit:
    """Read a fit, or make one of records. Raises ConfigurationError."""
    files = options.files or options.check
    if not files:
        raise ConfigurationError(f"no RECORD given; {READER.program} --help shows the options")
    if len(files) == 1 and is_fit(files[0]):
        return read_fit(files[0])
    return fit_records([read_record(path) for path in files], options.contender, options.type)


def describe(fit: Fit) -> Iterator[str]:
    yield f"messages of {fit.contender}, on {fit.environment.get('processor')}"
    rows: list[tuple[str, ...]] = [("", "sizes", "α", "β", "points", "error", "largest")]
    for name, curve in list_curves(fit).items():
        rows += [_describe_segment(name, curve, place) for place in range(len(curve.segments))]
    yield from format_rows(rows)
    for link, ratio in fit.both_ways.items():
        yield f"large messages {PLACES[link]}, both ways at once: {ratio:.2f} × as long"
    if fit.addition is None:
        yield f"no additions were timed (cells of {REDUCTION!r}): γ is taken to be 0"
    for name, curve in list_curves(fit).items():
        for segment in curve.segments:
            if segment.error >= WORTHLESS:
                yield (
                    f"warning: {name}: half of the sizes are off by {segment.error:.0%} or more; "
                    "this predicts nothing: measure again, with nothing else running"
                )
            if segment.break_between is not None:
                low, high = (describe_size(round(size)) for size in segment.break_between)
                yield f"{name} change between {low} and {high}: sizes between tell more exactly"


def _describe_segment(name: str, curve: Curve, place: int) -> tuple[str, ...]:
    segment = curve.segments[place]
    return (
        "" if place else name,
        describe_range(curve, place),
        *describe_line(segment),
        str(segment.points),
        f"{segment.error:.1%}",
        f"{segment.largest_error:.1%}",
    )


# ---- the picture --------------------------------------------------------------------------


def draw_fit(path: Path, fit: Fit) -> None:
    """What was measured, the lines through it, and how far they are off."""
    curves = list_curves(fit)
    grid = [
        [_chart_times(name, curve) for name, curve in curves.items()],
        [_chart_errors(curve) for curve in curves.values()],
    ]
    write_sheet(path, grid, {}, f"Messages of {fit.contender}: measured, and the fitted model",
                width=340)  # fmt: skip


def _chart_times(name: str, curve: Curve) -> Chart:
    sizes, seconds, _ = zip(*curve.points, strict=True)
    lines = []
    ends = [*(each.start for each in curve.segments[1:]), sizes[-1]]
    for segment, end in zip(curve.segments, ends, strict=True):
        places = np.geomspace(max(segment.start, sizes[0]), end, 9)
        times = segment.latency + places * segment.seconds_per_byte
        points = {
            float(place): exact(float(each)) for place, each in zip(places, times, strict=True)
        }
        lines.append(ChartLine(", ".join(describe_line(segment)), points))
    measured = dict(zip(map(float, sizes), map(exact, seconds), strict=True))
    lines.append(ChartLine("measured", measured, is_joined=False))
    return Chart(title=name, unit=SECONDS, is_log=True, lines=lines)


def _chart_errors(curve: Curve) -> Chart:
    found, seconds, _ = np.array(curve.points).T
    ratios = map(float, seconds / curve.cost.seconds(found))
    points = dict(zip(map(float, found), map(exact, ratios), strict=True))
    return Chart(
        title="measured over fitted time", unit=SPEED, is_log=True, mark=(1.0, "as fitted"),
        lines=[ChartLine("measured", points, is_joined=False)],
    )  # fmt: skip
