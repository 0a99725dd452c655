"""Proves a plan without running it: no deadlock, no race, and every contribution exactly once.

Two operations are ordered if one comes later in the same thread block, waits for the other, or
receives what it sent, or by a chain of these (Lamport's happens-before, CACM'78). Vector clocks
decide it (Fidge; Mattern). If all accesses to the same chunk of which one writes are ordered, each
run leaves the same values behind, so one replay with symbols shows them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import ScheduleError
from mpiddp.schedules.plans.plan import Buffer, Operation, Plan, Promise, Span, list_connections
from mpiddp.schedules.trees import Trees, make_mask, name_ranks

MOST_CLOCKS = 1 << 28
"""Numbers in the clocks that are kept: 1 GiB."""

Value = TypeVar("Value")
Clock = NDArray[np.int32]


@dataclass(frozen=True)
class Proof:
    """What holds of a plan that was proved."""

    transfers: int
    """Chunks that went from rank to rank."""
    is_bitwise_equal: bool
    """Whether all ranks add in the same order, so that they end with the same bits."""


def prove_plan(plan: Plan) -> Proof:
    """Raise ScheduleError, which says where, unless the plan keeps its promise."""
    for operation in plan.operations:
        plan.check_bounds((*operation.reads, *operation.writes), operation)
    order = find_order(plan)
    _check_races(plan, order)
    trees, moves = Trees(), 0

    def count(value: int, source: int, target: int, operation: Operation) -> int:
        nonlocal moves
        moves += 1
        return value

    state = replay_plan(plan, order, trees.add_leaf, lambda values, _: trees.add(values), count)
    return Proof(moves, _check_promise(plan, trees, state))


# ---- order --------------------------------------------------------------------------------


def find_order(plan: Plan) -> list[int]:
    """An order in which the operations can run. Raises ScheduleError for a deadlock."""
    before = [list(_list_causes(plan.operations, each)) for each in range(len(plan.operations))]
    order = _sort(before)
    if len(order) < len(before):
        cycle = _find_cycle(before)
        raise ScheduleError(f"deadlock: {_name_cycle(plan, cycle)}")
    if plan.slots:
        owners, limited = _split(plan, before)
        if len(_sort(limited)) < len(limited):
            cycle = [number for number, _ in groupby(owners[each] for each in _find_cycle(limited))]
            if len(cycle) > 1 and cycle[0] == cycle[-1]:
                del cycle[-1]
            raise ScheduleError(
                f"deadlock, since a connection holds {plan.slots} messages of one chunk: "
                f"{_name_cycle(plan, cycle)}"
            )
    return order


def _name_cycle(plan: Plan, cycle: Sequence[int]) -> str:
    return " waits for ".join(str(plan.operations[each]) for each in (*cycle, cycle[0]))


def _split(plan: Plan, before: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """For each chunk of each operation the operation's number, and the chunks that it waits for.

    Of a large buffer an operation takes one chunk after the other, each a message of its own, and
    a connection holds only some: the sender of more must wait until the first ones are taken out.
    """
    first, owners = list[int](), list[int]()
    limited: list[list[int]] = []
    lengths = [next((s.hi - s.lo for s in (*o.reads, *o.writes)), 1) for o in plan.operations]
    for number, length in enumerate(lengths):
        first.append(len(owners))
        owners += [number] * length
    for number, length in enumerate(lengths):
        message = plan.operations[number].message
        for place in range(length):
            # A cause that is the message's sender is ahead by one chunk, not by all.
            causes = [first[number] + place - 1] if place else []
            if not place:
                causes += [first[c] + lengths[c] - 1 for c in before[number] if c != message]
                if message is not None and message in plan.operations[number].after:
                    causes.append(first[message] + lengths[message] - 1)
            if message is not None:
                causes.append(first[message] + place)
            limited.append(causes)
    for messages in list_connections(plan).values():
        sent = [first[each] + place for each, _ in messages for place in range(lengths[each])]
        taken = [first[each] + place for _, each in messages for place in range(lengths[each])]
        for early, late in zip(taken, sent[plan.slots :], strict=False):
            limited[late].append(early)
    return owners, limited


def _list_causes(operations: Sequence[Operation], number: int) -> Iterator[int]:
    operation = operations[number]
    if number:
        last = operations[number - 1]
        if (last.rank, last.block) == (operation.rank, operation.block):
            yield number - 1
    if operation.message is not None:
        yield operation.message
    yield from operation.after


def _sort(before: Sequence[Sequence[int]]) -> list[int]:
    """Those that can run, in an order in which they can."""
    following: list[list[int]] = [[] for _ in before]
    missing = [len(causes) for causes in before]
    for number, causes in enumerate(before):
        for cause in causes:
            following[cause].append(number)
    ready = deque(number for number, count in enumerate(missing) if not count)
    order = []
    while ready:
        number = ready.popleft()
        order.append(number)
        for follower in following[number]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    return order


def _find_cycle(before: Sequence[Sequence[int]]) -> list[int]:
    """Operations that wait for each other, the first for the second and so on."""
    stuck = set(range(len(before))) - set(_sort(before))
    path, places, number = list[int](), dict[int, int](), min(stuck)
    while number not in places:
        places[number] = len(path)
        path.append(number)
        number = next(cause for cause in before[number] if cause in stuck)
    return path[places[number] :]


# ---- races --------------------------------------------------------------------------------


def _check_races(plan: Plan, order: Sequence[int]) -> None:
    """Raise ScheduleError if nothing orders two accesses to a chunk, of which one writes.

    In one call, or in calls that follow each other: one more than there are scratch memories, so
    that the last call uses the same one as the first.
    """
    count, calls = len(plan.operations), range(plan.scratches + 1)
    operations = [each for call in calls for each in _repeat(plan, call)]
    blocks: dict[tuple[int, int], int] = {}
    for operation in operations:
        blocks.setdefault((operation.rank, operation.block), len(blocks))
    own = [blocks[operation.rank, operation.block] for operation in operations]
    writers: list[int | None] = [None] * (plan.cells * len(calls))
    readers: dict[int, list[int]] = {}
    repeated = [number + call * count for call in calls for number in order]
    for number, clock in _run_clocks(operations, repeated, own, len(blocks)):
        operation = operations[number]
        _check_overlaps(plan, operation)
        turn = number // count % plan.scratches * plan.cells if plan.scratches else 0

        def is_before(other: int, clock: Clock = clock) -> bool:
            return bool(clock[own[other]] > other)

        for span in operation.reads:
            for cell in _list_cells(plan, span, turn):
                writer = writers[cell]
                if writer is not None and not is_before(writer):
                    raise _name_race(plan, (writer, number), span, "reads")
                readers.setdefault(cell, []).append(number)
        for span in operation.writes:
            for cell in _list_cells(plan, span, turn):
                writer = writers[cell]
                if writer is not None and not is_before(writer):
                    raise _name_race(plan, (writer, number), span, "writes")
                for reader in readers.pop(cell, ()):
                    if reader != number and not is_before(reader):
                        raise _name_race(plan, (number, reader), span, "reads")
                writers[cell] = number


def _repeat(plan: Plan, call: int) -> Iterator[Operation]:
    """The operations of a call; a rank's call begins when all of its last one has ended."""
    if not call:
        yield from plan.operations
        return
    base, last = call * len(plan.operations), (call - 1) * len(plan.operations)
    ends = {(each.rank, each.block): number for number, each in enumerate(plan.operations)}
    begun = set[tuple[int, int]]()
    for each in plan.operations:
        after = [base + cause for cause in each.after]
        if (each.rank, each.block) not in begun:
            after += [last + end for (rank, _), end in ends.items() if rank == each.rank]
        begun.add((each.rank, each.block))
        message = None if each.message is None else base + each.message
        yield replace(each, message=message, after=tuple(after))


