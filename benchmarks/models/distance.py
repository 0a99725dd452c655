"""``python -m benchmarks distance``: how far bytes travel, and which links carry most.

The prices of ``simulate`` know no distance: two messages between nodes cost the same. On a torus a
message passes through all links between its ends, and between groups of switches there are fewer
links than inside them. This command counts what crosses them, for each algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.options import (
    Algorithms,
    Count,
    format_rows,
    make_model_reader,
)
from benchmarks.common.plotting import COLOURS, Line, LinePanel, draw_panels
from benchmarks.common.statistics import exact
from benchmarks.common.trials import show_progress
from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import at_least
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import PICTURE, Outputs, check_outputs, find, writes
from mpiddp.schedules.cost import flat, simulate
from mpiddp.schedules.registry import LARGEST_SIMULATED, Choice, parse
from mpiddp.schedules.schedule import Schedule
from mpiddp.wording import print_text

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

COMPARED = (
    "ring",
    "recursive-doubling",
    "halving-doubling",
    "binomial-tree",
    "pat",
    "pat:aggregation=4",
    "swing",
    "swing:variant=latency",
    "bine",
    "bine:variant=butterfly",
)
RANKS = (48, 64)
PLOTTED_RANKS = (12, 16, 24, 32, 48, 64, 96)
"""Powers of two, and numbers between them."""


@dataclass(frozen=True)
class Shown:
    """What the figure shows of one measure, if no algorithms are named."""

    measure: str
    title: str
    algorithms: tuple[str, ...]


SHOWN = (
    Shown(
        "messages",
        "Messages one after the other",
        ("ring", "halving-doubling", "pat", "pat:aggregation=4"),
    ),
    Shown(
        "volume",
        "Bytes through the busiest rank, × S",
        ("ring", "halving-doubling", "pat", "swing"),
    ),
    Shown(
        "link",
        "Bytes through the busiest link, × S",
        ("recursive-doubling", "swing:variant=latency", "halving-doubling", "swing", "pat", "ring"),
    ),
    Shown(
        "crossing",
        "Bytes between groups, × S",
        ("halving-doubling", "bine:variant=butterfly", "binomial-tree", "bine", "pat", "ring"),
    ),
)


@dataclass(frozen=True)
class Travel:
    """What an all-reduce moves; bytes as multiples of the buffer S."""

    messages: float
    """Of the busiest rank in each step: α is paid so often."""
    volume: float
    """Bytes of the busiest rank in each step: β is paid so often."""
    longest: float
    """The longest message: what a buffer must hold that packs it."""
    hops: float
    """Links that a byte passes through, in the mean."""
    link: float
    """Bytes of the busiest link of the torus in each step."""
    crossing: float
    """Bytes from one group to another, in all."""


# ---- measuring ----------------------------------------------------------------------------


def measure(schedule: Schedule, torus: Sequence[int], group: int) -> Travel:
    """``torus``: places in each dimension, which the ranks fill row by row.

    Messages take the shorter way round in one dimension after the other, and half of each way where
    both are as short. ``group``: neighbouring ranks that form a group.
    """
    count = schedule.chunks * schedule.ranks
    longest = hops = total = link = crossing = 0.0
    for step in schedule.steps:
        if not step:
            continue
        table = np.array(step, dtype=np.int64)
        source, target = table[:, 0], table[:, 1]
        size = (table[:, 3] - table[:, 2]) / schedule.chunks
        pairs = source * schedule.ranks + target
        longest = max(longest, _longest(pairs if schedule.packed else np.arange(len(pairs)), size))
        loads, passed = _route(source, target, size, torus)
        link += float(loads.max())
        hops, total = hops + passed, total + float(size.sum())
        crossing += float(size[source // group != target // group].sum())
    messages, volume = (
        simulate(schedule, count, machine).seconds for machine in (flat(1, 0), flat(0, 1 / count))
    )
    return Travel(messages, volume, longest, hops / total if total else 0.0, link, crossing)


def _longest(pairs: Integers, size: Floats) -> float:
    return float(np.bincount(np.unique(pairs, return_inverse=True)[1], size).max())


def _route(
    source: Integers, target: Integers, size: Floats, torus: Sequence[int]
) -> tuple[Floats, float]:
    """The bytes on each link, and the sum over all links."""
    at = np.stack(np.unravel_index(source, torus))
    end = np.stack(np.unravel_index(target, torus))
    loads = np.zeros((2 * len(torus), math.prod(torus)))
    for dimension, places in enumerate(torus):
        up = (end[dimension] - at[dimension]) % places
        share = np.where(2 * up == places, 0.5, (2 * up < places).astype(float))
        for direction, distance, part in ((1, up, share), (-1, places - up, 1 - share)):
            for hop in range(places):
                goes = (part > 0) & (distance > hop) & (up > 0)
                if not goes.any():
                    break
                place = at[:, goes].copy()
                place[dimension] = (place[dimension] + direction * hop) % places
                row = loads[2 * dimension + (direction < 0)]
                np.add.at(row, np.ravel_multi_index(tuple(place), torus), (size * part)[goes])
        at[dimension] = end[dimension]
    return loads, float(loads.sum())


def fill_torus(ranks: int, dimensions: int) -> tuple[int, ...]:
    """So many dimensions whose places are the ranks, as nearly alike as it goes."""
    if dimensions == 1:
        return (ranks,)
    side = round(ranks ** (1 / dimensions))
    first = min((d for d in range(1, ranks + 1) if ranks % d == 0), key=lambda d: abs(d - side))
    return (first, *fill_torus(ranks // first, dimensions - 1))


# ---- the command --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is compared, and on which network."""

    algorithms: Algorithms = ()
    """(default: PAT, Swing, Bine trees and what they improve on)"""
    ranks: Annotated[tuple[int, ...], Argument("N", at_least(2, LARGEST_SIMULATED))] = ()
    """Numbers of ranks (default: 48 64; in a picture 12 to 96)."""
    dimensions: Count = 1
    """Of the torus that the ranks fill row by row; 1 is a ring."""
    group: Count = 10
    """Neighbouring ranks in a group, between which links are few."""
    output: Annotated[Outputs, writes(PICTURE)] = ()
    """Draw the figures against the number of ranks."""


