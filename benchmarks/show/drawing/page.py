"""An animated page: one HTML document that plays schedules, offline, in any browser.

The schedules in it are those of the registry, written as data with what each step leaves behind and
what it costs (`figures`); its scripts show them, and have no algorithm or cost model of their own.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from benchmarks.records.machines import GIGABIT, GIGABYTE, MICROSECOND
from benchmarks.show.drawing.figures import Loads, describe_bound, describe_states, find_ends
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.cost import flat, split_in_two
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.registry import Choice, find, names
from mpiddp.schedules.schedule import Collective, Schedule
from mpiddp.wording import count_noun

LARGEST = 64
"""Ranks; with more of them the cells are too small."""
LARGEST_GRID = 64 * 256
"""Ranks times columns, that is, chunks that some message tells apart."""
OFFERED = (*range(1, 9), 10, 12, 16)
"""Numbers of ranks that every page has, beside the one that was asked for."""
SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Numbers of segments that can be chosen, beside those that were asked for."""
SCRIPTS = (
    "page_model.js", "page_clock.js", "page_words.js", "page_panel.js", "page_settings.js",
    "page.js",
)  # fmt: skip
"""In this order, since scripts run with those before them."""
BEGIN = "Every rank begins with its own buffer; in the end "
OWN, ALL = "@ has its own buffer", "@ has all of it"
WORDS = {
    Collective.ALL_REDUCE: (BEGIN + "every rank has the sum of all of them.", OWN,
                            "@ has the whole sum"),
    Collective.REDUCE: (BEGIN + "one of them, the root, has the sum.", OWN,
                        "the root has the whole sum"),
    Collective.REDUCE_SCATTER: (BEGIN + "every rank has its part of the sum.", OWN,
                                "every owner has the whole sum of its chunks"),
    Collective.ALL_GATHER: ("Every rank begins with its part of a buffer; in the end all have it.",
                            "every owner has its chunks", ALL),
    Collective.BROADCAST: ("One rank, the root, begins with the buffer; in the end all have it.",
                           "the root has the buffer", ALL),
}  # fmt: skip
"""What a collective does, and how it stands before the first step and after the last, where @ is
every rank, or every one that contributes."""
MEBIBYTE = 1 << 20
MACHINE = flat(10 * MICROSECOND, 1 / (10 * GIGABIT), 1 / (10 * GIGABYTE))
"""The commands' defaults."""


def draw_page(
    choice: Choice,
    ranks: int,
    nodes: Sequence[int] | None = None,
    *,
    beside: Choice | None = None,
    size: int = MEBIBYTE,
    machine: Machine = MACHINE,
) -> str:
    """The page that begins with ``choice`` on ``ranks`` ranks, with ``beside`` next to it if given.

    ``nodes`` has the ranks of each node; it holds for ``ranks`` ranks, other numbers are without.
    Prices begin with a buffer of ``size`` bytes on ``machine``, which readers may change. Raises
    ConfigurationError for what cannot be built, is too large to be looked at, or has no field.
    """
    if ranks > LARGEST:
        raise ConfigurationError(
            f"the page shows up to {LARGEST} ranks, not {ranks}: write an .svg, or use the terminal"
        )
    chosen = [choice] if beside is None else [choice, beside]
    for one in chosen:
        _check_size(one, one.build(ranks, nodes))
    fields = _describe_fields(size, machine)
    words, before, after = WORDS[choice.collective]
    data = {**_collect(chosen, ranks, nodes), "fields": fields, "before": before, "after": after}
    texts = {
        "script": "\n".join(map(read, SCRIPTS)),
        "heading": choice.collective.value.capitalize(),
        "words": words,
    }
    title = f"{' and '.join(map(str, chosen))} on {count_noun(ranks, 'rank')}"
    return fill(read("page.html"), title, read("base.css") + read("page.css"), texts, data)


def fill(
    template: str, title: str, style: str, texts: Mapping[str, str], data: Mapping[str, Any]
) -> str:
    """The document of a template: with texts and data in place of @their names@.

    Titles are escaped, and so are data; texts are HTML.
    """
    # "<" would let a name close the element that the data stand in.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"title": html.escape(title), "style": style, **texts, "data": embedded}
    # At once, or a text could bring a name that the next one is put in for.
    return re.sub(
        r"@([a-z]+)@", lambda found: parts.get(found[1], found[0]), read("head.html") + template
    )


def read(name: str, package: str = __package__) -> str:
    """A file that lies beside the modules of a package."""
    return resources.files(package).joinpath(name).read_text("utf-8")


def _check_size(choice: Choice, schedule: Schedule) -> None:
    cells = schedule.ranks * (len(find_ends(schedule)) - 1)
    if cells > LARGEST_GRID:
        raise ConfigurationError(
            f"the page shows up to {LARGEST_GRID} cells (ranks times chunks), and {choice} on "
            f"{schedule.ranks} ranks has {cells}: choose fewer segments, an .svg or the terminal"
        )


