"""What two records say, as a table and as lines of a record."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from benchmarks.judge.changes import FASTER, SAME, SLOWER, UNKNOWN, Change, Matched, Rule
from benchmarks.records.options import describe_interval, describe_value, format_rows
from benchmarks.records.schema import Cell, Record
from benchmarks.records.statistics import quantile
from mpiddp.wording import count_noun, describe_size

CONDITIONS = (
    "processor", "cores", "usable_hardware_threads", "memory_bytes", "kernel", "launcher", "nodes",
    "mpi_library", "python", "threads_per_process", "binding",
)  # fmt: skip
"""Of the environment: what two records should have in common. So should versions of packages."""
ORDER = {word: place for place, word in enumerate((SLOWER, FASTER, UNKNOWN, SAME))}
MOST_NAMED = 8
ALIKE = 1.5
"""Times wider, from which on it is said."""


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


def format_report(
    rule: Rule, matched: Matched, verdicts: Sequence[Change], *, show_all: bool
) -> str:
    """``show_all``: also the cells that did not change."""
    parts = [
        _format_table(verdicts, show_all=show_all),
        *_list_cells("only in OLD", matched.gone),
        *_list_cells("only in NEW", matched.added),
        *_list_cells("not compared, for values of 0 or another unit", matched.incomparable),
        _summarize(rule, verdicts),
    ]
    return "\n\n".join(filter(None, parts))


def _format_table(verdicts: Sequence[Change], *, show_all: bool) -> str:
    shown = [each for each in verdicts if show_all or each.word in (SLOWER, FASTER)]
    # Cells that looked slower show why they were measured again.
    shown += [each for each in verdicts if each not in shown and len(each.runs) > 1]
    if not shown:
        return ""
    heads = ["", "old", "new", "new / old", "95 %", "runs", "p", ""]
    rows = [_format_row(each) for each in sorted(shown, key=lambda each: ORDER[each.word])]
    return "\n".join(format_rows([heads, *rows]))


def _format_row(verdict: Change) -> list[str]:
    return [
        name_cell(verdict.new),
        describe_value(quantile(verdict.old.samples, 0.5), verdict.old.unit),
        describe_value(quantile(verdict.together, 0.5), verdict.new.unit),
        f"{verdict.ratio.estimate:.3f}",
        describe_interval(verdict.ratio.interval),
        " ".join(f"{each:.2f}" for each in verdict.run_ratios),
        f"{verdict.probability:.2g}",
        verdict.word,
    ]


def name_cell(cell: Cell) -> str:
    """``all-reduce, mpiddp ring, 2 ranks, 4 KiB, float32``."""
    nodes = [] if cell.nodes == 1 else [count_noun(cell.nodes, "node")]
    places = [
        describe_size(int(value)) if name == "bytes" else _describe_place(name, value)
        for name, value in cell.at.items()
    ]
    parts = [cell.quantity, cell.contender, count_noun(cell.ranks, "rank"), *nodes, *places]
    return ", ".join(parts)


def _describe_place(name: str, value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{name} {value}"


def _list_cells(title: str, cells: Sequence[Cell]) -> list[str]:
    if not cells:
        return []
    rest = len(cells) - MOST_NAMED
    names = [f"  {name_cell(cell)}" for cell in cells[:MOST_NAMED]]
    more = [f"  … and {rest} more (all of them: --output FILE.jsonl)"] if rest > 0 else []
    return ["\n".join([f"{title}:", *names, *more])]


def _summarize(rule: Rule, verdicts: Sequence[Change]) -> str:
    """How many cells are what, and what that means."""
    counts = {word: sum(each.word == word for each in verdicts) for word in ORDER}
    rate, tolerance = rule.error_rate, rule.tolerance
    chance = f"at most a share of {rate:g} of such comparisons calls any of them slower"
    method = "p by Mann and Whitney, for all cells together by Holm"
    lines = [
        f"{count_noun(len(verdicts), 'cell')}: "
        + ", ".join(f"{count} {word}" for word, count in counts.items()),
        f"error rate {rate:g} over all cells: if none has changed, {chance}",
        f"slower, faster: beyond the tolerance of {tolerance:.0%}, with p <= {rate:g} ({method})",
    ]
    if verdicts:
        lines += _describe_likeness([each.ratio.widening for each in verdicts])
        middle = statistics.median(each.slowdown for each in verdicts)
        lines.append(
            f"half of all cells take {middle:.3f} times as long as before or longer"
            + (": is it the machine?" if abs(middle - 1) > tolerance else "")
        )
    if counts[UNKNOWN]:
        lines.append(
            f"unknown: a change of {(1 + tolerance) ** 2 - 1:.0%} could pass unseen; measure more "
            "rounds (--repetitions), or on a quieter machine"
        )
    return "\n".join(lines)


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


def describe_place(cell: Cell) -> dict[str, Any]:
    return {
        "quantity": cell.quantity,
        "contender": cell.contender,
        "ranks": cell.ranks,
        "nodes": cell.nodes,
        "at": dict(cell.at),
        "unit": cell.unit,
    }


def describe(verdict: Change) -> dict[str, Any]:
    """A verdict for a record."""
    return {
        **describe_place(verdict.new),
        "verdict": verdict.word,
        "ratio": verdict.ratio.estimate,
        "interval": asdict(verdict.ratio.interval) if verdict.ratio.interval else None,
        "run_ratios": verdict.run_ratios,
        "widening": verdict.ratio.widening if verdict.ratio.widening < inf else None,
        "probability": verdict.probability,
    }
