"""Replays a schedule on values of any kind, and so proves that it keeps its promise.

The proof propagates the exact state, with symbols for the contributions, like SCCL (Cai et al.,
PPoPP'21). Equal reduction trees show that two ranks hold bitwise equal sums. Most algorithms need
no symbols: if a rank never uses what it has sent away, counting the contributions is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from operator import itemgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import ScheduleError
from mpiddp.schedules.schedule import Collective, Rounds, Schedule, Step, Transfer, halve
from mpiddp.schedules.trees import Trees, make_mask, name_ranks

Value = TypeVar("Value")
State = list[list[Value | None]]
"""For each rank and each chunk what it holds; None for nothing that is part of any result."""
Table = NDArray[np.int64]

FEW_RANKS = 16
"""Beyond them ``passes_on`` is asked first, which takes a quarter of the time that symbols take."""
GIVEN_AWAY = -1
_SOURCE = itemgetter(0)


# ---- replay -------------------------------------------------------------------------------


def replay(
    schedule: Schedule,
    contribution: Callable[[int, int], Value],
    add: Callable[[Sequence[Value]], Value],
) -> Iterator[State[Value]]:
    """The state before the first step and after each one; always the same list, changed.

    ``contribution(rank, chunk)`` is what a contributor begins with; ``add`` sums at least two
    values, in the order in which a rank would, or raises ValueError. Raises ScheduleError if
    that happens, if a rank sends what it does not hold, and if what a step leaves behind
    would depend on timing: a chunk copied into twice, or copied into and reduced.
    """
    state: State[Value] = [[None] * schedule.chunks for _ in range(schedule.ranks)]
    for chunk in range(schedule.chunks):
        for rank in schedule.contributors(chunk):
            state[rank][chunk] = contribution(rank, chunk)
    yield state
    for number, step in enumerate(schedule.steps):
        try:
            _take(state, step, add)
        except ValueError as error:
            raise ScheduleError(f"step {number}: {error}") from None
        yield state


def finish(
    schedule: Schedule,
    contribution: Callable[[int, int], Value],
    add: Callable[[Sequence[Value]], Value],
) -> State[Value]:
    """The state after the last step; as ``replay``."""
    *_, state = replay(schedule, contribution, add)
    return state


def _take(state: State[Value], step: Step, add: Callable[[Sequence[Value]], Value]) -> None:
    copied: dict[tuple[int, int], Value] = {}
    added: dict[tuple[int, int], list[tuple[int, Value]]] = {}
    for src, dst, lo, hi, reduce in step:
        row = state[src]
        for chunk in range(lo, hi):
            value, place = row[chunk], (dst, chunk)
            if value is None:
                raise ValueError(
                    f"rank {src} sends chunk {chunk} to rank {dst}, but holds nothing of it"
                )
            if not reduce:
                if place in copied:
                    raise ValueError(f"chunk {chunk} of rank {dst} is copied into twice")
                copied[place] = value
            elif place in added:
                added[place].append((src, value))
            else:
                added[place] = [(src, value)]
    for (rank, chunk), operands in added.items():
        own = state[rank][chunk]
        if own is not None:
            operands.append((rank, own))
        if len(operands) > 1:
            operands.sort(key=_SOURCE)
            state[rank][chunk] = add([value for _, value in operands])
        else:
            state[rank][chunk] = operands[0][1]
    for (rank, chunk), value in copied.items():
        if (rank, chunk) in added:
            raise ValueError(f"chunk {chunk} of rank {rank} is both copied into and reduced")
        state[rank][chunk] = value


# ---- the proof ----------------------------------------------------------------------------


def prove(schedule: Schedule) -> None:
    """Raise ScheduleError, which says where, unless all of this holds (steps count from 0):

    - transfers are between different ranks that exist, of chunks that exist;
    - a rank sends only what it holds, even if nobody uses it;
    - no chunk is copied into twice, or both copied into and reduced, in a step;
    - a copy may land in place: its rank does not send that chunk in the same step;
    - every holder of a chunk ends with each contribution exactly once, and nowhere is one added
      twice;
    - all holders of a chunk have the same reduction tree, up to the order of the two operands of
      an addition, so that they end bitwise equal. NaNs are NaNs on all of them, but their payloads
      may differ: of two NaNs a processor keeps the payload of the one that it takes first.

    ``project`` gives each transfer to both its ranks in the same step, so that their programs fit
    together (``check_programs``). What the owners of an all-reduce hold half way is a question for
    ``prove_half``.
    """
    _check_roles(schedule)
    if schedule.ranks > FEW_RANKS and passes_on(schedule):
        return
    coarse = _merge_chunks(schedule)
    try:
        _check_content(coarse)
    except ScheduleError:
        # Once more with the chunks' own numbers, so that the message shows these.
        _check_content(schedule)
        raise


def prove_half(whole: Schedule, kind: Collective) -> Schedule:
    """The half of an all-reduce (``halve``) that makes a collective of this kind, proved.

    Raises ScheduleError, which begins with "cannot be halved"; ValueError if no owners are
    named.
    """
    number = int(kind.gathers)
    half = halve(whole)[number]
    try:
        prove(half)
    except ScheduleError as error:
        steps = f"its {('first', 'last')[number]} {len(half.steps)} of {len(whole.steps)} steps"
        raise ScheduleError(
            f"cannot be halved: {steps} are no {half.collective.value}: {error}"
        ) from None
    return half


def _check_content(schedule: Schedule) -> None:
    for number, step in enumerate(schedule.steps):
        _check_landing(number, step)
    trees, state = _finish_trees(schedule)
    for chunk in range(schedule.chunks):
        _check_holders(schedule, trees, state, chunk)


def _finish_trees(schedule: Schedule) -> tuple[Trees, State[int]]:
    """What each rank holds of each chunk in the end; all chunks have the same leaves."""
    trees = Trees()
    leaves = [trees.add_leaf(rank, 0) for rank in range(schedule.ranks)]
    return trees, finish(schedule, lambda rank, _: leaves[rank], trees.add)


def _check_roles(schedule: Schedule) -> None:
    """Members and owners are ranks, and each chunk has an owner if there are owners."""
    everyone, members, owners = range(schedule.ranks), schedule.members, schedule.owners
    kind, chunks = schedule.collective, schedule.chunks
    if chunks < 1:
        raise ScheduleError(f"a buffer has at least one chunk, found {chunks}")
    if not members or len(set(members)) < len(members) or not set(members) <= set(everyone):
        raise ScheduleError(f"members must be some of {schedule.ranks} ranks, found {members}")
    needed = 0 if kind is Collective.ALL_REDUCE and not owners else chunks
    if len(owners) != needed or not set(owners) <= set(everyone):
        raise ScheduleError(
            f"each of {chunks} chunks must have one of {schedule.ranks} ranks as its owner, "
            f"found {owners}"
        )
    if kind in (Collective.REDUCE, Collective.BROADCAST) and len(set(owners)) > 1:
        raise ScheduleError(f"a {kind.value} has one root, found {sorted(set(owners))}")


def _merge_chunks(schedule: Schedule) -> Schedule:
    """Neighbouring chunks that no transfer and no owner tells apart, as one."""
    firsts, table = tabulate(schedule)
    if len(firsts) == schedule.chunks:
        return schedule
    rows = map(Transfer._make, table.tolist())
    steps = tuple(tuple(islice(rows, len(step))) for step in schedule.steps)
    owners = tuple(schedule.owners[first] for first in firsts) if schedule.owners else ()
    return replace(schedule, chunks=len(firsts), steps=steps, owners=owners)


def _check_landing(number: int, step: Step) -> None:
    landing = {
        (dst, chunk) for _, dst, lo, hi, reduce in step if not reduce for chunk in range(lo, hi)
    }
    if not landing:
        return
    leaving = {(src, chunk) for src, _, lo, hi, _ in step for chunk in range(lo, hi)}
    if not landing.isdisjoint(leaving):
        rank, chunk = min(landing & leaving)
        raise ScheduleError(
            f"step {number}: chunk {chunk} of rank {rank} is overwritten while it is sent"
        )


def _check_holders(schedule: Schedule, trees: Trees, state: State[int], chunk: int) -> None:
    wanted = make_mask(schedule.contributors(chunk))
    holders = schedule.holders(chunk)
    first = state[holders[0]][chunk]
    for rank in holders:
        held = state[rank][chunk]
        if lacking := wanted & ~trees.find_mask(held):
            raise ScheduleError(
                f"at the end rank {rank}'s sum of chunk {chunk} lacks {name_ranks(lacking)}"
            )
        if held != first:
            raise ScheduleError(
                f"at the end ranks {holders[0]} and {rank} hold chunk {chunk} added in different "
                "orders, so that they may differ in the last bits"
            )


# ---- without symbols ----------------------------------------------------------------------


def passes_on(schedule: Schedule) -> bool:
    """Whether what is added is given away and only whole sums are copied: then all is proved.

    Sufficient, and linear in the transfers; if several ranks add the same contributions the
    symbols are needed. For each rank and chunk there is a number: how many contributions its value
    consists of, 0 for no value, GIVEN_AWAY for one that has been added elsewhere. A value that is
    added is sent nowhere else in that step, and afterwards neither sent nor added to. So no
    contribution is part of two values that are not whole, whole ones are copies of one sum, and
    since nothing is added to them, a value of as many contributions as there are has each once.

    Raises ScheduleError if a transfer is not between two ranks of chunks that exist.
    """
    chunks, table = tabulate(schedule)
    whole = len(schedule.contributors(0))
    held = np.zeros(schedule.ranks * len(chunks), np.int64)
    for place, chunk in enumerate(chunks):
        held[np.array(schedule.contributors(chunk)) * len(chunks) + place] = 1
    reads, writes = np.zeros_like(held), np.zeros_like(held)
    end = 0
    for step in schedule.steps:
        begin, end = end, end + len(step)
        sources, places, adds = _list_cells(table[begin:end], len(chunks))
        values, added, copied = held[sources], places[adds], places[~adds]
        np.add.at(reads, sources, 1)
        np.add.at(writes, copied, 1)
        given = sources[adds]
        held[given] = GIVEN_AWAY
        if (
            (values <= 0).any()
            or (values[~adds] != whole).any()
            or (reads[given] != 1).any()
            or reads[copied].any()
            or (writes[copied] != 1).any()
            or writes[added].any()
            or (held[added] < 0).any()
        ):
            return False
        np.add.at(held, added, values[adds])
        if (held[added] > whole).any():
            return False
        held[copied] = whole
        reads[sources] = writes[copied] = 0
    return all(
        (held[np.array(schedule.holders(chunk)) * len(chunks) + place] == whole).all()
        for place, chunk in enumerate(chunks)
    )


def tabulate(schedule: Schedule) -> tuple[list[int], Table]:
    """The first one of all chunks that are alike; and a row for each transfer, of these chunks.

    Raises ScheduleError if a transfer is not between two ranks of chunks that exist.
    """
    ranks, chunks, owners = schedule.ranks, schedule.chunks, np.array(schedule.owners)
    numbers = chain.from_iterable(chain.from_iterable(schedule.steps))
    table = np.fromiter(numbers, np.int64).reshape(-1, len(Transfer._fields))
    src, dst, lo, hi, _ = table.T
    is_right = (src >= 0) & (src < ranks) & (dst >= 0) & (dst < ranks) & (src != dst)
    is_right &= (lo >= 0) & (lo < hi) & (hi <= chunks)
    if not is_right.all():
        transfers = ((number, each) for number, step in enumerate(schedule.steps) for each in step)
        number, transfer = next(islice(transfers, int(is_right.argmin()), None))
        raise ScheduleError(
            f"step {number}: {transfer} is not a message between two of {ranks} ranks with some "
            f"of {chunks} chunks"
        )
    changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1
    # Not np.unique, which imports a module: a call may come when there are no descriptors left.
    is_end = np.zeros(chunks + 1, np.bool_)
    for found in ([0, chunks], changes, lo, hi):
        is_end[found] = True
    ends = np.flatnonzero(is_end)
    table[:, 2:4] = np.searchsorted(ends, table[:, 2:4])
    return ends[:-1].tolist(), table


def _list_cells(rows: Table, chunks: int) -> tuple[Table, Table, NDArray[np.bool_]]:
    """For each chunk of each transfer where it is read, where it goes, and whether it is added.

    A place is a rank's number times ``chunks``, plus a chunk's number.
    """
    src, dst, lo, hi, reduce = rows.T
    lengths = hi - lo
    ends = np.cumsum(lengths)
    chunk = np.arange(ends[-1] if len(ends) else 0) + np.repeat(lo - ends + lengths, lengths)
    return (
        np.repeat(src * chunks, lengths) + chunk,
        np.repeat(dst * chunks, lengths) + chunk,
        np.repeat(reduce != 0, lengths),
    )


# ---- no deadlock --------------------------------------------------------------------------


def check_programs(programs: Sequence[Rounds]) -> None:
    """Raise ScheduleError unless the ranks' programs fit together, which rules out a deadlock.

    Rendezvous semantics: a rank that enters a round posts its receives; then it sends in order,
    and each send may block until its receive is posted; it leaves the round when all is done.
    Messages from one rank to another do not overtake each other.

    What is checked: each rank goes through the steps in order, and for each pair of ranks the
    messages that one sends are those that the other expects, in the same order and in the same
    steps. Then no rank waits for ever: let t be the first step that some rank never leaves. All
    rounds before t are over, so every rank with a round t enters it and posts its receives. All
    sends of these rounds go to such rounds, so none blocks; all their receives are sent to by
    such rounds, so none lacks its message, and t is left by all.
    """
    sent: dict[tuple[int, int], list[_Sent]] = defaultdict(list)
    expected: dict[tuple[int, int], list[_Sent]] = defaultdict(list)
    for rank, program in enumerate(programs):
        last = -1
        for step, receives, sends in program:
            if step <= last:
                raise ScheduleError(f"rank {rank} takes step {step} after step {last}")
            last = step
            for transfer in receives:
                expected[transfer[0], rank].append((step, transfer))
            for transfer in sends:
                sent[rank, transfer[1]].append((step, transfer))
    for src, dst in sorted(sent.keys() | expected.keys()):
        if sent[src, dst] == expected[src, dst]:
            continue
        messages = zip_longest(sent[src, dst], expected[src, dst])
        for number, (left, right) in enumerate(messages):
            if left != right:
                raise ScheduleError(
                    f"message {number} from rank {src} to rank {dst} is {_describe(left)} for the "
                    f"sender, {_describe(right)} for the receiver"
                )


_Sent = tuple[int, Transfer]
"""A transfer with the number of its step."""


def _describe(message: _Sent | None) -> str:
    if message is None:
        return "none"
    step, transfer = message
    kind = "" if transfer.reduce else "a copy of "
    return f"{kind}chunks {transfer.lo} to {transfer.hi} in step {step}"


# ---- how sums are made --------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """Where a schedule completes its sums."""

    final: frozenset[tuple[int, int, int]]
    """Step, rank and chunk of each addition after which every contribution is in the chunk."""
    is_single: bool
    """Whether each sum is made at once from original contributions, so that no partial sum is
    rounded on the way."""


def find_sums(schedule: Schedule) -> Sums:
    whole = make_mask(schedule.members)
    held = {
        (rank, chunk): 1 << rank
        for chunk in range(schedule.chunks)
        for rank in schedule.contributors(chunk)
    }
    final, is_single = set(), True
    for number, step in enumerate(schedule.steps):
        after: dict[tuple[int, int], int] = {}
        passed_on = set()
        for src, dst, lo, hi, reduce in step:
            for chunk in range(lo, hi):
                value, place = held.get((src, chunk), 0), (dst, chunk)
                if reduce:
                    is_single = is_single and value.bit_count() == 1
                    if value == whole and len(schedule.members) > 1:
                        passed_on.add(place)
                    value |= after.get(place, held.get(place, 0))
                after[place] = value
        reduced = {(t.dst, chunk) for t in step if t.reduce for chunk in range(t.lo, t.hi)}
        is_single = is_single and all(after[place] == whole for place in reduced)
        # A sum that was complete when it arrived is not completed again.
        complete = {place for place in reduced - passed_on if after[place] == whole}
        final |= {(number, rank, chunk) for rank, chunk in complete}
        held |= after
    return Sums(frozenset(final), is_single)


def is_order_fixed(schedule: Schedule) -> bool:
    """Whether all chunks are summed in the same order, independent of where the buffer is cut.

    The two operands of one addition may be swapped, which changes no bit. If nothing is added,
    it is.
    """
    if schedule.collective in (Collective.ALL_GATHER, Collective.BROADCAST):
        return True
    _, state = _finish_trees(schedule)
    results = {state[rank][c] for c in range(schedule.chunks) for rank in schedule.holders(c)}
    return len(results) <= 1
