"""The matrix of node pairs, and the links that are slower than the others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from benchmarks.common.options import describe_seconds, describe_size
from benchmarks.common.statistics import quantile
from benchmarks.report.material import Measured
from benchmarks.report.pictures import Bar, Bars, Grid, Section, Square, spread

SLOW = 1.25
"""Times the median of all links, from which on a link is called slow."""
MOST_ROWS = 48
"""Of a matrix; of more nodes neighbours share a row, and the slowest link of each square counts."""
MOST_NAMED = 20
BANDWIDTH_BYTES = 64 << 10
"""From this size on bandwidth is shown, below it latency."""

Links = Mapping[tuple[int, int], float]
"""Seconds from one node to another."""


def read_links(cells: Sequence[Measured]) -> Mapping[tuple[str, int], Links]:
    """By contender and size."""
    found: dict[tuple[str, int], dict[tuple[int, int], float]] = defaultdict(dict)
    for each in cells:
        at = each.cell.at
        start, end, size = at.get("from"), at.get("to"), at.get("bytes")
        if isinstance(start, int) and isinstance(end, int) and isinstance(size, int):
            found[each.name, size][start, end] = spread(each.cell.samples).median
    return found


def find_slow(links: Links) -> list[tuple[tuple[int, int], float]]:
    """Links that take SLOW times the median or more, and how many times; the slowest first."""
    usual = quantile(list(links.values()), 0.5)
    slow = ((link, seconds / usual) for link, seconds in links.items() if usual)
    return sorted((each for each in slow if each[1] >= SLOW), key=lambda each: -each[1])


def describe_slow(links: Links, size: int) -> str:
    """The slow links in words; empty if there are none."""
    slow = find_slow(links)
    names = [f"node {start} → {end} ({factor:.2g} ×)" for (start, end), factor in slow]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"slow links at {describe_size(size)}: {', '.join(names[:5])}{more}" if names else ""


def draw_pairs(cells: Sequence[Measured]) -> Section | None:
    """None if there are no links."""
    pictures: list[Grid | Bars] = []
    for (name, size), links in sorted(read_links(cells).items(), key=lambda each: each[0]):
        pictures.append(_draw_matrix(name, size, links))
        slow = find_slow(links)[:MOST_NAMED]
        if slow:
            bars = [Bar(f"node {start} → {end}", {"": factor}) for (start, end), factor in slow]
            pictures.append(
                Bars(title=f"Slow links at {describe_size(size)}", unit="×", bars=bars,
                     text=f"Times the median link's time, from {SLOW:g} on.")
            )  # fmt: skip
    if not pictures:
        return None
    return Section(
        name="pairs", heading="Pairs of nodes", pictures=pictures,
        words="Messages from one node (rows) to another (columns), one pair at a time.",
    )  # fmt: skip


def _draw_matrix(name: str, size: int, links: Links) -> Grid:
    nodes = 1 + max(max(link) for link in links)
    each = math.ceil(nodes / MOST_ROWS)
    blocks: dict[tuple[int, int], float] = defaultdict(float)
    for (start, end), seconds in links.items():
        block = start // each, end // each
        blocks[block] = max(blocks[block], seconds)
    is_rate = size >= BANDWIDTH_BYTES
    least, usual = min(links.values()), quantile(list(links.values()), 0.5)
    # Twice the usual time is as hot as can be.
    top = max(2 * usual, usual + 1e-12) - least

    def draw(block: tuple[int, int]) -> Square | None:
        seconds = blocks.get(block)
        if seconds is None:
            return None
        text = f"{size / seconds * 1e-9:.3g}" if is_rate else f"{seconds * 1e6:.3g}"
        words = f"{label(block[0])} → {label(block[1])}: {describe_seconds(seconds)}"
        heat = min(1.0, (seconds - least) / top)
        return Square(text, words, heat, is_marked=seconds >= SLOW * usual)

    def label(block: int) -> str:
        last = min(nodes, (block + 1) * each) - 1
        return str(block * each) if each == 1 else f"{block * each}–{last}"

    rows = range(math.ceil(nodes / each))
    what = "bandwidth in GB/s" if is_rate else "time in µs"
    shared = f" Nodes share rows by {each}: the slowest link counts." if each > 1 else ""
    return Grid(
        title=f"{name}, {describe_size(size)}: {what}",
        text=f"Darker takes longer; framed: {SLOW:g} times the median link's time or more.{shared}",
        corner="from \\ to", rows=[label(row) for row in rows],
        columns=[label(column) for column in rows],
        squares=[[draw((row, column)) for column in rows] for row in rows],
    )  # fmt: skip
