"""A plan as a Schedule, so that it is drawn, priced, executed and trained with like all others.

Each transfer of a chunk between two ranks becomes a message of the earliest step that keeps the
plan's order: behind those whose contributions it carries, behind those that were added to its
destination before it, and not before a message that was sent without it. What a rank keeps in
scratch memory and then adds in the order of the ranks shares a step. What comes out is proved like
any other schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.plans.plan import Operation, Plan, Promise
from mpiddp.schedules.plans.plan_proof import find_order, replay_plan
from mpiddp.schedules.proof import finish, prove, prove_half
from mpiddp.schedules.schedule import Collective, Schedule, Step, Transfer
from mpiddp.schedules.trees import Trees

COLLECTIVES = {
    Promise.ALL_REDUCE: Collective.ALL_REDUCE,
    Promise.ALL_GATHER: Collective.ALL_GATHER,
    Promise.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
}

MOST_RULES = 1 << 23
"""Rules of order between two transfers: 64 ranks that all send to all need 5 % of them."""
MOST_PASSES = 16
"""Over MOST_RULES rules; over fewer rules there may be more."""


def make_schedule(plan: Plan) -> Schedule:
    """The schedule of a plan that was proved.

    Raises ConfigurationError if its collective has no schedules, or its order fits no steps.
    """
    collective = COLLECTIVES.get(plan.promise)
    if collective is None:
        raise ConfigurationError(f"{plan.title}: no schedule makes an {plan.promise.value}")
    recorder = _Recorder(plan)
    replay_plan(plan, find_order(plan), recorder.add_leaf, recorder.add, recorder.move)
    owners: tuple[int, ...] = ()
    if collective is not Collective.ALL_REDUCE:
        owners = tuple(chunk // plan.share for chunk in range(plan.chunks))
    steps = tuple(_list_steps(recorder.transfers, recorder.find_levels()))
    schedule = Schedule(
        collective, plan.ranks, plan.chunks, steps, tuple(range(plan.ranks)), owners
    )
    try:
        prove(schedule)
    except ScheduleError as error:
        raise ConfigurationError(
            f"{plan.title}: its messages cannot be put into steps: {error}"
        ) from None
    return schedule if owners else _add_owners(schedule)


@dataclass(frozen=True)
class _Held:
    """A chunk's value on a rank."""

    tree: int
    arrived: frozenset[int] = frozenset()
    """The transfers to this rank that are in it."""


@dataclass(frozen=True)
class _Arrow:
    """One chunk that goes from rank to rank."""

    src: int
    dst: int
    chunk: int
    reduce: bool
    carries: frozenset[int]


