"""The proof accepts what is right, refuses what is wrong and says where, and agrees with runs."""

import itertools
import re
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from mpiddp.errors import ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import add, copy
from mpiddp.schedules.proof import check_programs, passes_on, prove, prove_half
from mpiddp.schedules.schedule import (
    Collective,
    Round,
    Schedule,
    Transfer,
    all_reduce,
    halve,
    project,
    scatter,
)


def refuse(schedule, *words):
    """The proof refuses, in words that come in this order."""
    with pytest.raises(ScheduleError, match=".*".join(map(re.escape, words)) or None):
        prove(schedule)


@pytest.mark.parametrize("name", registry.names())
def test_every_algorithm_is_proved(name):
    """Its halves as what they promise; and all but two without symbols."""
    kinds = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    for ranks in (*range(1, 20), 31, 32, 33, 63, 64):
        whole = registry.parse(name).make(ranks)
        prove(whole)
        assert passes_on(whole) or name in ("recursive-doubling", "one-shot")
        check_programs(project(whole))
        halves = halve(whole) if whole.owners else ()
        for kind, half in zip(kinds[: len(halves)], halves, strict=True):
            assert prove_half(whole, kind) == half and passes_on(half)
    for ranks, segments in ((1, 2), (2, 3), (5, 2), (6, 5), (8, 3), (13, 2)):
        prove(registry.parse(f"{name}:segments={segments}").build(ranks))


ADDERS = [add(1, 3), add(2, 3)], [add(0, 3), add(1, 0)], [add(2, 0)]
"""Rank 0 makes (a + b) + c, server 3 makes a + (b + c)."""
EXCHANGE = [add(0, 1), add(1, 0)]
PAIRS = [*EXCHANGE, add(2, 3), add(3, 2)]


@pytest.mark.parametrize(
    "schedule",
    [
        all_reduce(2, 1, [EXCHANGE]),
        # Rank 0 makes (a + b) + (c + d), rank 2 makes (c + d) + (a + b).
        all_reduce(4, 1, [PAIRS, [add(0, 2), add(2, 0), add(1, 3), add(3, 1)]]),
        # Ranks 2 and 3 hold b and a, in that order, so that they make b + a.
        all_reduce(4, 1, [[copy(0, 3), copy(1, 2)], PAIRS, [copy(2, 1)]], members=[0, 1]),
        # A server takes the first arrival as it is.
        all_reduce(3, 1, [[add(0, 2)], [add(1, 2)], [copy(2, 0), copy(2, 1)]], members=[0, 1]),
        all_reduce(3, 1, [[copy(0, 2)], [add(1, 2)], [copy(2, 0), copy(2, 1)]], members=[0, 1]),
        # All is added in the order of the sources.
        all_reduce(4, 1, [[add(r, d) for r, d in itertools.permutations(range(4), 2)][::-1]]),
        # Chunks that travel together may have different owners.
        scatter(2, [[add(1, 0, 0, 2)], [copy(0, 1, 1)]], owners=[0, 1]),
        all_reduce(4, 1, [*ADDERS, [copy(0, 1), copy(0, 2)]], members=[0, 1, 2]),
    ],
)
def test_what_is_right(schedule):
    prove(schedule)
    oracle.check_bits(schedule, 64, range(2))


@pytest.mark.parametrize(
    "transfer",
    [
        Transfer(2, 0, 0, 1, True), Transfer(0, 2, 0, 1, True), Transfer(-1, 0, 0, 1, True),
        Transfer(0, -1, 0, 1, True), Transfer(0, 0, 0, 1, True), Transfer(0, 1, 0, 0, True),
        Transfer(0, 1, 1, 0, True), Transfer(0, 1, 0, 2, True), Transfer(0, 1, -1, 1, True),
    ],
)  # fmt: skip
def test_a_message_needs_two_ranks_and_some_chunks(transfer):
    steps = [[add(0, 1)], [copy(1, 0)], [transfer]]
    schedule, words = all_reduce(2, 1, steps), ("two of 2 ranks", "some of 1 chunks")
    refuse(schedule, "step 2:", str(transfer), *words)
    with pytest.raises(ScheduleError, match="step 2:"):
        passes_on(schedule)


