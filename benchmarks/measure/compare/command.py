"""``python -m benchmarks compare OLD NEW``: which cells of a record became slower.

A cell that became slower makes the exit code 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.judge.changes import SLOWER, Change, Matched, Rule, judge, match
from benchmarks.measure.compare import report
from benchmarks.measure.compare.again import CannotMeasureError, check_place, measure_again
from benchmarks.records.options import CountOrZero, make_reader
from benchmarks.records.schema import Cell, Record, read_record
from benchmarks.show.results import open_model
from mpiddp.errors import MpiddpError
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import RECORD, Outputs, check_outputs, writes
from mpiddp.wording import count_noun, print_message, print_text


def share(text: str) -> float:
    """A share of 1: ``5%`` or ``0.05``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ValueError(f"expected a share above 0 and below 1, as 5% or 0.05, found {text!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is compared, and what counts."""

    old: Annotated[Path, Argument("OLD", is_positional=True)]
    """A record that --output wrote before."""
    new: Annotated[Path, Argument("NEW", is_positional=True)]
    """A later record of the same command."""
    tolerance: Annotated[float, Argument("SHARE", share)] = 0.05
    """The change that does not count, for example 5%."""
    error_rate: Annotated[float, Argument("SHARE", share)] = 0.01
    """Probability that any cell is called slower if none is."""
    again: CountOrZero = 2
    """Runs in which cells that look slower are measured again, by NEW's command line; 0 decides by
    the two records alone."""
    all: bool = False
    """Show every cell, also those that did not change."""
    output: Annotated[Outputs, writes(RECORD)] = ()
    """Write the verdicts."""


READER = make_reader(
    command="compare",
    description="Compare two records of one command, cell by cell: the ratio of the times with "
    "its interval, and whether any cell became slower, which is exit code 1.",
    groups={"options": Options},
)


class RegressionError(MpiddpError):
    """A cell became slower."""


def compare(options: Options, rule: Rule, new: Record, matched: Matched) -> list[Change]:
    """The verdicts, with cells measured again if that can be done."""
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as folder:

        def measure(cells: Sequence[Cell]) -> Record:
            check_place(new)
            return measure_again(new, cells, Path(folder))

        try:
            return judge(matched.pairs, rule, measure, options.again)
        except CannotMeasureError as error:
            print_message(
                f"note: {new.path} cannot be measured again here, its one run decides: {error}"
            )
            return judge(matched.pairs, rule)


def main(arguments: Sequence[str]) -> None:
    options = pick(Options, READER.read(arguments))
    check_outputs(options.output, inputs=(options.old, options.new))
    old, new = read_record(options.old), read_record(options.new)
    matched = match(old, new)
    rule = Rule(tolerance=options.tolerance, error_rate=options.error_rate)
    for warning in report.list_warnings(old, new):
        print_message(f"warning: {warning}")
    with open_model("compare", options) as writer:
        verdicts = compare(options, rule, new, matched)
        print_text(report.format_report(rule, matched, verdicts, show_all=options.all))
        for verdict in verdicts:
            writer.write("verdict", **report.describe(verdict))
        for name in ("gone", "added", "incomparable"):
            for cell in getattr(matched, name):
                writer.write(name, **report.describe_place(cell))
    slower = sum(verdict.word == SLOWER for verdict in verdicts)
    if slower:
        raise RegressionError(
            f"{count_noun(slower, 'cell')} of {len(verdicts)} became slower by more than "
            f"{options.tolerance:.3g} of the time before"
        )
