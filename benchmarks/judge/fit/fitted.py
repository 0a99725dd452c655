"""A fit: what messages within nodes and between them take, and additions; and its file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.judge.fit.segments import Point, Segment, fit_segments
from benchmarks.records.contenders import CONDITIONS, POINT_TO_POINT, REDUCTION
from benchmarks.records.options import describe_seconds
from benchmarks.records.schema import Cell, Record
from benchmarks.records.statistics import quantile
from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import read_json, write_whole
from mpiddp.schedules.machine import Machine, MessageCost, Piece
from mpiddp.wording import count_noun, describe_size

KIND, VERSION = "fit", 1
"""Of the file; a change that breaks readers raises the version."""
CONTENDER = "MPI_Send"
NODE, NETWORK = "node", "network"
BOTH = "both"
"""The direction of messages that two ranks send each other at once."""
LARGE = 64 << 10
"""Bytes from which on it is compared what messages take both ways at once."""
PLACES = {NODE: "inside a node", NETWORK: "between nodes"}
COMMAND = "python -m benchmarks point-to-point"
WORTHLESS = 0.5
"""The median error of a line that says nothing."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Times by size, and the lines through them."""

    points: tuple[Point, ...]
    """What was measured, by rising size; of one size there may be several."""
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments or not self.cost.is_possible:
            raise ContentError("lines that no machine can have")

    @property
    def cost(self) -> MessageCost:
        first, *others = self.segments
        pieces = (Piece(each.start, each.latency, each.seconds_per_byte) for each in others)
        return MessageCost(first.latency, first.seconds_per_byte, tuple(pieces))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A machine as it was measured, without any collective's time."""

    contender: str
    """Whose messages were timed."""
    environment: Mapping[str, Any]
    """Of the measurement."""
    links: Mapping[str, Curve]
    """Of messages inside a node (``node``), between nodes (``network``), or both."""
    addition: Curve | None
    """None if no addition was timed."""
    both_ways: Mapping[str, float]
    """How many times as long large messages of a link take while others go the other way, if that
    was measured. The model does without."""

    def __post_init__(self) -> None:
        if not self.links or not set(self.links) <= set(PLACES):
            raise ContentError(f"links: expected {' or '.join(PLACES)}")

    def make_machine(self, nodes: Sequence[int], shared: float | None = None) -> Machine:
        """The machine for nodes of so many ranks.

        ``shared``: seconds per byte of a node's link. Raises ConfigurationError if messages that
        such ranks exchange were not measured.
        """
        needed = [NODE] * (max(nodes) > 1) + [NETWORK] * (len(nodes) > 1)
        for link in needed:
            if link not in self.links:
                raise ConfigurationError(
                    f"the fit has no messages {PLACES[link]}, which {sum(nodes)} ranks on "
                    f"{count_noun(len(nodes), 'node')} exchange: measure them, too ({COMMAND})"
                )
        any_link = next(iter(self.links.values()))
        inside, between = (self.links.get(link, any_link).cost for link in (NODE, NETWORK))
        adding = self.addition.cost if self.addition is not None else None
        gamma = adding.seconds_per_byte if adding is not None else 0.0
        return Machine(inside, between, gamma, shared, adding)


def fit_records(records: Sequence[Record], contender: str | None, type_: str) -> Fit:
    """Fit the messages of one contender, and additions of one type.

    Raises ConfigurationError if they were not measured, or for too few sizes.
    """
    messages = list(_list_cells(records, POINT_TO_POINT))
    if not messages:
        names = ", ".join(str(record.path) for record in records)
        raise ConfigurationError(
            f"{names}: expected times of messages (cells of {POINT_TO_POINT!r}), found none; "
            f"measure them by {COMMAND} --output FILE.jsonl"
        )
    contender = _choose(contender, [cell.contender for cell in messages])
    own = [cell for cell in messages if cell.contender == contender]
    links: dict[str, Curve] = {}
    both_ways: dict[str, float] = {}
    for link, place in PLACES.items():
        there = [cell for cell in own if cell.at.get("link") == link]
        one_way = [cell for cell in there if cell.at.get("direction") != BOTH]
        if one_way:
            links[link] = _fit(one_way, f"of messages {place}")
            mutual = [cell for cell in there if cell not in one_way]
            ratio = _compare(mutual, links[link])
            both_ways |= {} if ratio is None else {link: ratio}
    added = [cell for cell in _list_cells(records, REDUCTION) if cell.at["type"] == type_]
    return Fit(
        contender=contender,
        environment=records[0].environment,
        links=links,
        addition=_fit(added, f"of additions of {type_}") if added else None,
        both_ways=both_ways,
    )