BOTH = [copy(0, 2), add(1, 2)]
GATHER = halve(registry.parse("ring").make(3))[1]
REFUSED = {
    "nothing is sent": (
        all_reduce(3, 1, [[add(0, 1)], [copy(2, 0)], [copy(1, 0)]], members=[0, 1]),
        "step 1: rank 2 sends chunk 0 to rank 0, but holds nothing of it",
    ),
    "what comes in the same step": (
        all_reduce(3, 1, [[add(0, 2), copy(2, 1)]], members=[0]),
        "step 0: rank 2 sends chunk 0 to rank 1, but holds nothing of it",
    ),
    "two copies into one place": (
        all_reduce(3, 1, [EXCHANGE, [copy(0, 2), copy(1, 2)]], members=[0, 1]),
        "step 1: chunk 0 of rank 2 is copied into twice",
    ),
    "a copy and a sum": (
        all_reduce(3, 1, [BOTH], members=[0, 1]),
        "step 0: chunk 0 of rank 2 is both copied into and reduced",
    ),
    "a copy onto what is sent": (
        all_reduce(3, 1, [EXCHANGE, [copy(0, 1), copy(1, 2)]], members=[0, 1]),
        "step 1: chunk 0 of rank 1 is overwritten while it is sent",
    ),
    "added twice on two ways": (
        all_reduce(3, 1, [[add(0, 1)], [add(0, 2)], [add(2, 1)]]),
        "step 2: the contribution of rank 0 is added twice",
    ),
    "added twice at once": (
        all_reduce(2, 1, [[add(0, 1), add(0, 1)]]),
        "step 0: the contribution of rank 0 is added twice",
    ),
    "a contribution is missing": (
        all_reduce(3, 1, [EXCHANGE, [copy(0, 2)]]),
        "at the end rank 0's sum of chunk 0 lacks rank 2",
    ),
    "a holder without the sum": (
        all_reduce(3, 1, [[add(0, 1), add(2, 1)], [copy(1, 0)]]),
        "at the end rank 2's sum of chunk 0 lacks ranks 0, 1",
    ),
    "less overwrites the sum": (
        all_reduce(
            3, 1, [[copy(0, 2)], [add(1, 0)], [copy(0, 1)], [copy(2, 0)]], members=[0, 1]
        ),
        "rank 0's sum of chunk 0 lacks rank 1",
    ),
    "an owner lacks something": (
        scatter(3, [[add(0, 2, 1), add(1, 2, 1), add(2, 0, 0)]], owners=[0, 2]),
        "at the end rank 0's sum of chunk 0 lacks rank 1",
    ),
    # A chunk has its own number, not that of the neighbours with which the proof has merged it.
    "merged chunks lack something": (
        all_reduce(2, 4, [[add(0, 1, 0, 2), add(1, 0, 0, 2)], [add(0, 1, 2, 4)]]),
        "rank 0's sum of chunk 2 lacks rank 1",
    ),
    "nothing is sent of merged chunks": (
        all_reduce(3, 4, [[copy(2, 0, 2, 4)], [add(0, 1, 0, 2)]], members=[0, 1]),
        "step 0: rank 2 sends chunk 2 to rank 0",
    ),
    "two roots of a reduce": (
        Schedule(Collective.REDUCE, 2, 2, (), (0, 1), (0, 1)), "a reduce has one root",
    ),
    "two roots of a broadcast": (
        Schedule(Collective.BROADCAST, 2, 2, (), (0, 1), (0, 1)), "a broadcast has one root",
    ),
    "no chunk": (all_reduce(1, 0, []), "at least one chunk, found 0"),
    # Who does not exist must not end in a traceback, nor be taken for another rank.
    **{f"members {members}": (all_reduce(2, 1, [EXCHANGE] if members else [], members=members),)
       for members in ((0, 2), (0, -1), ())},
    **{f"owners {owners}": (
        Schedule(Collective.REDUCE_SCATTER, 2, 2, ((add(0, 1, 1), add(1, 0, 0)),), (0, 1), owners),
    ) for owners in ((), (0,), (0, 2), (0, 1, 0))},
    "who gathers has less": (
        Schedule(Collective.ALL_GATHER, 3, 3, GATHER.steps[:1], (0, 1, 2), (0, 1, 2)),
        "at the end rank", "lacks rank",
    ),
    "who gathers has another's": (
        Schedule(Collective.ALL_GATHER, 3, 3, GATHER.steps, (0, 1, 2), (1, 2, 0)),
        "step 0: rank", "holds nothing",
    ),
    "sums in two orders": (
        all_reduce(4, 1, [*ADDERS, [copy(0, 1), copy(3, 2)]], members=[0, 1, 2]),
        "at the end ranks 0 and 2 hold chunk 0 added in different orders",
    ),
    "a ring that adds all the way round": (
        all_reduce(3, 1, [[add(r, (r + 1) % 3) for r in range(3)]] * 2), "step 1:", "added twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_and_named(name):
    refuse(*REFUSED[name])


def misfit(*programs):
    with pytest.raises(ScheduleError) as refused:
        check_programs(programs)
    return str(refused.value)


ONE, TWO, SIX, BACK = add(0, 1), add(0, 1, 1), add(0, 1, 2, 6), add(1, 0)
MISFITS = [
    ((Round(0, (), (ONE,)),), (), "0 from rank 0 to rank 1", "chunks 0 to 1 in step 0", "none"),
    ((), (Round(0, (ONE,), ()),), "0 from rank 0 to rank 1", "none", "chunks 0 to 1 in step 0"),
    (
        (Round(0, (), (add(0, 5),)),), (),
        "0 from rank 0 to rank 5", "chunks 0 to 1 in step 0", "none",
    ),
    (
        (Round(0, (), (ONE,)),), (Round(0, (ONE,), ()), Round(3, (ONE,), ())),
        "1 from rank 0 to rank 1", "none", "chunks 0 to 1 in step 3",
    ),
    (
        (Round(0, (), (ONE, TWO)),), (Round(0, (ONE, SIX), ()),),
        "1 from rank 0 to rank 1", "chunks 1 to 2 in step 0", "chunks 2 to 6 in step 0",
    ),
    (
        (Round(0, (), (ONE, TWO)),), (Round(0, (TWO, ONE), ()),),
        "0 from rank 0 to rank 1", "chunks 0 to 1 in step 0", "chunks 1 to 2 in step 0",
    ),
    (
        (Round(0, (), (ONE,)), Round(1, (BACK,), ())),
        (Round(0, (), (BACK,)), Round(1, (ONE,), ())),
        "0 from rank 0 to rank 1", "chunks 0 to 1 in step 0", "chunks 0 to 1 in step 1",
    ),
    (
        (Round(0, (), (copy(0, 1),)),), (Round(0, (ONE,), ()),),
        "0 from rank 0 to rank 1", "a copy of chunks 0 to 1 in step 0", "chunks 0 to 1 in step 0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "which", "sent", "awaited"), MISFITS)
def test_programs_that_do_not_fit_are_refused(first, second, which, sent, awaited):
    said = f"message {which} is {sent} for the sender, {awaited} for the receiver"
    assert misfit(first, second) == said


def test_rounds_out_of_order_are_refused():
    for first, second in ((1, 0), (2, 2)):
        program = (Round(first, (BACK,), ()), Round(second, (BACK,), ()))
        assert misfit(program, ()) == f"rank 0 takes step {second} after step {first}"
    # In one round, with the receives posted first, it is an exchange.
    check_programs([(Round(0, (BACK,), (ONE,)),), (Round(0, (ONE,), (BACK,)),)])


TIMINGS = range(6)


def agree(schedule):
    """Whether the proof accepts; if so, all timings must give the sum, bit for bit alike."""
    try:
        prove(schedule)
    except ScheduleError:
        assert not passes_on(schedule)
        return False
    for seed in TIMINGS:
        oracle.check(schedule, 2 * schedule.chunks + 1, seed)
    oracle.check_bits(schedule, 16 * schedule.chunks, TIMINGS)
    return True


def test_the_oracle_sees_what_goes_wrong_in_some_timings_and_in_the_last_bits():
    # Rank 1 passes its own value on in the step in which that of rank 0 takes its place.
    steps = [[add(0, 2)], [copy(0, 1), add(1, 2)], [copy(2, 0), copy(2, 1)]]
    torn, caught = all_reduce(3, 1, steps, members=[0, 1]), 0
    for seed in range(20):
        try:
            oracle.check(torn, 8, seed)
        except AssertionError:
            caught += 1
    assert 0 < caught < 20
    mixed = all_reduce(4, 1, [*ADDERS, [copy(0, 1), copy(3, 2)]], members=[0, 1, 2])
    oracle.check(mixed, 8, 0)
    with pytest.raises(AssertionError, match="other bits"):
        oracle.check_bits(mixed, 64, range(4))


@st.composite
def random_transfers(draw, ranks, chunks):
    src, dst = draw(st.permutations(range(ranks)))[:2]
    lo, hi = sorted(draw(st.permutations(range(chunks + 1)))[:2])
    return Transfer(src, dst, lo, hi, draw(st.booleans()))


@st.composite
def edited_schedules(draw):
    """A right schedule and a few changes, some of which leave it right."""
    name = draw(st.sampled_from([name for name in registry.names() if name != "two-level"]))
    schedule = registry.parse(name).build(draw(st.integers(2, 4)))
    steps = [list(step) for step in schedule.steps]
    for _ in range(draw(st.integers(1, 3))):
        edit = draw(st.sampled_from(["drop", "insert", "move", "flip", "merge", "split", "swap"]))
        step = draw(st.integers(0, len(steps) - 1))
        if edit == "insert":
            new = draw(random_transfers(schedule.ranks, schedule.chunks))
            steps.insert(draw(st.integers(0, len(steps))), [new])
        elif edit == "merge" and step:
            steps[step - 1 : step + 1] = [steps[step - 1] + steps[step]]
        elif edit == "split":
            cut = draw(st.integers(0, len(steps[step])))
            steps[step : step + 1] = [steps[step][:cut], steps[step][cut:]]
        elif edit == "swap" and step:
            steps[step - 1 : step + 1] = [steps[step], steps[step - 1]]
        elif steps[step]:
            victim = steps[step].pop(draw(st.integers(0, len(steps[step]) - 1)))
            if edit == "move":
                steps[draw(st.integers(0, len(steps) - 1))].append(victim)
            if edit == "flip":
                steps[step].append(victim._replace(reduce=not victim.reduce))
    return all_reduce(schedule.ranks, schedule.chunks, steps, members=schedule.members)


def test_what_the_proof_accepts_sums_right_in_every_timing():
    verdicts = []

    @settings(max_examples=400, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(edited_schedules())
    def collect(schedule):
        verdicts.append(agree(schedule))

    collect()
    assert 30 <= sum(verdicts) < len(verdicts) - 30


def cannot_be_halved(schedule, kind, *words):
    prove(schedule)
    with pytest.raises(ScheduleError, match="^cannot be halved: its .*" + ".*".join(words)):
        prove_half(schedule, kind)


def test_an_all_reduce_with_unequal_halves_is_right_but_cannot_be_halved():
    exchange = all_reduce(2, 1, [[add(0, 1), add(1, 0)]], owners=[0])
    cannot_be_halved(
        exchange, Collective.REDUCE, "first 0 of 1 steps are no reduce", "lacks rank 1"
    )


def test_a_second_half_that_needs_more_than_the_owners_have_is_found():
    # Both have the sum half way, but only rank 0 owns it.
    exchange = [[add(0, 1), add(1, 0)], [copy(1, 2)], [copy(1, 2)]]
    swap = all_reduce(3, 1, [[add(2, 0)], exchange[0], *exchange[1:]], owners=[0])
    prove_half(swap, Collective.REDUCE)
    cannot_be_halved(swap, Collective.BROADCAST, "last 2 of 4 steps are no broadcast: step 0: rank")


@pytest.mark.parametrize("name", ["ring", "two-level", "recursive-doubling"])
def test_what_is_wrong_on_many_ranks_is_refused_with_the_same_words(name):
    schedule = registry.parse(name).build(70)
    for number in (0, len(schedule.steps) - 1):
        short = list(schedule.steps)
        short[number] = short[number][1:]
        refuse(replace(schedule, steps=tuple(short)), "lacks rank")
    first = schedule.steps[0][0]
    twice = (*schedule.steps, (first,))
    refuse(replace(schedule, steps=twice), f"step {len(schedule.steps)}:", "is added twice")
    beyond = (*schedule.steps, (first._replace(dst=70),))
    refuse(replace(schedule, steps=beyond), "is not a message between two of 70 ranks")


@pytest.mark.parametrize(
    ("steps", "members"),
    [
        # What was added elsewhere is added once more, sent on, or added to.
        ([[add(0, 1)], [add(0, 2)], [add(2, 1)]], 3),
        ([[add(0, 1), add(0, 2)], [add(2, 1)]], 3),
        ([[add(0, 1), add(0, 2)], [add(2, 1)]], 4),
        ([[add(0, 1)], [copy(0, 2)], [add(1, 2)]], 2),
        ([[add(0, 1), add(2, 0)], [add(0, 1)]], 3),
        ([[add(0, 1)], [add(2, 0)], [add(0, 1)]], 3),
        # Copies of parts, which meet.
        ([[copy(0, 2)], [add(2, 1)], [add(0, 1)]], 2),
        # Copies of the whole sum, which meet.
        ([[add(0, 1)], [copy(1, 0)], [add(0, 1)]], 2),
        ([[add(0, 1)], [copy(1, 0), copy(1, 2)], [add(0, 2)]], 2),
        # Two copies into one place; a copy and a sum; a copy onto what is being sent.
        ([[add(0, 1)], [copy(1, 0)], [copy(0, 2), copy(1, 2)]], 2),
        ([[add(0, 1)], [copy(1, 0)], [copy(1, 2), add(0, 2)]], 2),
        ([[add(0, 1)], [copy(1, 0)], [copy(0, 1), copy(1, 2)]], 2),
        ([[copy(2, 0)], [add(0, 1)], [copy(1, 0)]], 2),
    ],
)
def test_what_is_wrong_in_one_place_is_not_passed_on(steps, members):
    ended = [*steps, [copy(1, 0), copy(1, 2), copy(1, 3)]]
    schedule = all_reduce(4, 1, ended, members=range(members))
    with pytest.raises(ScheduleError):
        prove(schedule)
    assert not passes_on(schedule)


@pytest.mark.parametrize(
    "name", [*registry.names(), "two-level:outer=recursive-doubling", "two-level:inner=ring"]
)
def test_a_proof_takes_a_twentieth_of_a_second(name):
    nodes = (8, 9, 10, 11, 12, 14) if name.startswith("two-level") else None
    schedule, seconds = registry.parse(name).make(64, nodes), []
    for _ in range(3):
        begin = time.process_time()
        prove(schedule)
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.05
