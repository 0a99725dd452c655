"""Who keeps the others waiting, and in which collective, by the stacks and records of all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpiddp.lifeline.stacks.positions import (
    StackPosition,
    find_blamed,
    find_missed,
    name_positions,
    tabulate,
)
from mpiddp.lifeline.stacks.recorded_call import OWN_GROUP, RecordedCall
from mpiddp.wording import name_ranks

EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
"""Collectives to which all ranks give tensors of one size begin so."""
STUCK_SECONDS = 10.0
"""After which a collective that all ranks have entered is called stuck."""
SHOWN = 4
"""Sentences of a kind; there may be as many as ranks."""

Key = tuple[str, str]


@dataclass(frozen=True)
class _Group:
    """What is known of the collectives of one process group."""

    members: Mapping[int, StackPosition]
    calls: Mapping[int, Mapping[int, RecordedCall]]
    """By rank and number, of the ranks that have told them."""

    def find_open(self, rank: int) -> RecordedCall | None:
        """The collective in which a rank waits; None if it waits in none of this group."""
        position, calls = self.members[rank], self.calls.get(rank)
        if not calls or position.waits is False:
            return None
        found = next((call for call in calls.values() if not call.is_complete), None)
        # torch takes a call that has failed for a complete one.
        return found or (list(calls.values())[-1] if position.failed else None)

    def find_last(self, rank: int) -> int | None:
        """The number of its last collective, 0 before the first; None if it has not told."""
        if self.members[rank].record is None:
            return None
        return max(self.calls.get(rank, ()), default=0)


def describe(positions: Sequence[StackPosition], *, is_full: bool = False) -> str:
    """The table of positions, and who keeps the others waiting."""
    lines = (f"  {line}\n" for line in find_verdict(positions))
    return tabulate(positions, is_full=is_full) + "".join(lines)


def find_verdict(positions: Sequence[StackPosition]) -> list[str]:
    """Who keeps the others waiting, one sentence for each; empty if nobody seems to."""
    positions = [each for each in positions if not each.ended]
    missed = find_missed(positions)
    if missed:
        return [f"in collectives the others wait in vain for {name_positions(missed)}"]
    groups = _find_groups(positions)
    waiting = {
        (key, rank): call
        for key, group in groups.items()
        for rank in group.members
        if (call := group.find_open(rank)) is not None
    }
    different: list[str] = []
    behind: list[tuple[int, str]] = []
    """With the number of ranks that wait."""
    stuck: list[str] = []
    for key, group in groups.items():
        ranks = {rank: call for (each, rank), call in waiting.items() if each == key}
        if not ranks:
            continue
        found = _describe_differences(group, max(call.number for call in ranks.values()))
        different += found
        if found:
            continue
        found = _describe_late(group, ranks, {rank for _, rank in waiting} - ranks.keys())
        behind += [(len(ranks), sentence) for sentence in found]
        first = next(iter(ranks.values()))
        if not found and len(ranks) == len(group.members) > 1:
            stuck += _describe_stuck(group, first)
    if different or behind:
        # If ranks wait for each other, the fewer may have taken the wrong turn.
        behind.sort(key=lambda row: -row[0])
        return [*different[:SHOWN], *(sentence for _, sentence in behind[:SHOWN])]
    blamed = find_blamed(positions)
    if blamed:
        return [f"the others wait for {name_positions(blamed)}", *_describe_workers(blamed)]
    return stuck[:SHOWN]


def _find_groups(positions: Sequence[StackPosition]) -> dict[Key, _Group]:
    everybody = {position.rank: position for position in positions}
    members: dict[Key, set[int]] = defaultdict(set)
    calls: dict[Key, dict[int, dict[int, RecordedCall]]] = defaultdict(dict)
    for position in positions:
        for call in (each for each in position.record or () if not each.is_message):
            members[call.key].update(call.members or everybody)
            calls[call.key].setdefault(position.rank, {})[call.number] = call
    return {
        key: _Group(
            {rank: everybody[rank] for rank in sorted(ranks & everybody.keys())}, calls[key]
        )
        for key, ranks in members.items()
    }


def _find_signature(call: RecordedCall) -> object:
    """What must be equal on all ranks."""
    has_sizes = call.name.startswith(EQUAL_SIZES) and call.shapes
    return (call.name, call.content if has_sizes else "")


def _describe_differences(group: _Group, last: int) -> list[str]:
    """The first number, up to ``last``, at which ranks have made different calls."""
    numbers = sorted({number for calls in group.calls.values() for number in calls})
    for number in (each for each in numbers if each <= last):
        made = {rank: calls[number] for rank, calls in group.calls.items() if number in calls}
        # Of a complete call of mpiddp's only the number is known.
        named = {rank: call for rank, call in made.items() if call.name}
        ranks: dict[object, list[int]] = defaultdict(list)
        for rank, call in named.items():
            ranks[_find_signature(call)].append(rank)
        is_over = all(call.is_complete for call in named.values())
        if len(ranks) > 1 and not is_over:
            return _describe_difference(group, named, list(ranks.values()))
    return []


def _describe_difference(
    group: _Group, calls: Mapping[int, RecordedCall], kinds: Sequence[Sequence[int]]
) -> list[str]:
    """``kinds``: the ranks that have made equal calls."""
    (most, count), *others = Counter({tuple(each): len(each) for each in kinds}).most_common()

    def show(ranks: Sequence[int]) -> str:
        return _describe_call(calls[ranks[0]], group.members[ranks[0]])

    if all(count > number for _, number in others):
        usual = f"where {name_ranks(most)} {_say('calls', most)} {show(most)}"
        return [
            f"{_name(group, ranks)} {_say('makes', ranks)} another call than the others: "
            f"{show(ranks)}, {usual}"
            for ranks, _ in others
        ]
    rows = "; ".join(f"{_name(group, each)} {_say('calls', each)} {show(each)}" for each in kinds)
    return [f"ranks make different calls: {rows}"]


def _describe_late(
    group: _Group, waiting: Mapping[int, RecordedCall], elsewhere: Iterable[int]
) -> list[str]:
    """The ranks that have not entered the first collective in which others wait.

    ``elsewhere``: ranks that wait in a collective of another group; they are named if no other is.
    """
    number = min(call.number for call in waiting.values())
    inside = [rank for rank, call in waiting.items() if call.number == number]
    late = [rank for rank in group.members if _is_late(group, rank, number)]
    first = [rank for rank in late if rank not in set(elsewhere)] or late
    longest = max(inside, key=lambda rank: waiting[rank].seconds or 0.0)
    call = waiting[longest]
    since = "" if call.seconds is None else f" for {call.seconds:.0f} s"
    verb = "waits" if call.seconds is None else _say("has waited", inside)
    verb = _say("waits", inside) if call.seconds is None else verb
    what = (
        f"entered {_describe_call(call, group.members[longest])}, in which {name_ranks(inside)} "
        f"{verb}{since}"
    )
    rows: dict[str, list[int]] = defaultdict(list)
    for rank in first:
        rows[_describe_place(group.members[rank])].append(rank)
    return [
        f"{_name(group, ranks)} {_say('is', ranks)} behind: {_they(ranks)} "
        f"{_say('has', ranks)} not {what}; {_they(ranks)} {_say('is', ranks)} {place}"
        for place, ranks in rows.items()
    ]


def _is_late(group: _Group, rank: int, number: int) -> bool:
    last = group.find_last(rank)
    if last is not None:
        return last < number
    # It has told nothing: it may be in the collective, unless its stack says otherwise.
    return group.members[rank].waits is not True


def _describe_stuck(group: _Group, call: RecordedCall) -> list[str]:
    seconds = call.seconds
    if seconds is None or seconds < STUCK_SECONDS:
        return []
    place = _describe_call(call, next(iter(group.members.values())))
    advice = "so none is behind: look at the network, the devices, and the library"
    return [f"all ranks have been in {place} for {seconds:.0f} s, {advice}"]


def _describe_call(call: RecordedCall, position: StackPosition) -> str:
    """``all_reduce 57 (4,096 float32, train.py:41)``."""
    # Where it is called is where the rank is now, if it waits.
    called, _, place = position.line.partition(", ")
    if not call.name and call.group == OWN_GROUP:
        call = RecordedCall(**{**call.pack(), "name": called})
    more = [call.content, place.removesuffix(" (failed)") if position.waits is not False else ""]
    content = ", ".join(filter(None, more))
    return f"{call.title} ({content})" if content else call.title


def _describe_place(position: StackPosition) -> str:
    """``in load, data.py:12``."""
    if position.finished or position.place is None:
        return position.line.removeprefix("no answer: ")
    busy = [worker for worker in position.workers if worker.line]
    waits = [f", and waits for its data worker {each.process} in {each.line}" for each in busy[:1]]
    return "".join((f"in {position.line}", *waits))


def _describe_workers(positions: Sequence[StackPosition]) -> list[str]:
    return [
        f"{position.name} is {_describe_place(position)}"
        for position in positions
        if any(worker.line for worker in position.workers)
    ][:SHOWN]


def _name(group: _Group, ranks: Sequence[int]) -> str:
    return name_positions([group.members[rank] for rank in ranks])


PLURALS = {"is": "are", "has": "have", "has waited": "have waited", "waits": "wait",
           "calls": "call", "makes": "make"}  # fmt: skip


def _say(verb: str, ranks: Sequence[int]) -> str:
    return verb if len(ranks) == 1 else PLURALS[verb]


def _they(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "they"
