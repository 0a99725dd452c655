"""Proves that a schedule keeps its promise, without running it.

The proof propagates the exact state, with symbols for the contributions, like SCCL (Cai et al.,
PPoPP'21). Equal reduction trees show that two ranks hold bitwise equal sums. Most algorithms need
no symbols: if a rank never uses what it has sent away, counting the contributions is enough.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import ScheduleError
from mpiddp.schedules.replay import State, replay
from mpiddp.schedules.schedule import Collective, Rounds, Schedule, Step, Transfer, halve

Table = NDArray[np.int64]

FEW_RANKS = 16
"""Beyond them ``passes_on`` is asked first, which takes a quarter of the time that symbols take."""
GIVEN_AWAY = -1


def prove(schedule: Schedule) -> None:
    """Raise ScheduleError, which says where, unless all of this holds (steps count from 0):

    - transfers are between different ranks that exist, of chunks that exist;
    - a rank sends only what it holds, even where nobody uses it;
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
    _check_form(schedule)
    coarse = _merge_chunks(schedule)
    try:
        _check_content(coarse)
    except ScheduleError:
        # Once more with the chunks' own numbers, for whoever reads the message.
        _check_content(schedule)
        raise


def prove_half(whole: Schedule, kind: Collective) -> Schedule:
    """The half of an all-reduce that such a collective is made of (``halve``), proved.

    Raises ScheduleError, which begins with "cannot be halved"; ValueError where no owners are
    named.
    """
    number = 0 if kind in (Collective.REDUCE, Collective.REDUCE_SCATTER) else 1
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
    _check_result(schedule)


def _check_form(schedule: Schedule) -> None:
    ranks, chunks = schedule.ranks, schedule.chunks
    for number, step in enumerate(schedule.steps):
        for transfer in step:
            src, dst, lo, hi, _ = transfer
            if not (
                0 <= src < ranks and 0 <= dst < ranks and src != dst and 0 <= lo < hi <= chunks
            ):
                raise ScheduleError(
                    f"step {number}: {transfer} is not a message between two of {ranks} ranks "
                    f"with some of {chunks} chunks"
                )


def _check_roles(schedule: Schedule) -> None:
    """Members and owners are ranks, and each chunk has an owner where there are owners."""
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
    owners = schedule.owners
    cuts = {0, schedule.chunks}
    cuts.update(chunk for chunk in range(1, len(owners)) if owners[chunk] != owners[chunk - 1])
    for step in schedule.steps:
        for _, _, lo, hi, _ in step:
            cuts.add(lo)
            cuts.add(hi)
    if len(cuts) == schedule.chunks + 1:
        return schedule
    ends = sorted(cuts)
    steps = tuple(
        tuple(
            Transfer(t.src, t.dst, bisect.bisect(ends, t.lo) - 1, bisect.bisect(ends, t.hi) - 1,
                     t.reduce)
            for t in step
        )
        for step in schedule.steps
    )  # fmt: skip
    kept = tuple(owners[lo] for lo in ends[:-1]) if owners else ()
    return replace(schedule, chunks=len(ends) - 1, steps=steps, owners=kept)


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


class _AddedTwiceError(Exception):
    """Says whose contribution; who knows the step, adds it."""


class _Trees:
    """Reduction trees, each known by a number: equal numbers, equal trees."""

    def __init__(self, leaves: int) -> None:
        self._contributions = [1 << leaf for leaf in range(leaves)]
        self._known: dict[tuple[int, int], int] = {}

    def add(self, values: Sequence[int]) -> int:
        left = values[0]
        for right in values[1:]:
            operands = (left, right) if left < right else (right, left)
            tree = self._known.get(operands)
            left = self._make(operands) if tree is None else tree
        return left

    def _make(self, operands: tuple[int, int]) -> int:
        left, right = self._contributions[operands[0]], self._contributions[operands[1]]
        if left & right:
            raise _AddedTwiceError(
                f"the contribution of {_name_ranks(left & right)} is added twice"
            )
        self._contributions.append(left | right)
        self._known[operands] = tree = len(self._contributions) - 1
        return tree

    def contributions(self, tree: int | None) -> int:
        return 0 if tree is None else self._contributions[tree]


def _name_ranks(mask: int) -> str:
    return _name([rank for rank in range(mask.bit_length()) if mask >> rank & 1])


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _check_result(schedule: Schedule) -> None:
    trees = _Trees(schedule.ranks)
    states = replay(schedule, lambda rank, _: rank, trees.add)
    state = next(states)
    for step in range(len(schedule.steps)):
        try:
            state = next(states)
        except _AddedTwiceError as twice:
            raise ScheduleError(f"step {step}: {twice}") from None
    for chunk in range(schedule.chunks):
        _check_holders(schedule, trees, state, chunk, schedule.holders(chunk))


