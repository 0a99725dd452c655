"""Whoever changes one transfer of an algorithm is found out by the proof.

Every mutant is refused, or is an all-reduce, which the oracle confirms.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest

import oracle
from mpiddp.errors import ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.proof import passes_on, prove

CASES = (*((ranks, 1) for ranks in (2, 3, 4, 5, 6, 8)), (3, 2), (4, 2))
"""Ranks and segments; the latter give algorithms of one chunk a chunk to be mistaken for."""
SAMPLE = 10
"""Transfers that are mutated in each schedule, if it has more."""
TIMINGS = range(3)


def change(schedule, number, place, *transfers):
    """The schedule with these in place of one transfer."""
    steps = list(schedule.steps)
    steps[number] = (*steps[number][:place], *transfers, *steps[number][place + 1 :])
    return replace(schedule, steps=tuple(steps))


def send_in(schedule, where, transfer):
    """The schedule with one more; −1 and the number of steps stand for a new step."""
    steps = [(), *schedule.steps, ()]
    steps[where + 1] = (*steps[where + 1], transfer)
    return replace(schedule, steps=tuple(step for step in steps if step))


def drop(schedule, number, place):
    yield change(schedule, number, place)


def double_at_once(schedule, number, place):
    transfer = schedule.steps[number][place]
    yield change(schedule, number, place, transfer, transfer)


def flip(schedule, number, place):
    """An addition for a copy, or a copy for an addition."""
    old = schedule.steps[number][place]
    yield change(schedule, number, place, old._replace(reduce=not old.reduce))


def double_elsewhere(schedule, number, place):
    for where in range(-1, len(schedule.steps) + 1):
        if where != number:
            yield send_in(schedule, where, schedule.steps[number][place])


def shift(schedule, number, place):
    left, moved = change(schedule, number, place), schedule.steps[number][place]
    for where in range(-1, len(schedule.steps) + 1):
        if where != number:
            yield send_in(left, where, moved)


def redirect(schedule, number, place):
    old = schedule.steps[number][place]
    for rank in set(range(schedule.ranks)) - {old.src, old.dst}:
        yield change(schedule, number, place, old._replace(dst=rank))
        yield change(schedule, number, place, old._replace(src=rank))


def change_chunks(schedule, number, place):
    old = schedule.steps[number][place]
    length = old.hi - old.lo
    for low, high in ((length, length), (-length, -length), (0, 1), (-1, 0), (0, -1), (1, 0)):
        lo, hi = old.lo + low, old.hi + high
        if 0 <= lo < hi <= schedule.chunks:
            yield change(schedule, number, place, old._replace(lo=lo, hi=hi))


NEVER_RIGHT = (drop, double_at_once, flip)
KINDS = (*NEVER_RIGHT, double_elsewhere, shift, redirect, change_chunks)


def list_victims(schedule, seed):
    """Which transfers are mutated: all, or a sample that is the same each time.

    None where one member is left (one worker and its server): its sum needs no messages.
    """
    if len(schedule.members) == 1:
        return []
    places = [
        (number, place) for number, step in enumerate(schedule.steps) for place in range(len(step))
    ]
    return places if len(places) <= SAMPLE else random.Random(seed).sample(places, SAMPLE)


def is_refused(mutant):
    """Whether the proof refuses it; if not, it sums right."""
    try:
        prove(mutant)
    except ScheduleError:
        with contextlib.suppress(ScheduleError):
            assert not passes_on(mutant)
        return True
    for seed in TIMINGS:
        oracle.check(mutant, 2 * mutant.chunks + 1, seed)
    return False


def judge(name, kind):
    """For each mutant whether the transfer was an addition, and whether the proof refuses it."""
    for ranks, segments in CASES:
        schedule = registry.parse(f"{name}:segments={segments}").build(ranks)
        for number, place in list_victims(schedule, f"{name} {ranks} {segments}"):
            for mutant in kind(schedule, number, place):
                yield schedule.steps[number][place].reduce, is_refused(mutant)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", registry.names())
def test_a_mutant_is_refused_or_sums_right(name, kind):
    """A contribution that is sent again is refused; a copy may be sent again in another step."""
    verdicts = list(judge(name, kind))
    assert (True, True) in verdicts or (False, True) in verdicts
    if kind in NEVER_RIGHT:
        assert all(refused for _, refused in verdicts)
    if kind is double_elsewhere:
        assert all(refused for reduce, refused in verdicts if reduce)


def test_a_needless_message_would_be_found(own_registry):
    @registry.register("wasteful", lambda nodes, each: None)
    def wasteful(n):
        direct = registry.find("direct").make(n)
        return replace(direct, steps=(*direct.steps, direct.steps[-1]))

    assert (False, False) in list(judge("wasteful", drop))
