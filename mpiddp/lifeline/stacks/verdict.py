"""Who keeps the others waiting, and in which collective, by the stacks and records of all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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

    def find_waiting(self) -> dict[int, RecordedCall]:
        """The collectives in which ranks wait."""
        found = ((rank, self.find_open(rank)) for rank in self.members)
        return {rank: call for rank, call in found if call is not None}

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
    gone = [each.place_name for each in positions if each.ended]
    positions = [each for each in positions if not each.ended]
    missed = find_missed(positions)
    if missed:
        return [f"in collectives the others wait in vain for {name_positions(missed)}"]
    different: list[str] = []
    behind: list[_Late] = []
    stuck: list[str] = []
    for group in _find_groups(positions):
        waiting = group.find_waiting()
        found = _describe_differences(group, waiting, gone) if waiting else []
        different += found
        if waiting and not found:
            late = _find_late(group, waiting)
            behind += late
            if not late and len(waiting) == len(group.members) > 1:
                stuck += _describe_stuck(group, next(iter(waiting.values())))
    if different or behind:
        return [*different[:SHOWN], *_choose_late(behind)]
    blamed = find_blamed(positions)
    if blamed:
        return [f"the others wait for {name_positions(blamed)}", *_describe_workers(blamed)]
    return stuck[:SHOWN]


@dataclass(frozen=True)
class _Late:
    """Ranks that are behind in one group, at one place."""

    ranks: Sequence[int]
    waiting: Sequence[int]
    """The ranks that wait for them."""
    sentence: str


def _choose_late(found: Sequence[_Late]) -> list[str]:
    """Those that wait for nobody themselves; if all do, they wait for each other, and the fewer may
    have taken the wrong turn."""
    waiting = {rank for each in found for rank in each.waiting}
    roots = [each for each in found if not waiting.intersection(each.ranks)] or found
    ordered = sorted(roots, key=lambda each: -len(each.waiting))
    return [each.sentence for each in ordered[:SHOWN]]


def _find_groups(positions: Sequence[StackPosition]) -> list[_Group]:
    everybody = {position.rank: position for position in positions}
    members: dict[Key, set[int]] = defaultdict(set)
    calls: dict[Key, dict[int, dict[int, RecordedCall]]] = defaultdict(dict)
    for position in positions:
        for call in (each for each in position.record or () if not each.is_message):
            members[call.key].update(call.members or everybody, [position.rank])
            calls[call.key].setdefault(position.rank, {})[call.number] = call
    return [
        _Group({rank: everybody[rank] for rank in sorted(each & everybody.keys())}, calls[key])
        for key, each in members.items()
    ]


def _find_signature(call: RecordedCall) -> object:
    """What must be equal on all ranks."""
    has_sizes = call.name.startswith(EQUAL_SIZES) and call.shapes
    return (call.name, call.content if has_sizes else "")


def _describe_differences(
    group: _Group, waiting: Mapping[int, RecordedCall], gone: Sequence[str]
) -> list[str]:
    """The first number at which ranks have made different calls, of which one has not returned.

    ``gone``: where ranks were that have ended.
    """
    last = max(call.number for call in waiting.values())
    numbers = sorted({number for calls in group.calls.values() for number in calls})
    for number in (each for each in numbers if each <= last):
        made = {rank: calls[number] for rank, calls in group.calls.items() if number in calls}
        # Of a complete call of mpiddp's only the number is known.
        named = {rank: call for rank, call in made.items() if call.name}
        ranks: dict[object, list[int]] = defaultdict(list)
        for rank, call in named.items():
            ranks[_find_signature(call)].append(rank)
        has_open = any(call.number == number for call in waiting.values())
        is_over = not has_open and all(call.is_complete for call in named.values())
        if len(ranks) > 1 and not is_over:
            return _describe_difference(group, named, list(ranks.values()), gone)
    return []


def _describe_difference(
    group: _Group,
    calls: Mapping[int, RecordedCall],
    kinds: Sequence[Sequence[int]],
    gone: Sequence[str],
) -> list[str]:
    """``kinds``: the ranks that have made equal calls."""
    sizes: Counter[tuple[int, ...]] = Counter()
    for kind in kinds:
        places = {group.members[rank].place_name for rank in kind}
        sizes[tuple(kind)] = len(kind) + sum(place in places for place in gone)
    (most, count), *others = sizes.most_common()

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


def _find_late(group: _Group, waiting: Mapping[int, RecordedCall]) -> list[_Late]:
    """The ranks that have not entered the first collective in which others wait."""
    number = min(call.number for call in waiting.values())
    inside = [rank for rank, call in waiting.items() if call.number == number]
    longest = max(inside, key=lambda rank: waiting[rank].seconds or 0.0)
    what, seconds = (
        _describe_call(waiting[longest], group.members[longest]),
        waiting[longest].seconds,
    )
    since = _say("waits", inside)
    if seconds is not None:
        since = f"{_say('has waited', inside)} for {seconds:.0f} s"
    rows: dict[str, list[int]] = defaultdict(list)
    for rank in group.members:
        if _is_late(group, rank, number):
            rows[_describe_place(group.members[rank])].append(rank)
    return [
        _Late(
            ranks,
            inside,
            f"{_name(group, ranks)} {_say('is', ranks)} behind: {_they(ranks)} "
            f"{_say('has', ranks)} not entered {what}, in which {name_ranks(inside)} {since}; "
            f"{_they(ranks)} {_say('is', ranks)} {place}",
        )
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
    called, _, place = position.place_name.partition(", ")
    if not call.name and call.group == OWN_GROUP:
        call = RecordedCall(**{**call.pack(), "name": called})
    more = [call.content, place if position.waits is not False else ""]
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