def _check_holders(
    schedule: Schedule,
    trees: _Trees,
    state: State[int],
    chunk: int,
    holders: Sequence[int],
) -> None:
    wanted = sum(1 << rank for rank in schedule.contributors(chunk))
    first = state[holders[0]][chunk]
    for rank in holders:
        held = state[rank][chunk]
        if lacking := wanted & ~trees.contributions(held):
            raise ScheduleError(
                f"at the end rank {rank}'s sum of chunk {chunk} lacks {_name_ranks(lacking)}"
            )
        if held != first:
            raise ScheduleError(
                f"at the end ranks {holders[0]} and {rank} hold chunk {chunk} added in different "
                "orders, so that they may differ in the last bits"
            )


# ---- without symbols ----------------------------------------------------------------------


def passes_on(schedule: Schedule) -> bool:
    """Whether what is added is given away and only whole sums are copied: then all is proved.

    Sufficient, and linear in the transfers; where several ranks add the same contributions the
    symbols are needed. For each rank and chunk there is a number: how many contributions its value
    consists of, 0 for no value, GIVEN_AWAY for one that has been added elsewhere. A value that is
    added is sent nowhere else in that step, and afterwards neither sent nor added to. So no
    contribution is part of two values that are not whole, whole ones are copies of one sum, and
    since nothing is added to them, a value of as many contributions as there are has each once.
    """
    found = _tabulate(schedule)
    if found is None:
        return False
    chunks, table = found
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


def _tabulate(schedule: Schedule) -> tuple[list[int], Table] | None:
    """The first one of all chunks that are alike; and a row for each transfer, of these chunks.

    None where a transfer is not between two ranks of chunks that exist.
    """
    numbers = chain.from_iterable(chain.from_iterable(schedule.steps))
    table = np.fromiter(numbers, np.int64).reshape(-1, len(Transfer._fields))
    src, dst, lo, hi, _ = table.T
    ranks, owners = schedule.ranks, np.array(schedule.owners)
    if not (
        np.all((src >= 0) & (src < ranks) & (dst >= 0) & (dst < ranks) & (src != dst))
        and np.all((lo >= 0) & (lo < hi) & (hi <= schedule.chunks))
    ):
        return None
    changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1
    ends = np.unique(np.concatenate([[0, schedule.chunks], changes, lo, hi]))
    table[:, 2:4] = np.searchsorted(ends, table[:, 2:4])
    return ends[:-1].tolist(), table


def _list_cells(rows: Table, chunks: int) -> tuple[Table, Table, NDArray[np.bool_]]:
    """For each chunk of each transfer where it is read, where it goes, and whether it is added.

    A place is the number of a rank, times ``chunks``, plus that of a chunk.
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
    steps. Then nobody waits for ever: let t be the first step that some rank never leaves. All
    rounds before t are over, so every rank with a round t enters it and posts its receives. All
    sends of these rounds go to such rounds, so none blocks; all their receives are sent to by
    such rounds, so none lacks its message, and t is left by all.
    """
    sent: dict[tuple[int, int], Messages] = defaultdict(list)
    expected: dict[tuple[int, int], Messages] = defaultdict(list)
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
    if sent != expected:
        raise ScheduleError(_describe_misfit(sent, expected))


Messages = list[tuple[int, Transfer]]


def _describe_misfit(
    sent: Mapping[tuple[int, int], Messages], expected: Mapping[tuple[int, int], Messages]
) -> str:
    pairs = sorted(sent.keys() | expected.keys())
    src, dst = next(pair for pair in pairs if sent.get(pair) != expected.get(pair))
    messages = zip_longest(sent.get((src, dst), ()), expected.get((src, dst), ()))
    number, (left, right) = next((n, pair) for n, pair in enumerate(messages) if len(set(pair)) > 1)
    return (
        f"message {number} from rank {src} to rank {dst} is {_describe(left)} for the sender, "
        f"{_describe(right)} for the receiver"
    )


def _describe(message: tuple[int, Transfer] | None) -> str:
    if message is None:
        return "none"
    step, transfer = message
    kind = "" if transfer.reduce else "a copy of "
    return f"{kind}chunks {transfer.lo} to {transfer.hi} in step {step}"
