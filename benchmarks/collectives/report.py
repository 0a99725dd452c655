"""The results of a measurement of all-reduces: the tables, the machine's limits, the record.

Rates are the usual ones of collectives' benchmarks (NVIDIA's nccl-tests): algbw is S/t, and
busbw is algbw * 2 (n - 1)/n, what each rank must send and receive at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.collectives.contenders import (
    BOUND_BYTES,
    COPIES,
    GLOO,
    LINK,
    LINK_BYTES,
    MPI,
    OWN,
    PEER_BYTES,
    PEER_READ,
    PREPARED,
    Cell,
    Contender,
)
from benchmarks.collectives.measurement import Group
from benchmarks.common.options import describe_seconds, describe_size, format_rows
from benchmarks.common.statistics import Summary, summarize
from mpiddp.schedules.registry import parse


def find(group: Group, maker: str) -> Contender:
    """The first contender of a kind, as there is one Gloo and one MPI_Allreduce."""
    return next(each for each in group.contenders if each.maker == maker)


HEADS = (
    "", "over", "buffer", "median", "95 % of median", "5–95 % of iterations", "algbw", "busbw",
    "× Gloo", "× MPI", "#wrong",
)  # fmt: skip


def format_table(group: Group, size: int) -> str:
    """One size: a row for each contender that was tried."""
    counts = {len(group.seconds(each, size)) for each in group.contenders} - {0}
    spread = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "no"
    times = f"{spread} iterations"
    rows = [_format_row(group, each, size) for each in group.contenders]
    title = f"{describe_size(size)} of {group.plan.type}, {times}"
    return "\n".join([title, *format_rows([HEADS, *filter(None, rows)])])


def _format_row(group: Group, row: Contender, size: int) -> list[str] | None:
    cell = Cell(row, size)
    if cell in group.refusals:
        return None
    head = [row.name, row.way, row.buffer]
    wrong = str(group.wrong.get(cell, 0))
    seconds = group.seconds(row, size)
    if not seconds:
        return [*head, *["–"] * (len(HEADS) - 4), wrong]
    times = summarize(seconds)
    between = times.interval
    cells = [
        describe_seconds(times.median),
        _describe_range(between.low, between.high) if between else "–",
        _describe_range(times.low, times.high),
        *(f"{rate:.3g}" for rate in find_rates(group.ranks, size, times.median)),
    ]
    for maker in (GLOO, MPI):
        speed = group.find_speed(cell, Cell(find(group, maker), size))
        itself = row.maker == maker
        cells.append("1" if itself else f"{speed.median:.2f}" if speed else "–")
    return [*head, *cells, wrong]


def find_rates(ranks: int, size: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw, in GB/s (1e9 bytes)."""
    rate = size / seconds * 1e-9
    return rate, rate * 2 * (ranks - 1) / ranks


def _describe_range(low: float, high: float) -> str:
    return f"{describe_seconds(low)} – {describe_seconds(high)}"


@dataclass(frozen=True)
class Limits:
    """What the machine itself can do; None where it was not asked or cannot be."""

    copy: Summary | None
    """Copying BOUND_BYTES, on all ranks at once, in the fastest way."""
    copy_way: str
    peer_read: Summary | None
    """Copying PEER_BYTES that another rank has just written."""
    link: Summary | None
    """Sending LINK_BYTES to another node."""


def find_limits(group: Group) -> Limits:

    def look_up(maker: str, size: int) -> Summary | None:
        values = group.seconds(Contender(maker), size)
        return summarize(values) if values else None

    copies = {name: look_up(name, BOUND_BYTES) for name in COPIES}
    known = {name: times for name, times in copies.items() if times is not None}
    way = min(known, key=lambda name: known[name].median, default="")
    return Limits(known.get(way), way, look_up(PEER_READ, PEER_BYTES), look_up(LINK, LINK_BYTES))


def describe_limits(group: Group) -> str:
    limits = find_limits(group)
    lines = []
    if limits.peer_read is not None:
        lines.append(
            f"a rank reads what its neighbour has just written ({describe_size(PEER_BYTES)}) at "
            f"{_describe_rate(PEER_BYTES, limits.peer_read)}"
        )
    if limits.copy is not None:
        way = limits.copy_way.removeprefix("copy ")
        lines.append(
            f"memory bound: {describe_seconds(limits.copy.median)} to read and write "
            f"{describe_size(BOUND_BYTES)} on each rank, all at once "
            f"({_describe_rate(BOUND_BYTES, limits.copy)}, {way})"
        )
    if limits.link is not None:
        lines.append(
            f"a link between two nodes carries {_describe_rate(LINK_BYTES, limits.link)}"
            f" one way ({LINK_BYTES / 1e6:g} MB)"
        )
    return "\n".join(lines)