def _list_cells(plan: Plan, span: Span, turn: int) -> range:
    """As ``plan.locate``; in scratch memory, those of this turn."""
    cells, shift = plan.locate(span), turn if span.buffer is Buffer.SCRATCH else 0
    return range(cells.start + shift, cells.stop + shift)


def _check_overlaps(plan: Plan, operation: Operation) -> None:
    """Raise ScheduleError if it writes, for one chunk, what it reads or writes for another.

    Its threads take chunks side by side, or one after the other, as the runtime likes.
    """
    for place, target in enumerate(operation.writes):
        cells = plan.locate(target)
        for other in (*operation.reads, *operation.writes[:place]):
            there = plan.locate(other)
            if cells != there and cells.start < there.stop and there.start < cells.stop:
                raise ScheduleError(
                    f"race: {operation} writes {plan.name(target)}, of which {plan.name(other)} is "
                    "a part that it takes for other chunks"
                )


def _run_clocks(
    operations: Sequence[Operation], order: Sequence[int], own: Sequence[int], blocks: int
) -> Iterator[tuple[int, Clock]]:
    """Each operation with its clock: for each block, one more than the last number known of it.

    Operations of a block are numbered in their order. A clock is only kept until all that wait for
    its operation have it.
    """
    waiting = [0] * len(operations)
    causes: list[tuple[int, ...]] = []
    for operation in operations:
        message = () if operation.message is None else (operation.message,)
        causes.append((*operation.after, *message))
        for cause in causes[-1]:
            waiting[cause] += 1
    current: list[Clock | None] = [None] * blocks
    kept: dict[int, Clock] = {}
    for number in order:
        block = own[number]
        clock = current[block]
        clock = np.zeros(blocks, np.int32) if clock is None else clock
        for cause in causes[number]:
            np.maximum(clock, kept[cause], out=clock)
            waiting[cause] -= 1
            if not waiting[cause]:
                del kept[cause]
        yield number, clock
        clock[block] = number + 1
        current[block] = clock
        if waiting[number]:
            kept[number] = clock.copy()
            if len(kept) * blocks > MOST_CLOCKS:
                raise ScheduleError(f"{operations[number]}: too many others wait for too long")


