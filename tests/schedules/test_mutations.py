"""Whoever changes one transfer of an algorithm is found out: by the proof, or by the price.

Every mutant is refused by the proof, or has another price on one of a few machines, or is an
all-reduce as good as the original, which the oracle confirms.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

import oracle
from mpiddp.errors import ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import Machine, MessageCost, flat, simulate
from mpiddp.schedules.proof import passes_on, prove

CASES = (*((ranks, 1) for ranks in (2, 3, 4, 5, 6, 8)), (3, 2), (4, 2))
"""Ranks and segments; the latter give algorithms of one chunk a chunk to be mistaken for."""
SAMPLE = 10
"""Transfers that are mutated in each schedule, if it has more."""
TIMINGS = range(3)
MACHINES = (
    flat(1.0, 0.0),
    flat(0.0, 1.0),
    flat(0.0, 0.0, 1.0),
    Machine(MessageCost(1.0, 2**-5), MessageCost(5.0, 2**-2), 2**-7, 2**-3),
)


def nodes_of(ranks):
    """Two nodes that differ in size by one rank or not at all, so that several share each."""
    return (ranks // 2, ranks - ranks // 2)


@functools.cache
def build(name, case):
    ranks, segments = case
    return registry.parse(f"{name}:segments={segments}").build(ranks)


def prices(schedule):
    """On each machine, alone on a node and with others."""
    count = 2 * schedule.chunks
    return [
        simulate(schedule, count, machine, nodes).seconds
        for machine in MACHINES
        for nodes in (None, nodes_of(schedule.ranks))
    ]


@functools.cache
def original_prices(name, case):
    return prices(build(name, case))


# ---- mutants ------------------------------------------------------------------------------


def with_step(schedule, number, step):
    steps = list(schedule.steps)
    steps[number] = tuple(step)
    return replace(schedule, steps=tuple(step for step in steps if step))


def without(schedule, number, place):
    step = schedule.steps[number]
    return [*step[:place], *step[place + 1 :]]


def changed(schedule, number, place, transfer):
    rest = without(schedule, number, place)
    return with_step(schedule, number, [*rest[:place], transfer, *rest[place:]])


def put(steps, where, transfer):
    """The transfer in another step; −1 and the number of steps stand for a new one."""
    if where == -1:
        return ((transfer,), *steps)
    if where == len(steps):
        return (*steps, (transfer,))
    return (*steps[:where], (*steps[where], transfer), *steps[where + 1 :])


def elsewhere(schedule, number):
    return [where for where in range(-1, len(schedule.steps) + 1) if where != number]


def drop(schedule, number, place):
    yield with_step(schedule, number, without(schedule, number, place))


def double_at_once(schedule, number, place):
    step = schedule.steps[number]
    yield with_step(schedule, number, [*step, step[place]])


def double_elsewhere(schedule, number, place):
    for where in elsewhere(schedule, number):
        yield replace(schedule, steps=put(schedule.steps, where, schedule.steps[number][place]))


def shift(schedule, number, place):
    transfer = schedule.steps[number][place]
    steps = list(schedule.steps)
    steps[number] = tuple(without(schedule, number, place))
    for where in elsewhere(schedule, number):
        moved = put(tuple(steps), where, transfer)
        yield replace(schedule, steps=tuple(step for step in moved if step))


def send_elsewhere(schedule, number, place):
    old = schedule.steps[number][place]
    for rank in range(schedule.ranks):
        if rank not in (old.src, old.dst):
            yield changed(schedule, number, place, old._replace(dst=rank))


def hear_another(schedule, number, place):
    old = schedule.steps[number][place]
    for rank in range(schedule.ranks):
        if rank not in (old.src, old.dst):
            yield changed(schedule, number, place, old._replace(src=rank))


def flip(schedule, number, place):
    old = schedule.steps[number][place]
    yield changed(schedule, number, place, old._replace(reduce=not old.reduce))


def change_chunks(schedule, number, place):
    old = schedule.steps[number][place]
    length = old.hi - old.lo
    for lo, hi in {
        (old.lo + length, old.hi + length),
        (old.lo - length, old.hi - length),
        (old.lo, old.hi + 1),
        (old.lo - 1, old.hi),
        (old.lo, old.hi - 1),
        (old.lo + 1, old.hi),
    }:
        if 0 <= lo < hi <= schedule.chunks:
            yield changed(schedule, number, place, old._replace(lo=lo, hi=hi))


KINDS = (
    drop,
    double_at_once,
    double_elsewhere,
    shift,
    send_elsewhere,
    hear_another,
    flip,
    change_chunks,
)


def victims(name, case):
    """Which transfers are mutated: all, or a sample that is the same each time.

    None where one member is left (one worker and its server): its sum needs no messages.
    """
    schedule = build(name, case)
    if len(schedule.members) == 1:
        return []
    places = [
        (number, place) for number, step in enumerate(schedule.steps) for place in range(len(step))
    ]
    dice = random.Random(f"{name} {case}")
    return places if len(places) <= SAMPLE else dice.sample(places, SAMPLE)


# ---- verdicts -----------------------------------------------------------------------------


def judge(mutant, name, case):
    """``refused``, ``cheaper``, ``dearer``, ``both`` or ``equal``."""
    try:
        prove(mutant)
    except ScheduleError:
        with contextlib.suppress(ScheduleError):
            assert not passes_on(mutant)
        return "refused"
    signs = set()
    for found, before in zip(prices(mutant), original_prices(name, case), strict=True):
        if not math.isclose(found, before, rel_tol=1e-9):
            signs.add("cheaper" if found < before else "dearer")
    return "both" if len(signs) > 1 else signs.pop() if signs else "equal"


@functools.cache
def verdicts(name, kind):
    """How many mutants of each kind of transfer (reduce or copy) had which verdict."""
    counter = Counter()
    for case in CASES:
        schedule = build(name, case)
        for number, place in victims(name, case):
            reduce = schedule.steps[number][place].reduce
            for mutant in kind(schedule, number, place):
                verdict = judge(mutant, name, case)
                counter[reduce, verdict] += 1
                if verdict != "refused":
                    for seed in TIMINGS:
                        oracle.check(mutant, 2 * mutant.chunks + 1, seed)
    return counter


def total(kind, reduce=None):
    """The verdicts over all algorithms, on one kind of transfer or on both."""
    counter = Counter()
    for name in registry.names():
        for (added, verdict), number in verdicts(name, kind).items():
            if reduce in (None, added):
                counter[verdict] += number
    return counter


# ---- tests --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", registry.names())
def test_a_mutant_is_refused_or_sums_right(name, kind):
    """Each mutant that the proof accepts has been run while it was judged."""
    assert verdicts(name, kind)[True, "refused"] + verdicts(name, kind)[False, "refused"] > 0


@pytest.mark.parametrize("name", registry.names())
def test_no_message_is_superfluous(name):
    found = verdicts(name, drop)
    assert found and set(found) <= {(True, "refused"), (False, "refused")}


@pytest.mark.parametrize("name", registry.names())
def test_a_message_sent_twice_in_a_step_is_refused(name):
    found = verdicts(name, double_at_once)
    assert found and set(found) <= {(True, "refused"), (False, "refused")}


@pytest.mark.parametrize("name", registry.names())
def test_a_contribution_sent_again_in_another_step_is_refused(name):
    found = {verdict for (reduce, verdict) in verdicts(name, double_elsewhere) if reduce}
    assert found == {"refused"}


@pytest.mark.parametrize("name", registry.names())
def test_a_copy_sent_again_in_another_step_is_refused_or_no_cheaper(name):
    """It costs nothing where another rank takes longer in that step anyhow, so equal prices are
    possible; such a mutant is an all-reduce."""
    found = {verdict for (reduce, verdict) in verdicts(name, double_elsewhere) if not reduce}
    assert found <= {"refused", "dearer", "equal"}


@pytest.mark.parametrize("name", registry.names())
def test_an_addition_cannot_be_a_copy_nor_a_copy_an_addition(name):
    found = verdicts(name, flip)
    assert found and set(found) <= {(True, "refused"), (False, "refused")}


def test_the_proof_alone_refuses_most_mutants_of_each_kind():
    everything = Counter()
    for kind in KINDS:
        counter = total(kind)
        everything += counter
        assert counter["refused"] >= 0.75 * counter.total(), (kind.__name__, counter)
    assert everything["refused"] >= 0.85 * everything.total() > 10_000
    assert everything["equal"] <= 0.05 * everything.total(), everything


def test_a_needless_message_would_be_found(monkeypatch):
    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))

    @registry.register("wasteful", lambda nodes, each: None)
    def wasteful(n):
        direct = registry.find("direct").make(n)
        return replace(direct, steps=(*direct.steps, direct.steps[-1]))

    for case in CASES:
        prove(build("wasteful", case))
        oracle.check(build("wasteful", case), 12, 0)
    assert verdicts("wasteful", drop)[False, "refused"] == 0
    assert verdicts("wasteful", drop)[False, "cheaper"] + verdicts("wasteful", drop)[False, "equal"]
