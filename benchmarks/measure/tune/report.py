"""What was found, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.judge.choosing import RULE, SizeChoice, Way
from benchmarks.records.options import describe_seconds, format_rows
from mpiddp.collectives.tuning import Section, describe_layout
from mpiddp.wording import describe_size

NEAR = 1.05
"""Of the fastest one's time: what counts as near it."""
HEAD = ("size", "buffer", "auto runs", "time", "best", "time", "chosen", "time", "gain")


def format_section(section: Section, verdicts: Sequence[SizeChoice]) -> str:
    """A table: a row for each size and kind of buffer."""
    title = (
        f"{section.collective} of {section.type}, {describe_layout(section.nodes)}, "
        f"{section.device.upper()}"
    )
    rows = [HEAD, *(_format_row(each, buffer) for each in verdicts for buffer in each.timings)]
    return "\n".join([title, *format_rows(rows)])


def _format_row(verdict: SizeChoice, buffer: str) -> tuple[str, ...]:
    timings, best = verdict.timings[buffer], verdict.find_fastest(buffer)
    is_kept = verdict.chosen == RULE
    chosen = timings[verdict.chosen]
    return (
        describe_size(verdict.bytes),
        buffer,
        verdict.rule,
        describe_seconds(timings[RULE].seconds),
        "auto" if best == RULE else str(best),
        describe_seconds(timings[best].seconds),
        "the same" if is_kept else str(verdict.chosen),
        describe_seconds(chosen.seconds),
        "" if is_kept else _describe_gain(verdict, buffer),
    )


def _describe_gain(verdict: SizeChoice, buffer: str) -> str:
    ratio = verdict.timings[buffer][verdict.chosen].ratio
    assert ratio.interval is not None
    low, high = 1 / ratio.interval.high, 1 / ratio.interval.low
    return f"{1 / ratio.estimate:.2f} × ({low:.2f}–{high:.2f})"


def describe_share(verdicts: Mapping[Section, Sequence[SizeChoice]]) -> str:
    """How often what auto ran and what was chosen are near the fastest."""
    cells = [(each, kind) for found in verdicts.values() for each in found for kind in each.timings]
    counts = [
        sum(_is_near(each, kind, way or each.chosen) for each, kind in cells)
        for way in (RULE, None)
    ]
    return (
        f"Within {100 * (NEAR - 1):.0f} % of the best: auto in {counts[0]} of {len(cells)} cells, "
        f"what was chosen in {counts[1]}."
    )


def _is_near(verdict: SizeChoice, buffer: str, way: Way) -> bool:
    timings = verdict.timings[buffer]
    return timings[way].seconds <= NEAR * timings[verdict.find_fastest(buffer)].seconds
