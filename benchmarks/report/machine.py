"""What is known of the machine: by a fit, or by the messages and additions of the records."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common.options import ITEM, describe_seconds
from benchmarks.report.curves import Known
from benchmarks.report.groups import Group, Place
from benchmarks.report.pictures import Highlight
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.cost import Machine, MessageCost, bound, split
from mpiddp.schedules.registry import parse
from mpiddp.schedules.schedule import Collective

COLLECTIVES = {each.value: each for each in Collective}


def know(machine: Machine | None, source: str, *, predicts: bool) -> Known:
    """``source``: where the machine's figures come from, in words; ``predicts`` if from a fit."""
    if machine is None:
        return Known(lambda place, size: None, "")
    known = machine

    def find_bound(place: Place, size: int) -> float | None:
        kind = COLLECTIVES.get(place.quantity)
        if kind is None or place.ranks < 2:
            return None
        return bound(size, known, split(place.ranks, place.nodes), collective=kind).seconds

    def predict(place: Place, size: int, algorithm: str) -> float | None:
        if place.quantity != Collective.ALL_REDUCE.value:
            return None
        try:
            hosts = split(place.ranks, place.nodes)
            (price,) = parse(algorithm).prices((size,), known, hosts, item=ITEM)
        except (ConfigurationError, ScheduleError):
            return None
        return price.seconds

    return Known(find_bound, source, predict if predicts else None)


def read_machine(groups: Sequence[Group]) -> Machine | None:
    """From point-to-point cells: the least size's time and the largest one's rate.

    None if there are none.
    """
    links = {name: found for name in ("node", "network") if (found := _read_link(groups, name))}
    if not links:
        return None
    inside = links.get("node", links.get("network"))
    between = links.get("network", inside)
    assert inside is not None and between is not None
    between = MessageCost(
        max(inside.latency, between.latency),
        max(inside.seconds_per_byte, between.seconds_per_byte),
    )
    added = _read_cost([group for group in groups if group.place.quantity == "reduction"])
    return Machine(inside, between, added.seconds_per_byte if added is not None else 0.0)


def _read_link(groups: Sequence[Group], name: str) -> MessageCost | None:
    return _read_cost(
        [
            group
            for group in groups
            if group.place.quantity == "point-to-point" and f"link {name}" in group.place.conditions
        ]
    )


def _read_cost(groups: Sequence[Group]) -> MessageCost | None:
    """Of the quickest contender; None if nothing was measured."""
    times = [
        (size, spread.median)
        for group in groups
        for row in group.times.values()
        for size, spread in row.items()
    ]
    if not times:
        return None
    return MessageCost(min(time for _, time in times), min(time / size for size, time in times))


def highlight_links(machine: Machine | None) -> list[Highlight]:
    if machine is None:
        return []
    links = {"Within a node": machine.inside, "Between nodes": machine.between}
    return [
        Highlight(
            title=name,
            value=f"{1e-9 / link.seconds_per_byte:.3g} GB/s",
            text=f"and {describe_seconds(link.latency)} for the smallest message",
            section="point-to-point",
        )
        for name, link in links.items()
        if link.seconds_per_byte
    ]
