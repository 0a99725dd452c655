"""The matrix of node pairs, and the links that are slower than the others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.judge.slow_links import SLOW, Pair, find_slow
from benchmarks.records.material import Measured
from benchmarks.records.options import describe_seconds
from benchmarks.records.statistics import quantile
from benchmarks.show.charts import Bar, Bars, Grid, Section, Square
from mpiddp.wording import describe_size

MOST_ROWS = 48
"""Of a matrix; of more nodes neighbours share a row, and the slowest link of each square counts."""
MOST_NAMED = 20
BANDWIDTH_BYTES = 64 << 10
"""From this size on bandwidth is shown, below it latency."""


@dataclass(frozen=True)
class Links:
    """All pairs at one size."""

    contender: str
    size: int
    noun: str
    """What the ends are."""
    rounds: Mapping[Pair, Sequence[float]]
    """Seconds from one end to another, a value a round."""

    @cached_property
    def seconds(self) -> Mapping[Pair, float]:
        return {pair: quantile(each, 0.5) for pair, each in self.rounds.items()}

    @cached_property
    def found(self) -> tuple[float, Mapping[Pair, float]]:
        """The usual seconds, and how many times those each slow link takes."""
        return find_slow(self.rounds)


def read_links(cells: Sequence[Measured]) -> list[Links]:
    """By contender and size."""
    found: dict[tuple[str, int, str], dict[Pair, Sequence[float]]] = defaultdict(dict)
    for each in cells:
        at = each.cell.at
        start, end, size = at.get("from"), at.get("to"), at.get("bytes")
        if isinstance(start, int) and isinstance(end, int) and isinstance(size, int):
            noun = "node" if each.cell.nodes > 1 else "rank"
            found[each.name, size, noun][start, end] = each.cell.samples
    return [Links(*key, rounds) for key, rounds in sorted(found.items(), key=lambda each: each[0])]


def describe_slow(links: Links) -> str:
    """The slow links in words; empty if there are none."""
    names = [
        f"{links.noun} {start} → {end} ({factor:.2g} ×)"
        for (start, end), factor in links.found[1].items()
    ]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    where = f"slow links at {describe_size(links.size)}"
    return f"{where}: {', '.join(names[:5])}{more}" if names else ""


def describe_pairs(cells: Sequence[Measured]) -> Section | None:
    """None if there are no links."""
    pictures: list[Grid | Bars] = []
    for links in read_links(cells):
        pictures.append(_describe_matrix(links))
        bars = [
            Bar(f"{links.noun} {start} → {end}", {"": factor})
            for (start, end), factor in list(links.found[1].items())[:MOST_NAMED]
        ]
        if bars:
            pictures.append(
                Bars(title=f"Slow links at {describe_size(links.size)}", unit="×", bars=bars,
                     text=f"Times the usual link's time; slow in every round, from {SLOW:g} on.")
            )  # fmt: skip
    if not pictures:
        return None
    return Section(
        name="pairs", heading="Pairs", pictures=pictures,
        words="Messages from one end (rows) to another (columns).",
    )  # fmt: skip


def _describe_matrix(links: Links) -> Grid:
    size = links.size
    ends = 1 + max(map(max, links.rounds))
    each = math.ceil(ends / MOST_ROWS)
    blocks: dict[Pair, float] = defaultdict(float)
    for (start, end), seconds in links.seconds.items():
        block = start // each, end // each
        blocks[block] = max(blocks[block], seconds)
    usual, slow = links.found
    marked = {(start // each, end // each) for start, end in slow}
    is_rate = size >= BANDWIDTH_BYTES
    least = min(links.seconds.values())
    # Twice the usual time is as hot as can be.
    top = max(2 * usual - least, 1e-12)

    def make_square(block: tuple[int, int]) -> Square | None:
        seconds = blocks.get(block)
        if seconds is None:
            return None
        text = f"{size / seconds * 1e-9:.3g}" if is_rate else f"{seconds * 1e6:.3g}"
        words = f"{label(block[0])} → {label(block[1])}: {describe_seconds(seconds)}"
        heat = min(1.0, (seconds - least) / top)
        return Square(text, words, heat, is_marked=block in marked)

    def label(block: int) -> str:
        last = min(ends, (block + 1) * each) - 1
        return str(block * each) if each == 1 else f"{block * each}–{last}"

    rows = range(math.ceil(ends / each))
    what = "bandwidth in GB/s" if is_rate else "time in µs"
    shared = f" Rows have {each} {links.noun}s: the slowest link counts." if each > 1 else ""
    return Grid(
        title=f"{links.contender}, {describe_size(size)}, {links.noun}s: {what}",
        text="The stronger the colour, the longer it takes; framed: "
        f"{SLOW:g} times a usual link's time, or more.{shared}",
        corner="from \\ to", rows=[label(row) for row in rows],
        columns=[label(column) for column in rows],
        squares=[[make_square((row, column)) for column in rows] for row in rows],
    )  # fmt: skip
