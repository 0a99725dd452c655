"""Runs a schedule's programs on real buffers, to contradict the proof where it is wrong.

It shares no code with ``replay`` and ``proof``. Every rank is a small state machine, and a seeded
scheduler decides who moves next, so that one seed is one possible timing of messages that block
until their receive is posted.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddp.schedules.schedule import Collective, Rounds, Schedule, Transfer, project

SUMS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)


class DeadlockError(AssertionError):
    """No rank can move, and not all are done."""


class MisfitError(AssertionError):
    """A message that its receiver does not expect."""


@dataclass
class _Receive:
    transfer: Transfer
    data: np.ndarray | None = None
    arrived: bool = False


Wait = Callable[[], bool]


class _Run:
    """The buffers, what is posted, and one generator per rank that yields what it waits for."""

    def __init__(self, schedule: Schedule, buffers: Sequence[np.ndarray]) -> None:
        self.buffers = [np.array(buffer) for buffer in buffers]
        self._bounds = schedule.bounds(len(self.buffers[0]))
        self._posted: dict[tuple[int, int], deque[_Receive]] = defaultdict(deque)
        self._held = [
            [begins_with(schedule, rank, chunk) for chunk in range(schedule.chunks)]
            for rank in range(schedule.ranks)
        ]

    def _slice(self, rank: int, lo: int, hi: int) -> np.ndarray:
        return self.buffers[rank][self._bounds[lo] : self._bounds[hi]]

    def _made(self, transfers: Iterable[Transfer]) -> list[Transfer]:
        return [t for t in transfers if self._bounds[t.lo] < self._bounds[t.hi]]

    def play(self, rank: int, program: Rounds) -> Iterator[Wait]:
        """One rank: posts, sends in order, waits for all, adds."""
        for _, receives, sends in program:
            posted = [_Receive(transfer) for transfer in self._made(receives)]
            for receive in posted:
                self._posted[receive.transfer.src, rank].append(receive)
            yield lambda: True
            for transfer in self._made(sends):
                queue = self._posted[rank, transfer.dst]
                yield lambda queue=queue: bool(queue)
                self._send(transfer, queue.popleft())
            yield lambda posted=posted: all(receive.arrived for receive in posted)
            self._add(rank, [receive for receive in posted if receive.transfer.reduce])

    def _send(self, transfer: Transfer, receive: _Receive) -> None:
        if transfer != receive.transfer:
            raise MisfitError(f"{transfer} meets a receive for {receive.transfer}")
        _, dst, lo, hi, reduce = transfer
        data = self._slice(transfer.src, lo, hi)
        if reduce:
            receive.data = data.copy()
        else:
            self._slice(dst, lo, hi)[:] = data
            self._held[dst][lo:hi] = [True] * (hi - lo)
        receive.arrived = True

    def _add(self, rank: int, receives: Sequence[_Receive]) -> None:
        arrivals = defaultdict(list)
        for receive in receives:
            start = self._bounds[receive.transfer.lo]
            for chunk in range(receive.transfer.lo, receive.transfer.hi):
                part = slice(self._bounds[chunk] - start, self._bounds[chunk + 1] - start)
                arrivals[chunk].append((receive.transfer.src, receive.data[part]))
        for chunk, operands in arrivals.items():
            own = self._slice(rank, chunk, chunk + 1)
            if self._held[rank][chunk]:
                operands.append((rank, own.copy()))
            operands.sort(key=lambda operand: operand[0])
            total = operands[0][1]
            for _, value in operands[1:]:
                total = total + value
            own[:] = total
            self._held[rank][chunk] = True


def run(schedule: Schedule, buffers: Sequence[np.ndarray], seed: int) -> list[np.ndarray]:
    """The buffers afterwards, in the timing that ``seed`` stands for.

    Even seeds draw the next rank anew each time; odd ones always let the first that can move, in
    an order drawn once, so that some ranks run ahead as far as they can while others starve.
    Raises DeadlockError if nobody can move, MisfitError if a message meets the wrong receive.
    """
    state = _Run(schedule, buffers)
    players = {rank: state.play(rank, each) for rank, each in enumerate(project(schedule))}
    dice, order = random.Random(seed), list(players)
    dice.shuffle(order)
    waits: dict[int, Wait] = dict.fromkeys(order, lambda: True)
    while order:
        if seed % 2 == 0:
            dice.shuffle(order)
        mover = next((rank for rank in order if waits[rank]()), None)
        if mover is None:
            raise DeadlockError(f"ranks {sorted(order)} wait for ever")
        try:
            waits[mover] = next(players[mover])
        except StopIteration:
            order.remove(mover)
    return state.buffers


def begins_with(schedule: Schedule, rank: int, chunk: int) -> bool:
    """Whether the rank's buffer has something meaningful in that chunk to begin with."""
    if schedule.collective in SUMS:
        return rank in schedule.members
    return schedule.owners[chunk] == rank


def promised(
    schedule: Schedule, before: Sequence[Any], combine: Callable[[list[Any]], Any] = sum
) -> Iterator[tuple[int, slice, Any]]:
    """For each rank and slice that the schedule makes a promise of, what must be there."""
    bounds = schedule.bounds(len(before[0]))
    for chunk in range(schedule.chunks):
        part = slice(bounds[chunk], bounds[chunk + 1])
        if schedule.collective in SUMS:
            value = combine([before[rank][part] for rank in schedule.members])
        else:
            value = before[schedule.owners[chunk]][part]
        scatters = schedule.collective in (Collective.REDUCE_SCATTER, Collective.REDUCE)
        for rank in (schedule.owners[chunk],) if scatters else schedule.members:
            yield rank, part, value


def check_promises(
    schedule: Schedule,
    before: Sequence[Any],
    after: Sequence[Any],
    combine: Callable[[list[Any]], Any] = sum,
) -> None:
    """AssertionError unless every promise is kept exactly. Of arrays, or of tensors."""
    for rank, part, value in promised(schedule, before, combine):
        assert bool((after[rank][part] == value).all()), (
            f"rank {rank}, elements {part.start} to {part.stop}: {after[rank][part]} for {value}"
        )


def check(schedule: Schedule, count: int, seed: int) -> None:
    """Run on random integers; AssertionError unless every promise is kept exactly.

    Integers are large and random in every rank, so that garbage of a rank that contributes
    nothing, or a contribution too many, cannot go unnoticed.
    """
    numbers = np.random.default_rng(seed)
    before = [numbers.integers(-(2**40), 2**40, count) for _ in range(schedule.ranks)]
    check_promises(schedule, before, run(schedule, before, seed))


def check_bits(schedule: Schedule, count: int, seeds: Sequence[int]) -> None:
    """Run on floats of very different sizes; AssertionError unless all holders of a chunk end
    bitwise equal, in all timings."""
    numbers = np.random.default_rng(seeds[0])
    before = [
        (numbers.standard_normal(count) * 2.0 ** numbers.integers(-12, 12, count)).astype("f4")
        for _ in range(schedule.ranks)
    ]
    first: dict[tuple[int, int], bytes] = {}
    for seed in seeds:
        after = run(schedule, before, seed)
        for rank, part, _ in promised(schedule, before):
            found = after[rank][part].tobytes()
            assert first.setdefault((part.start, part.stop), found) == found, (
                f"rank {rank} ends with other bits in elements {part.start} to {part.stop}"
            )
