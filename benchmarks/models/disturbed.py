"""What a late or slow rank, or a slow link, costs each algorithm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from benchmarks.common.options import ITEM, TIMES, describe_seconds, format_rows, in_words
from benchmarks.common.records import RecordWriter, make_cell
from benchmarks.common.trials import show_progress
from benchmarks.models.prices import QUANTITY, Place, Question
from mpiddp.options.fields import Argument
from mpiddp.schedules.machine import Machine
from mpiddp.schedules.registry import Choice
from mpiddp.schedules.timeline import Disturbance, Timeline
from mpiddp.wording import describe_size


class Straggler(NamedTuple):
    rank: int
    delay: float
    """Seconds by which it begins late."""
    factor: float
    """How many times as long its messages and additions take."""

    def __str__(self) -> str:
        late = f"{describe_seconds(self.delay)} late" if self.delay else ""
        return f"rank {self.rank} {late or f'{self.factor:g} × as slow'}"


class SlowLink(NamedTuple):
    nodes: tuple[int, int]
    factor: float

    def __str__(self) -> str:
        return f"the link {self.nodes[0]}-{self.nodes[1]} {self.factor:g} × as slow"


def read_straggler(text: str) -> Straggler:
    """``RANK:SECONDS`` or ``RANK:xFACTOR``."""
    found = re.fullmatch(r"(\d+):(?:[x×](\d+(?:\.\d+)?)|(.+))", text)
    factor = float(found[2] or 1) if found else 0.0
    if found is None or factor < 1:
        raise ValueError(
            f"expected RANK:SECONDS or RANK:xFACTOR, for example 3:5ms or 3:x2, found {text!r}"
        )
    delay = in_words("s", TIMES)(found[3]) if found[3] else 0.0
    return Straggler(int(found[1]), delay, factor)


def read_slow_link(text: str) -> SlowLink:
    """``A-B:xFACTOR``: two nodes, or one and itself for messages inside it."""
    found = re.fullmatch(r"(\d+)-(\d+):[x×](\d+(?:\.\d+)?)", text)
    if found is None or float(found[3]) < 1:
        raise ValueError(f"expected A-B:xFACTOR with two nodes, for example 0-3:x4, found {text!r}")
    return SlowLink((int(found[1]), int(found[2])), float(found[3]))


Stragglers = Annotated[tuple[Straggler, ...], Argument("RANK:SECONDS", read_straggler)]
SlowLinks = Annotated[tuple[SlowLink, ...], Argument("A-B:xFACTOR", read_slow_link)]


def make_disturbance(stragglers: Sequence[Straggler], links: Sequence[SlowLink]) -> Disturbance:
    return Disturbance(
        delays={each.rank: each.delay for each in stragglers if each.delay},
        slow_ranks={each.rank: each.factor for each in stragglers if each.factor > 1},
        slow_links={each.nodes: each.factor for each in links},
    )


@dataclass(frozen=True)
class Times:
    """Of one algorithm, for each size, in seconds: when the last member ends."""

    name: str
    alone: tuple[float, ...]
    disturbed: tuple[float, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(
            after - before for before, after in zip(self.alone, self.disturbed, strict=True)
        )


def time_all(question: Question, disturbance: Disturbance) -> list[tuple[Place, list[Times]]]:
    """For each place. Raises ConfigurationError if one lacks what is disturbed."""
    places, choices = question.places, question.choices
    for nodes in places:
        disturbance.check(sum(nodes), len(nodes))
    tables = []
    with show_progress(len(places) * len(choices), "simulate") as bar:
        for nodes in places:
            rows, machine = [], question.find_machine(nodes)
            for choice in choices:
                rows.append(_time_both(choice, nodes, question.sizes, machine, disturbance))
                bar.update()
            tables.append((nodes, rows))
    return tables


def _time_both(
    choice: Choice, nodes: Place, sizes: Sequence[int], machine: Machine, disturbance: Disturbance
) -> Times:
    """Without the disturbance and with it."""
    schedule = choice.build(sum(nodes), nodes)
    members = np.array(schedule.members)

    def time(timeline: Timeline) -> tuple[float, ...]:
        runs = (timeline.run(schedule, size // ITEM, item=ITEM) for size in sizes)
        return tuple(float(run[members].max()) for run in runs)

    quiet, other = Timeline(machine, nodes), Timeline(machine, nodes, disturbance)
    return Times(str(choice), time(quiet), time(other))


def record_times(
    record: RecordWriter, named: str, nodes: Place, sizes: Sequence[int], rows: Sequence[Times]
) -> None:
    """A cell for each time with the disturbance, and the time without it."""
    for row in rows:
        for size, seconds, alone in zip(sizes, row.disturbed, row.alone, strict=True):
            at = {"bytes": size, "type": "float32", "disturbance": named}
            cell = make_cell(
                [seconds], quantity=QUANTITY, contender=row.name, ranks=sum(nodes),
                nodes=len(nodes), at=at, details={"undisturbed": alone},
            )  # fmt: skip
            record.add(cell)


def describe_times(rows: Sequence[Times], sizes: Sequence[int]) -> Iterator[str]:
    """Times with the disturbance, in brackets what it costs; then who is best off."""
    heads = [text for size in sizes for text in (describe_size(size), "")]
    table = [("algorithm", *heads)]
    for row in rows:
        pairs = zip(row.disturbed, row.losses, strict=True)
        cells = [text for time, loss in pairs for text in _describe(time, loss)]
        table.append((row.name, *cells))
    yield from (line.rstrip() for line in format_rows(table))
    for place, size in enumerate(sizes):
        least = min(rows, key=lambda row: row.losses[place])
        first = min(rows, key=lambda row: row.disturbed[place])
        before = min(rows, key=lambda row: row.alone[place])
        was = "as without" if first is before else f"without {before.name}"
        yield (
            f"{describe_size(size)}: {least.name} loses least, "
            f"{describe_seconds(max(least.losses[place], 0.0))}; {first.name} is quickest, {was}"
        )


def _describe(time: float, loss: float) -> tuple[str, str]:
    return describe_seconds(time), f"(+{describe_seconds(max(loss, 0.0))})"
