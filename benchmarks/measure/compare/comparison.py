"""``python -m benchmarks compare OLD NEW``: which cells of a record became slower.

A cell that became slower makes the exit code 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any

from benchmarks.judge.changes import (
    FASTER,
    SAME,
    SLOWER,
    UNKNOWN,
    Change,
    Matched,
    Rule,
    judge,
    match,
)
from benchmarks.measure.compare.again import CannotMeasureError, measure_again
from benchmarks.records.options import CountOrZero, describe_interval, describe_value, make_reader
from benchmarks.records.schema import Cell, Record, read_record
from benchmarks.records.statistics import quantile
from benchmarks.show.results import open_model
from benchmarks.show.tables import format_table
from mpiddp.errors import MpiddpError
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import RECORD, Outputs, check_outputs, writes
from mpiddp.wording import count_noun, print_message, print_text

CONDITIONS = (
    "processor", "cores", "usable_hardware_threads", "memory_bytes", "kernel", "launcher", "nodes",
    "mpi_library", "python", "threads_per_process", "binding",
)  # fmt: skip
"""Of the environment: what two records should have in common. So should versions of packages."""
WORDS = (SLOWER, FASTER, UNKNOWN, SAME)
"""In the order in which cells are shown."""
MOST_NAMED = 8
ALIKE = 1.5
"""Times wider, from which on it is said."""


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
class CompareOptions:
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
    groups={"options": CompareOptions},
)


class RegressionError(MpiddpError):
    """A cell became slower."""


def main(arguments: Sequence[str]) -> None:
    options = pick(CompareOptions, READER.read(arguments))
    check_outputs(options.output, inputs=(options.old, options.new))
    old, new = read_record(options.old), read_record(options.new)
    matched = match(old, new)
    rule = Rule(tolerance=options.tolerance, error_rate=options.error_rate)
    for warning in list_warnings(old, new):
        print_message(f"warning: {warning}")
    with open_model("compare", options) as writer:
        try:
            verdicts = judge(matched.pairs, rule, partial(measure_again, new), options.again)
        except CannotMeasureError as error:
            print_message(
                f"note: {new.path} cannot be measured again here, its one run decides: {error}"
            )
            verdicts = judge(matched.pairs, rule)
        print_text(format_verdicts(rule, matched, verdicts, show_all=options.all))
        for verdict in verdicts:
            writer.write("verdict", **describe(verdict))
        for name in ("gone", "added", "incomparable"):
            for cell in getattr(matched, name):
                writer.write(name, **list_fields(cell))
    slower = sum(verdict.word == SLOWER for verdict in verdicts)
    if slower:
        raise RegressionError(
            f"{count_noun(slower, 'cell')} of {len(verdicts)} became slower by more than "
            f"{options.tolerance:.3g} of the time before"
        )


def list_warnings(old: Record, new: Record) -> Iterator[str]:
    """A line for each difference between the environments, and for a record that was cut off."""
    for record in (old, new):
        if not record.is_complete:
            yield f"{record.path} ends before its measurement did: only its cells are compared"
    before, after = (_flatten(record.environment) for record in (old, new))
    for name in before:
        if before[name] != after.get(name):
            yield f"{name.replace('_', ' ')} was {before[name]}, is now {after.get(name)}"


def _flatten(environment: Mapping[str, Any]) -> dict[str, Any]:
    # What changed in mpiddp itself is what is looked for.
    packages = dict(environment.get("packages", {}), mpiddp=None)
    return {**{name: environment.get(name) for name in CONDITIONS}, **packages}


# ---- what is printed -----------------------------------------------------------------------------


def format_verdicts(
    rule: Rule, matched: Matched, verdicts: Sequence[Change], *, show_all: bool
) -> str:
    """``show_all``: also the cells that did not change."""
    shown = [each for each in verdicts if show_all or each.word in (SLOWER, FASTER)]
    # Cells that looked slower show why they were measured again.
    shown += [each for each in verdicts if each not in shown and len(each.runs) > 1]
    shown.sort(key=lambda each: WORDS.index(each.word))
    parts = [
        format_table(shown, COLUMNS) if shown else "",
        _list_cells("only in OLD", matched.gone),
        _list_cells("only in NEW", matched.added),
        _list_cells("not compared, for values of 0 or another unit", matched.incomparable),
        "\n".join(_summarize(rule, verdicts)),
    ]
    return "\n\n".join(filter(None, parts))


def _describe_middle(samples: Sequence[float], cell: Cell) -> str:
    return describe_value(quantile(samples, 0.5), cell.unit)


COLUMNS: Sequence[tuple[str, Callable[[Change], str]]] = (
    ("", lambda each: each.new.name),
    ("old", lambda each: _describe_middle(each.old.samples, each.old)),
    ("new", lambda each: _describe_middle(each.together, each.new)),
    ("new / old", lambda each: f"{each.ratio.estimate:.3f}"),
    ("95 %", lambda each: describe_interval(each.ratio.interval)),
    ("runs", lambda each: " ".join(f"{ratio:.2f}" for ratio in each.run_ratios)),
    ("p", lambda each: f"{each.probability:.2g}"),
    ("", lambda each: each.word),
)


def _list_cells(title: str, cells: Sequence[Cell]) -> str:
    """Empty if there are none."""
    names = [f"  {cell.name}" for cell in cells[:MOST_NAMED]]
    if len(cells) > MOST_NAMED:
        more = len(cells) - MOST_NAMED
        names.append(f"  … and {more} more (all of them: --output FILE.jsonl)")
    return "\n".join([f"{title}:", *names]) if cells else ""


def _summarize(rule: Rule, verdicts: Sequence[Change]) -> Iterator[str]:
    """How many cells are what, and what that means."""
    words = [each.word for each in verdicts]
    counts = ", ".join(f"{words.count(word)} {word}" for word in WORDS)
    rate, tolerance = rule.error_rate, rule.tolerance
    yield f"{count_noun(len(verdicts), 'cell')}: {counts}"
    yield (
        f"error rate {rate:g} over all cells: if none has changed, at most a share of {rate:g} of "
        "such comparisons calls any of them slower"
    )
    yield (
        f"slower, faster: beyond the tolerance of {tolerance:.0%}, with p <= {rate:g} "
        "(p by Mann and Whitney, for all cells together by Holm)"
    )
    if verdicts:
        yield from _describe_likeness([each.ratio.widening for each in verdicts])
        middle = statistics.median(each.slowdown for each in verdicts)
        doubt = ": is it the machine?" if abs(middle - 1) > tolerance else ""
        yield f"half of all cells take {middle:.3f} times as long as before or longer{doubt}"
    if UNKNOWN in words:
        yield (
            f"unknown: a change of {(1 + tolerance) ** 2 - 1:.0%} could pass unseen; measure more "
            "rounds (--repetitions), or on a quieter machine"
        )


def _describe_likeness(widenings: Sequence[float]) -> Iterator[str]:
    """What neighbouring rounds that are alike do to the intervals."""
    middle = statistics.median(widenings)
    if ALIKE < middle < inf:
        yield (
            f"neighbouring rounds are alike: half of all intervals are {middle:.1f} times as wide "
            "as those of independent rounds, or wider"
        )
    if inf in widenings:
        yield (
            f"{count_noun(widenings.count(inf), 'cell')} cannot be judged: the rounds are too few, "
            "or rise and fall together too slowly, to tell how much they say"
        )


# ---- what is written -----------------------------------------------------------------------------


def list_fields(cell: Cell) -> dict[str, Any]:
    names = ("quantity", "contender", "ranks", "nodes", "at", "unit")
    return {name: getattr(cell, name) for name in names}


def describe(verdict: Change) -> dict[str, Any]:
    """A verdict for a record."""
    ratio = verdict.ratio
    return {
        **list_fields(verdict.new),
        "verdict": verdict.word,
        "ratio": ratio.estimate,
        "interval": asdict(ratio.interval) if ratio.interval else None,
        "run_ratios": verdict.run_ratios,
        "widening": ratio.widening if ratio.widening < inf else None,
        "probability": verdict.probability,
    }