def _describe_rate(size: int, times: Summary) -> str:
    slow, usual, fast = (size / seconds * 1e-9 for seconds in (times.high, times.median, times.low))
    return f"{usual:.3g} GB/s (5–95 %: {slow:.3g}–{fast:.3g})"


def describe_collectives(group: Group) -> str:
    found = group.collectives
    copying = "single copy" if found.get("single_copy") else "no single copy"
    parts = [f"mpiddp waits by {found.get('wait', '?')}", copying, *found.get("notes", ())]
    return "; ".join(parts)


def describe_refusals(group: Group) -> str:
    """What was left out, and why; one line for each contender and reason."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for cell, reason in group.refusals.items():
        label = cell.contender.label
        sizes.setdefault((label, reason), []).append(describe_size(cell.bytes))
    return "\n".join(
        f"left out: {label} at {', '.join(where)}: {reason}"
        for (label, reason), where in sizes.items()
    )


def format_group(group: Group) -> str:
    """All that is printed of one number of ranks, but for the targets."""
    title = (
        f"{group.ranks} ranks on {group.where}, {group.plan.repetitions} rounds; the slowest "
        "rank's times, × by round and then their median; rates in GB/s"
    )
    head = [title, describe_collectives(group)]
    named = (name for name in group.plan.algorithms if name != "auto")
    head += [f"{name}: {parse(name).summary}" for name in named]
    if group.greeting.get("nccl"):
        head.append(f"NCCL {group.greeting['nccl']} on {group.greeting['gpu']}")
    if group.others_share is not None:
        head.append(f"other programs took {group.others_share:.0%} of the cores meanwhile")
    head += filter(None, [describe_limits(group), describe_refusals(group)])
    return "\n\n".join(["\n".join(head), *(format_table(group, s) for s in group.plan.sizes)])


def list_wrong(groups: Sequence[Group]) -> list[str]:
    return [
        f"{cell.contender.label} at {describe_size(cell.bytes)} on {group.ranks} ranks: "
        f"{count} wrong elements"
        for group in groups
        for cell, count in group.wrong.items()
        if count
    ]


def describe_groups(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The groups for a record: every iteration, in nanoseconds, and what was computed of them."""
    return [
        {
            "ranks": group.ranks,
            "nodes": group.nodes,
            "plan": asdict(group.plan),
            "collectives": dict(group.collectives),
            "framework": dict(group.greeting),
            "others_share": group.others_share,
            "limits": asdict(find_limits(group)),
            "refusals": {cell.name: why for cell, why in group.refusals.items()},
            "cells": [
                _describe_cell(group, row, size)
                for size in group.plan.sizes
                for row in group.contenders
                if group.seconds(row, size)
            ],
            "probes": _describe_probes(group),
        }
        for group in groups
    ]


def _describe_cell(group: Group, row: Contender, size: int) -> dict[str, Any]:
    cell = Cell(row, size)
    times = summarize(group.seconds(row, size))
    algorithm_rate, bus_rate = find_rates(group.ranks, size, times.median)
    speeds = {
        f"over_{maker}": group.find_speed(cell, Cell(find(group, maker), size))
        for maker in (GLOO, MPI)
    }
    return {
        "name": row.name,
        "over": row.way,
        "algorithm": row.algorithm if row.maker in (OWN, PREPARED) else None,
        "buffer": row.buffer,
        "bytes": size,
        "seconds": asdict(times),
        "algbw": algorithm_rate,
        "busbw": bus_rate,
        "wrong": group.wrong.get(cell, 0),
        **{name: asdict(speed) if speed else None for name, speed in speeds.items()},
        **_describe_series(group, cell),
    }


def _describe_probes(group: Group) -> Mapping[str, Any]:
    makers = (*COPIES, PEER_READ, LINK)
    cells = [cell for cell in group.series if cell.contender.maker in makers]
    return {cell.name: _describe_series(group, cell) for cell in cells}


def _describe_series(group: Group, cell: Cell) -> dict[str, Any]:
    series = group.series[cell]
    return {
        "positions": list(series.positions),
        "nanoseconds": [[round(t * 1e9) for t in visit.seconds] for visit in series.samples],
    }