class _Recorder:
    """Replays a plan and notes which transfer must not come before which."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._trees = plan, Trees()
        self.transfers: list[_Arrow] = []
        self._rules: list[tuple[int, int, int]] = []
        """Two transfers, and at least how many steps the second comes after the first."""
        self._sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._merged: dict[tuple[int, int], list[int]] = defaultdict(list)
        """By rank and chunk; merged are those that were added to it, or replaced it."""
        self._direct: set[int] = set()
        """Those that were added as they came in."""
        self._added: dict[int, int] = {}
        """Of those that were added, how often the thread block had waited for other ranks."""
        self._waits: dict[int, int] = {}
        """The same of each operation, by identity."""
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for each in plan.operations:
            is_bare = not each.reads and not each.writes and each.message is None
            waits = any(plan.operations[cause].rank != each.rank for cause in each.after)
            counts[each.rank, each.block] += is_bare and waits
            self._waits[id(each)] = counts[each.rank, each.block]

    def add_leaf(self, rank: int, chunk: int) -> _Held:
        own = rank * self._plan.share if self._plan.promise is Promise.ALL_GATHER else 0
        return _Held(self._trees.add_leaf(rank, own + chunk))

    def move(self, value: _Held, source: int, target: int, operation: Operation) -> _Held:
        number = len(self.transfers)
        mask, chunk = self._trees.find_mask(value.tree), self._trees.find_home(value.tree)
        is_whole = self._plan.promise is Promise.ALL_GATHER or mask.bit_count() == self._plan.ranks
        reduce = not is_whole and not mask >> target & 1
        self.transfers.append(_Arrow(source, target, chunk, reduce, value.arrived))
        self._demand((other, number, 1) for other in value.arrived)
        self._sent[source, chunk].append(number)
        if not reduce:
            place = target, chunk
            self._demand((other, number, 1) for other in self._sent[place])
            self._demand((other, number, 1) for other in self._merged[place])
            self._merged[place].append(number)
        return _Held(value.tree, frozenset((number,)))

    def add(self, values: Sequence[_Held], operation: Operation) -> _Held:
        tree = self._trees.add([value.tree for value in values])
        for value in values:
            for each in value.arrived:
                self._added.setdefault(each, self._waits[id(operation)])
        place = operation.rank, self._trees.find_home(tree)
        if operation.message is not None:
            self._direct.add(len(self.transfers) - 1)
        union, is_home = values[0].arrived, self._is_home(values[0], operation)
        for value in values[1:]:
            new, before = value.arrived, union
            if self._is_home(value, operation):
                new, before, is_home = union, value.arrived, True
            if is_home:
                self._demand(
                    (old, each, 0 if len(new) == 1 and self._may_share(each, old, operation) else 1)
                    for each in new - before
                    for old in before
                )
            else:
                # Added in scratch memory: they came together.
                self._demand((old, each, 0) for each in new for old in before)
                self._demand((each, old, 0) for each in new for old in before)
            union = new | before
        for new_one in union:
            if new_one not in self._merged[place]:
                self._merged[place].append(new_one)
                self._demand(
                    (sent, new_one, 0)
                    for sent in self._sent[place]
                    if new_one not in self.transfers[sent].carries
                )
        return _Held(tree, union)

    def _demand(self, rules: Iterable[tuple[int, int, int]]) -> None:
        self._rules.extend(islice(rules, MOST_RULES + 1 - len(self._rules)))
        if len(self._rules) > MOST_RULES:
            raise ConfigurationError(
                f"{self._plan.title}: expected at most {MOST_RULES:,} pairs of which one waits"
            )

    def _is_home(self, value: _Held, operation: Operation) -> bool:
        """Whether the adding rank's own contribution is in it: the others came from elsewhere."""
        return bool(self._trees.find_mask(value.tree) >> operation.rank & 1)

    def _may_share(self, new: int, other: int, operation: Operation) -> bool:
        """Whether it can be added in the same step as another, which is in the sum before it.

        Only behind a lower rank, and if both have waited in scratch memory: a step adds in the
        order of the ranks. Of a rank that waits for others in between, what it has itself counts,
        too: others begin with that, whatever its place, but ours do so if these are two steps.
        """
        src = self.transfers[new].src
        has_waited = self._waits[id(operation)] > self._added.get(other, 0)
        return (
            self._direct.isdisjoint((new, other))
            and src > self.transfers[other].src
            and (src > operation.rank or not has_waited)
        )

    def find_levels(self) -> list[int]:
        """The step of each transfer. Raises ConfigurationError if the rules contradict."""
        levels = [0] * len(self.transfers)
        for _ in range(min(len(levels), MOST_RULES * MOST_PASSES // max(len(self._rules), 1)) + 1):
            is_changed = False
            for first, second, distance in self._rules:
                if levels[second] < levels[first] + distance:
                    levels[second] = levels[first] + distance
                    is_changed = True
            if not is_changed:
                return levels
        raise ConfigurationError(f"{self._plan.title}: its messages cannot be put into steps")


def _list_steps(transfers: Sequence[_Arrow], levels: Sequence[int]) -> Iterator[Step]:
    """Neighbouring chunks that go the same way in the same step are one message."""
    steps: list[set[tuple[int, int, bool, int]]] = [
        set() for _ in range(max(levels, default=-1) + 1)
    ]
    for arrow, level in zip(transfers, levels, strict=True):
        steps[level].add((arrow.src, arrow.dst, arrow.reduce, arrow.chunk))
    for step in steps:
        messages: list[Transfer] = []
        for src, dst, reduce, chunk in sorted(step):
            last = messages[-1] if messages else None
            if last is not None and last == (src, dst, last.lo, chunk, reduce):
                messages[-1] = last._replace(hi=chunk + 1)
            else:
                messages.append(Transfer(src, dst, chunk, chunk + 1, reduce))
        yield tuple(messages)


def _add_owners(schedule: Schedule) -> Schedule:
    """The same with the rank that has each chunk's sum half way, if there is one such rank."""
    half = replace(schedule, steps=schedule.steps[: len(schedule.steps) // 2])
    everyone = set(range(schedule.ranks))
    state = finish(half, lambda rank, _: {rank}, lambda values: set().union(*values))
    owners = []
    for chunk in range(schedule.chunks):
        whole = [rank for rank in sorted(everyone) if state[rank][chunk] == everyone]
        if len(whole) != 1:
            return schedule
        owners += whole
    owned = replace(schedule, owners=tuple(owners))
    try:
        for kind in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
            prove_half(owned, kind)
    except ScheduleError:
        return schedule
    return owned