def _name_race(plan: Plan, numbers: tuple[int, int], span: Span, verb: str) -> ScheduleError:
    """``numbers``: of who writes and of who reads or writes, counted over all calls."""
    calls, places = zip(*(divmod(each, len(plan.operations)) for each in numbers), strict=True)
    writer, other = (plan.operations[each] for each in places)
    when = ", if one call follows another" if calls[0] != calls[1] else ""
    return ScheduleError(
        f"race: {other} {verb} {plan.name(span)}, which {writer} writes, and nothing orders the "
        f"two{when}"
    )


# ---- values -------------------------------------------------------------------------------


def replay_plan(
    plan: Plan,
    order: Sequence[int],
    leaf: Callable[[int, int], Value],
    add: Callable[[Sequence[Value], Operation], Value],
    move: Callable[[Value, int, int, Operation], Value],
) -> list[Value | None]:
    """What each chunk of all memory holds in the end; None for nothing.

    ``leaf(rank, chunk)`` is what an input begins with; ``move(value, source, target, operation)``
    is the value of a chunk that goes from rank to rank. Raises ScheduleError if an operation uses
    what nobody has written, and if ``add`` raises ValueError.
    """
    state: list[Value | None] = [None] * plan.cells
    for rank, (inputs, _, _) in enumerate(plan.sizes):
        for chunk, cell in enumerate(plan.locate(Span(rank, Buffer.INPUT, 0, inputs))):
            state[cell] = leaf(rank, chunk)
    receivers = {each.message for each in plan.operations if each.message is not None}
    sums: dict[int, list[Value]] = {}
    for number in order:
        operation = plan.operations[number]
        if not operation.reads and operation.message is None:
            continue
        rank = operation.rank
        operands = []
        if operation.message is not None:
            source = plan.operations[operation.message].rank
            sent = sums.pop(operation.message)
            operands.append([move(value, source, rank, operation) for value in sent])
        for span in operation.reads:
            values = [_take(plan, state, cell, span, operation) for cell in plan.locate(span)]
            if span.rank != rank:
                values = [move(value, span.rank, rank, operation) for value in values]
            operands.append(values)
        results = operands[0]
        if len(operands) > 1:
            try:
                results = [add(values, operation) for values in zip(*operands, strict=True)]
            except ValueError as error:
                raise ScheduleError(f"{operation}: {error}") from None
        for span in operation.writes:
            for cell, value in zip(plan.locate(span), results, strict=True):
                is_own = span.rank == rank
                state[cell] = value if is_own else move(value, rank, span.rank, operation)
        if number in receivers:
            sums[number] = results
    return state


def _take(
    plan: Plan, state: Sequence[Value | None], cell: int, span: Span, operation: Operation
) -> Value:
    value = state[cell]
    if value is None:
        raise ScheduleError(
            f"{operation} uses {plan.name(span)}, before anything was written there"
        )
    return value


def _check_promise(plan: Plan, trees: Trees, state: Sequence[int | None]) -> bool:
    """Raise ScheduleError unless it is kept; returns whether all ranks add in the same order."""
    orders: dict[int, int] = {}
    is_equal = True
    for rank in range(plan.ranks):
        for chunk, (ranks, home) in enumerate(_list_expected(plan, rank)):
            (cell,) = plan.locate(Span(rank, Buffer.OUTPUT, chunk, chunk + 1))
            tree = state[cell]
            where = f"at the end rank {rank}'s output chunk {chunk}"
            if tree is None:
                raise ScheduleError(f"{where} was never written")
            found, found_home = trees.find_mask(tree), trees.find_home(tree)
            is_sum = ranks.bit_count() > 1
            if is_sum and found_home == home and found != ranks:
                raise ScheduleError(
                    f"{where} lacks the contribution of {name_ranks(ranks & ~found)}"
                )
            if (found, found_home) != (ranks, home):
                raise ScheduleError(
                    f"{where} holds chunk {found_home} of {name_ranks(found)}, expected chunk "
                    f"{home} of {name_ranks(ranks)}"
                )
            is_equal &= orders.setdefault(home, tree) == tree or not is_sum
    return is_equal


def _list_expected(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """For each chunk of a rank's output: whose contributions it is the sum of, and which chunk."""
    everyone, share = make_mask(range(plan.ranks)), plan.share
    if plan.promise is Promise.ALL_REDUCE:
        return [(everyone, chunk) for chunk in range(plan.chunks)]
    if plan.promise is Promise.REDUCE_SCATTER:
        return [(everyone, rank * share + chunk) for chunk in range(share)]
    base = rank * share if plan.promise is Promise.ALL_TO_ALL else 0
    return [(1 << source, base + chunk) for source in range(plan.ranks) for chunk in range(share)]
