"""An animated page: one HTML document that plays schedules, offline, in any browser.

The schedules in it are those of the registry, written as data; its script cuts them in segments,
replays and prices them, and has no algorithm of its own.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from itertools import chain
from typing import Any

from mpiddp.collectives.cost import split
from mpiddp.collectives.registry import Choice, find, names
from mpiddp.collectives.schedule import Schedule
from mpiddp.errors import ConfigurationError

LARGEST = 64
"""Ranks; with more of them nothing can be told apart."""
LARGEST_GRID = 64 * 256
"""Ranks times columns, that is, chunks that some message tells apart."""
OFFERED = (*range(1, 9), 10, 12, 16)
"""Numbers of ranks that every page has, beside the one that was asked for."""


def draw_page(
    choice: Choice, ranks: int, nodes: Sequence[int] | None = None, *, beside: Choice | None = None
) -> str:
    """The page that begins with ``choice`` on ``ranks`` ranks, with ``beside`` next to it if given.

    ``nodes`` has the ranks of each node; it holds for ``ranks`` ranks, other numbers are without.
    Raises ConfigurationError for what cannot be built or is too large to be looked at.
    """
    if ranks > LARGEST:
        raise ConfigurationError(
            f"the page shows up to {LARGEST} ranks, not {ranks}: use --svg or the terminal"
        )
    chosen = [choice] if beside is None else [choice, beside]
    for one in chosen:
        _check_size(one, one.build(ranks, nodes))
    document = {
        "title": html.escape(_name_all(chosen, ranks)),
        "style": _read("page.css"),
        "script": _read("page.js"),
        "data": _embed(_collect(chosen, ranks, nodes)),
    }
    page = _read("page.html")
    for key, text in document.items():
        page = page.replace(f"@{key}@", text, 1)
    return page


def _check_size(choice: Choice, schedule: Schedule) -> None:
    cells = schedule.ranks * _count_columns(schedule)
    if cells > LARGEST_GRID:
        raise ConfigurationError(
            f"the page shows up to {LARGEST_GRID} cells (ranks times chunks), and {choice} on "
            f"{schedule.ranks} ranks has {cells}: choose fewer segments, --svg or the terminal"
        )


def _count_columns(schedule: Schedule) -> int:
    """Chunks, neighbours that no transfer tells apart counted as one."""
    transfers = chain.from_iterable(schedule.steps)
    return len({0, schedule.chunks}.union(*((t.lo, t.hi) for t in transfers))) - 1


def _name_all(chosen: Sequence[Choice], ranks: int) -> str:
    return f"{' and '.join(map(str, chosen))} on {ranks} rank{'s' if ranks > 1 else ''}"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _embed(data: Mapping[str, Any]) -> str:
    # "<" would let a name close the element that the data stand in.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _collect(
    chosen: Sequence[Choice], ranks: int, nodes: Sequence[int] | None
) -> Mapping[str, Any]:
    whole = [replace(choice, segments=1) for choice in chosen]
    entries = {str(one): one for one in (*(Choice(find(name)) for name in names()), *whole)}
    return {
        "algorithms": {
            name: one.algorithm.summary.replace("``", "") for name, one in entries.items()
        },
        "start": {
            "ranks": ranks,
            "panels": [
                {"name": str(one), "segments": choice.segments}
                for one, choice in zip(whole, chosen, strict=True)
            ],
        },
        "largestGrid": LARGEST_GRID,
        "schedules": {
            str(number): _pack_all(entries, number, nodes if number == ranks else None)
            for number in sorted({*OFFERED, ranks})
        },
    }


def _pack_all(
    entries: Mapping[str, Choice], ranks: int, nodes: Sequence[int] | None
) -> Mapping[str, Any]:
    """By name; what cannot be on so many ranks, or is too large, is left out."""
    packed = {}
    for name, choice in entries.items():
        try:
            schedule = choice.build(ranks, nodes)
            _check_size(choice, schedule)
        except ConfigurationError:
            continue
        halves = split(ranks, min(ranks, 2)) if choice.algorithm.knows_nodes else ()
        packed[name] = _pack(schedule, nodes or halves)
    return packed


def _pack(schedule: Schedule, nodes: Sequence[int]) -> Mapping[str, Any]:
    """Each step flat, five integers for a transfer; what can be guessed is left out."""
    packed: dict[str, Any] = {
        "chunks": schedule.chunks,
        "steps": [list(map(int, chain.from_iterable(step))) for step in schedule.steps],
    }
    if len(schedule.members) < schedule.ranks:
        packed["members"] = schedule.members
    if len(nodes) > 1:
        packed["nodes"] = list(nodes)
    return packed