READER = make_model_reader(
    "distance",
    "Count how far the bytes of an all-reduce travel: through how many links of a ring "
    "or torus, how many through the busiest link, and how many from one group of neighbouring "
    "ranks to another.",
    Options,
    "pat:aggregation=4",
)


def main(arguments: Sequence[str]) -> None:
    options = pick(Options, READER.read(arguments))
    check_outputs(options.output)
    options = replace(options, ranks=options.ranks or (PLOTTED_RANKS if options.output else RANKS))
    if options.output and len(set(options.ranks)) < 2:
        raise ConfigurationError("--output needs two numbers of ranks at least")
    found = measure_all(options)
    print_text(*describe(options, found))
    for path in find(options.output, PICTURE):
        draw(path, options, found)


Found = dict[tuple[str, int], Travel]
"""By algorithm and number of ranks."""


def measure_all(options: Options) -> Found:
    choices: tuple[Choice, ...] = options.algorithms or tuple(map(parse, COMPARED))
    found = {}
    with show_progress(len(options.ranks) * len(choices), "measure") as bar:
        for ranks in options.ranks:
            torus = fill_torus(ranks, options.dimensions)
            for choice in choices:
                found[str(choice), ranks] = measure(choice.build(ranks), torus, options.group)
                bar.update()
    return found


def describe(options: Options, found: Found) -> Iterator[str]:
    """A table for each number of ranks."""
    heads = ("messages", "bytes", "longest message", "hops", "busiest link", "between groups")
    yield "messages and bytes: of the busiest rank, step by step; bytes as multiples of the buffer"
    for ranks in options.ranks:
        torus = fill_torus(ranks, options.dimensions)
        shape = " × ".join(map(str, torus))
        kind = f"a ring of {shape}" if len(torus) == 1 else f"a torus of {shape}"
        rows = [["algorithm", *heads]]
        for name, travel in ((name, each) for (name, n), each in found.items() if n == ranks):
            values = [getattr(travel, each.name) for each in fields(Travel)]
            rows.append([name, f"{values[0]:,.0f}", *(f"{value:.3g}" for value in values[1:])])
        yield ""
        yield f"{ranks} ranks on {kind}, in groups of {options.group}"
        yield from format_rows(rows)


def draw(path: Path, options: Options, found: Found) -> None:
    kind = "ring" if options.dimensions == 1 else f"{options.dimensions}-dimensional torus"
    note = f"ranks on a {kind}, groups of {options.group} neighbours; S is the buffer"
    panels = [_make_panel(shown, options, found) for shown in SHOWN]
    draw_panels(
        path, [panels[:2], panels[2:]], (14, 8), "What an all-reduce moves, and how far", note
    )


def _make_panel(shown: Shown, options: Options, found: Found) -> LinePanel:
    every = list(dict.fromkeys(name for name, _ in found))
    lines = []
    for name in map(str, options.algorithms or shown.algorithms):
        # Nothing has no place on a logarithmic axis.
        values = [getattr(found[name, n], shown.measure) or math.nan for n in options.ranks]
        style = every.index(name) % len(COLOURS)
        text = name.replace(":variant=", " ")
        lines.append(Line(text, options.ranks, list(map(exact, values)), style))
    return LinePanel(
        title=shown.title, lines=lines, label="ranks",
        ticks={ranks: str(ranks) for ranks in options.ranks}, describe="{:g}".format,
        base=2 if any(line.end for line in lines) else None,
    )  # fmt: skip