def _describe_fields(size: int, machine: Machine) -> Mapping[str, Mapping[str, float]]:
    """What each field of the page begins with, in its unit, and its limits."""
    if machine.uplink != machine.between.seconds_per_byte:
        raise ConfigurationError(
            "the page prices nodes whose link is as fast as one rank's between nodes, "
            f"{machine.between.seconds_per_byte} s for a byte, not {machine.uplink}"
        )
    fields = {"size": _make_field("buffers", size / MEBIBYTE, "MiB", 0, 1 << 20)}
    links = {"latency": machine.between, "insideLatency": machine.inside}
    for name, link in links.items():
        fields[name] = _make_field("latencies", link.latency / MICROSECOND, "µs", 0, 10**6)
    links = {"bandwidth": machine.between, "insideBandwidth": machine.inside}
    for name, link in links.items():
        gigabits = _invert(link.seconds_per_byte * GIGABIT)
        fields[name] = _make_field("bandwidths", gigabits, "Gbit/s", 0.001, 10**6)
    gigabytes = _invert(machine.addition * GIGABYTE)
    fields["additions"] = _make_field("additions", gigabytes, "GB/s", 0.001, 10**6)
    return fields


def _invert(value: float) -> float:
    return 1 / value if value else math.inf


def _make_field(
    what: str, value: float, unit: str, least: float, most: float
) -> Mapping[str, float]:
    if not least <= value <= most:
        raise ConfigurationError(
            f"the page has {what} of {least} to {most:,} {unit}, not {value:g}: use the terminal"
        )
    # Sizes are whole bytes, and exact; of the others the last bits are the division's.
    exact = value if unit == "MiB" else float(f"{value:.12g}")
    return {"value": int(exact) if exact.is_integer() else exact, "min": least, "max": most}


def _collect(
    chosen: Sequence[Choice], ranks: int, nodes: Sequence[int] | None
) -> Mapping[str, Any]:
    whole = [replace(choice, segments=1) for choice in chosen]
    every = (Choice(find(name), collective=whole[0].collective) for name in names())
    entries = {str(one): one for one in (*every, *whole)}
    segments = sorted({*SEGMENTS, *(choice.segments for choice in chosen)})
    terms: dict[tuple[Any, ...], int] = {}
    schedules = {
        str(number): _pack_all(entries, number, nodes if number == ranks else None, segments, terms)
        for number in sorted({*OFFERED, ranks})
    }
    # One rank alone makes every collective by every algorithm.
    possible = set(map(str, whole)).union(*(schedules[str(n)] for n in OFFERED if n > 1))
    return {
        "algorithms": {name: one.summary for name, one in entries.items() if name in possible},
        "start": {
            "ranks": ranks,
            "panels": [
                {"name": str(one), "segments": choice.segments}
                for one, choice in zip(whole, chosen, strict=True)
            ],
        },
        "segments": segments,
        "nodes": {} if nodes is None else {str(ranks): list(nodes)},
        "schedules": schedules,
        "terms": list(terms),
    }


def _pack_all(
    entries: Mapping[str, Choice],
    ranks: int,
    nodes: Sequence[int] | None,
    segments: Sequence[int],
    terms: dict[tuple[Any, ...], int],
) -> Mapping[str, Any]:
    """By name; what does not support so many ranks, is wrong, or is too large, is left out."""
    packed = {}
    for name, choice in entries.items():
        try:
            schedule = choice.build(ranks, nodes)
            _check_size(choice, schedule)
        except (ConfigurationError, ScheduleError):
            continue
        packed[name] = _pack(schedule, nodes or (1,) * ranks, segments, terms)
        if nodes is None and ranks > 1 and choice.algorithm.knows_nodes:
            packed[name]["halves"] = split_in_two(ranks)
    return packed


def _pack(
    schedule: Schedule,
    nodes: Sequence[int],
    segments: Sequence[int],
    terms: dict[tuple[Any, ...], int],
) -> dict[str, Any]:
    """A schedule; for each number of segments, what its steps cost, as places in ``terms``."""
    states, loads = describe_states(schedule), Loads(schedule, nodes)
    cells = schedule.ranks * (len(states["ends"]) - 1)
    starts = states["ends"][:-1] if schedule.collective.gathers else []
    return {
        **states,
        "members": schedule.members,
        **({"owners": [schedule.owners[chunk] for chunk in starts]} if starts else {}),
        **({"packed": True} if schedule.packed else {}),
        "bound": describe_bound(schedule, nodes),
        "terms": {
            count: [terms.setdefault(step, len(terms)) for step in loads.describe(count)]
            for count in segments
            if count * cells <= LARGEST_GRID
        },
    }