def _compare(cells: Sequence[Cell], curve: Curve) -> float | None:
    """The median ratio of large messages to those of the curve; None if there are none."""
    ratios = [
        cell.summary.median / curve.cost.seconds(float(cell.bytes))
        for cell in cells
        if cell.bytes >= LARGE
    ]
    return quantile(ratios, 0.5) if ratios else None


def _list_cells(records: Iterable[Record], quantity: str) -> Iterator[Cell]:
    for record in records:
        for cell in record.cells:
            if cell.quantity == quantity and CONDITIONS.isdisjoint(cell.at):
                yield cell


def _choose(wanted: str | None, found: Iterable[str]) -> str:
    """The contender whose messages are fitted. Raises ConfigurationError if there is none."""
    names = list(dict.fromkeys(found))
    if wanted is None and len(names) == 1:
        return names[0]
    chosen = [name for name in names if name.lower() == (wanted or CONTENDER).lower()]
    if not chosen:
        raise ConfigurationError(
            f"--contender: expected one of those whose messages were timed, "
            f"{', '.join(map(repr, names))}, found {wanted or CONTENDER!r}"
        )
    return chosen[0]


def _fit(cells: Sequence[Cell], what: str) -> Curve:
    points = tuple(sorted(map(_make_point, cells)))
    try:
        return Curve(points=points, segments=fit_segments(points))
    except ValueError as error:
        raise ConfigurationError(f"times {what}: {error}") from None


def _make_point(cell: Cell) -> Point:
    """The median, and half of its interval's width; few samples have no interval."""
    interval, median = cell.summary.interval, cell.summary.median
    error = (interval.high - interval.low) / 2 / median if interval and median > 0 else 0.0
    return Point(float(cell.bytes), median, error)


# ---- the file -----------------------------------------------------------------------------


def write_fit(path: Path, fit: Fit) -> None:
    content = {"kind": KIND, "version": VERSION, **asdict(fit)}
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class _Form:
    kind: str
    version: int


def is_fit(path: Path) -> bool:
    """Whether the file is a fit, of any version, and no record."""
    try:
        return read_json(path, _Form).kind == KIND
    except ConfigurationError:
        return False


def read_fit(path: Path) -> Fit:
    """Raises ConfigurationError if the file is no fit of this version."""
    try:
        form = read_json(path, _Form)
        if form != _Form(KIND, VERSION):
            raise ContentError(
                f"{path}: expected kind {KIND!r} and version {VERSION}, found {form.kind!r} and "
                f"{form.version}"
            )
        return read_json(path, Fit)
    except ContentError as error:
        raise ContentError(
            f"{error}; python -m benchmarks fit RECORD… --output FILE.json writes a fit"
        ) from None


# ---- in words -----------------------------------------------------------------------------


def list_curves(fit: Fit) -> dict[str, Curve]:
    """All that was fitted, by what it is."""
    named = {f"messages {PLACES[link]}": curve for link, curve in fit.links.items()}
    return named | ({"additions": fit.addition} if fit.addition is not None else {})


def describe_range(curve: Curve, place: int) -> str:
    """The sizes for which a segment holds."""
    following = curve.segments[place + 1 :]
    low = describe_size(math.ceil(curve.segments[place].start))
    if not following:
        return f"from {low}" if place else "all sizes"
    high = describe_size(math.ceil(following[0].start))
    return f"{low} to {high}" if place else f"below {high}"


def describe_line(segment: Segment) -> tuple[str, str]:
    """Its α, and its bytes per second."""
    latency = describe_seconds(abs(segment.latency))
    rate = f"{1e-9 / segment.seconds_per_byte:.3g} GB/s" if segment.seconds_per_byte else "—"
    return f"−{latency}" if segment.latency < 0 else latency, rate


def describe_fit(fit: Fit) -> str:
    """One line: α of the smallest sizes, β of the largest."""
    parts = []
    for name, curve in list_curves(fit).items():
        latency, rate = describe_line(curve.segments[0])[0], describe_line(curve.segments[-1])[1]
        pieces = f" in {len(curve.segments)} pieces" if len(curve.segments) > 1 else ""
        parts.append(f"{name} {latency} and {rate}{pieces}")
    gamma = "" if fit.addition is not None else ", γ not measured"
    return f"fit of {fit.contender}: {', '.join(parts)}{gamma}"
