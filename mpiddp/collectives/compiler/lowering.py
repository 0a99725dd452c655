"""A schedule becomes one rank's list of instructions.

The buffer is cut into cells: a chunk, or parts of one where a chunk is longer than a message or a
block that stays in cache should be. Within a step, a rank starts its messages, reads early what
must be, and adds cell by cell. As soon as a cell has its value, whatever a later step sends or
copies of it goes out, and the next receives are posted: a long chunk flows through the steps
instead of stopping in each of them.

That keeps the promise against deadlock that `proof` makes: when a rank waits in a step, it has
posted all receives of that step and started all its sends.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpiddp.collectives.compiler.hazards import (
    ENTERED,
    Dependencies,
    Stages,
    done_stage,
    find_dependencies,
    read_stage,
)
from mpiddp.collectives.compiler.instructions import (
    Fetch,
    Finish,
    Instruction,
    Operand,
    Program,
    Publish,
    Push,
    Reduce,
    Source,
    Start,
    Wait,
)
from mpiddp.collectives.compiler.tiling import Cut, Grid, Incoming, Outgoing, Pieces, Scratch
from mpiddp.schedules.proof import Sums, find_sums
from mpiddp.schedules.schedule import Round, Rounds, Schedule, Transfer, project


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's part of a schedule, for buffers of any length."""

    schedule: Schedule
    rank: int
    group: frozenset[int]
    """The other ranks that share their memory with this one."""
    rounds: Rounds
    needs: Dependencies
    ends: Mapping[int, frozenset[int]]
    """For each chunk the steps in which this rank completes it."""
    sums: Sums


def find_part(schedule: Schedule, rank: int, group: Collection[int]) -> Part:
    """The part of ``rank``; ``group`` shares its memory with it."""
    others = frozenset(group) - {rank}
    needs = Dependencies({}, {}, frozenset(), {}, frozenset())
    if others:
        needs = find_dependencies(schedule, rank, group)
    sums = find_sums(schedule)
    ends: dict[int, set[int]] = defaultdict(set)
    for step, dst, chunk in sums.final:
        if dst == rank:
            ends[chunk].add(step)
    frozen = {chunk: frozenset(steps) for chunk, steps in ends.items()}
    return Part(schedule, rank, others, project(schedule)[rank], needs, frozen, sums)


class _Compiler:
    def __init__(self, part: Part, count: int, cut: Cut) -> None:
        schedule = part.schedule
        self.schedule = schedule
        self.rank = part.rank
        self.group = part.group
        self.cut = cut
        self.grid = Grid(schedule.bounds(count), cut.cell)
        self.count = count
        self.rounds = part.rounds
        self.needs = part.needs
        self.ends = part.ends
        self.pieces = Pieces(self.rounds, self.grid, cut, self.group, self.needs)
        self.scratch = Scratch(self.pieces, self.grid, [each.step for each in self.rounds])
        self.instructions: list[Instruction] = []
        # Nobody works in the memory of a rank that has not entered: the executor waits for that.
        self.known: Stages = dict.fromkeys(self.group, ENTERED)
        self.flying: dict[int, list[Outgoing]] = defaultdict(list)
        """By cell, the messages that were started and not yet finished."""
        self.unsettled: set[int] = set()
        """Cells that are still to be added, or taken in, in the present step."""
        self.holds = [part.rank in schedule.contributors(chunk) for chunk in range(schedule.chunks)]

    # ---- instructions -------------------------------------------------------------------

    def emit_waits(self, step: int, waits: Stages) -> None:
        for rank, stage in sorted(waits.items()):
            if self.known.get(rank, -1) < stage:
                self.instructions.append(Wait(step, rank, stage))
                self.known[rank] = stage

    def _is_known(self, waits: Stages) -> bool:
        return all(self.known.get(rank, -1) >= stage for rank, stage in waits.items())

    def emit_publish(self, stage: int) -> None:
        if stage not in self.needs.published:
            return
        self.instructions.append(Publish(stage))

    def _land(self, cells: range, step: int | None = None) -> None:
        """Wait for the messages that leave from these cells, which are about to change.

        For those up to ``step`` alone, if it is given.
        """
        for cell in cells:
            still = []
            for piece in self.flying.pop(cell, []):
                if step is not None and piece.step > step:
                    still.append(piece)
                elif not piece.is_finished:
                    assert piece.message is not None
                    self.instructions.append(Finish(piece.message))
                    piece.is_finished = True
            if still:
                self.flying[cell] = still

    def _start(self, pieces: Sequence[Outgoing], receives: Sequence[Incoming] = ()) -> None:
        """One instruction for all that starts at once."""
        both: list[Incoming | Outgoing] = [*receives, *pieces]
        numbers = [piece.message for piece in both if piece.message is not None]
        if numbers:
            self.instructions.append(Start(tuple(numbers)))
        for piece in pieces:
            piece.is_started = True
            for cell in piece.cells:
                self.flying[cell].append(piece)

    def _push(self, piece: Outgoing) -> None:
        start, count = self.grid.edges[piece.cells.start], self.grid.length(piece.cells)
        self.instructions.append(Push(piece.step, piece.peer, start, count))
        piece.is_started = True

    def _post(self, piece: Incoming) -> None:
        """Give a receive its place; ``_start`` makes it."""
        assert piece.message is not None
        if piece.is_added:
            slot = self.scratch.take(piece)
            message = self.pieces.messages[piece.message]
            self.pieces.messages[piece.message] = message._replace(start=slot, scratch=True)
        else:
            self._land(piece.cells)
        piece.is_posted = True

    def emit_round(self, this: Round, following: Round | None) -> None:
        step = this.step
        leaving = [piece for piece in self.pieces.outgoing[step] if not piece.is_started]
        for out in leaving:
            self.emit_waits(step, out.waits)
        arriving = [piece for piece in self.pieces.arriving[step] if not piece.is_posted]
        for piece in arriving:
            if not piece.is_added:
                self.emit_waits(step, self.needs.writing.get((step, piece.transfer), {}))
            self._post(piece)
        self._start([out for out in leaving if out.message is not None], arriving)
        for out in leaving:
            if out.message is None:
                self._push(out)
        self._fetch(step)
        self._settle(this, following)
        if done_stage(step) in self.needs.published:
            # A neighbour may write, from then on, where a message still leaves from. One that has
            # left ahead of its step must not be waited for: it may be received no earlier.
            self._land(range(len(self.grid.chunks)), step)
        self.emit_publish(done_stage(step))

    def _fetch(self, step: int) -> None:
        for piece in self.pieces.fetched[step]:
            self.emit_waits(step, self.needs.reading.get((step, piece.transfer), {}))
            slot = self.scratch.take(piece)
            start, count = self.grid.edges[piece.cells.start], self.grid.length(piece.cells)
            self.instructions.append(Fetch(step, piece.transfer.src, start, count, slot))
        self.emit_publish(read_stage(step))

    # ---- additions and arrivals ---------------------------------------------------------

    def _settle(self, this: Round, following: Round | None) -> None:
        """Add and take in cell by cell; let go on what can."""
        step = this.step
        pieces = [*self.pieces.arriving[step], *self.pieces.fetched[step]]
        arrivals: dict[int, list[_Arrival]] = defaultdict(list)
        for piece in pieces:
            for cell in piece.cells:
                arrivals[cell].append((piece.transfer.src, piece))
        for transfer in self.pieces.direct[step]:
            for cell in self.grid.cells(transfer):
                arrivals[cell].append((transfer.src, transfer))
        for entry in arrivals.values():
            entry.sort(key=lambda pair: pair[0])
        self._emit_reduce_waits(this)
        self.unsettled = set(arrivals)
        for run in self._find_runs(sorted(arrivals), arrivals):
            each = [arrival for _, arrival in arrivals[run.start]]
            self._settle_run(this.step, run, each)
            self.unsettled.difference_update(run)
            self._release_run(run, each)
            self._let_go(this.step, run)
            if following is not None:
                self._post_ahead(following)
        for transfer in this.receives:
            self.holds[transfer.lo : transfer.hi] = [True] * (transfer.hi - transfer.lo)

    def _emit_reduce_waits(self, this: Round) -> None:
        for transfer in this.receives:
            key = (this.step, transfer)
            if transfer in self.pieces.direct[this.step]:
                self.emit_waits(this.step, self.needs.reading.get(key, {}))
            if transfer.reduce:
                self.emit_waits(this.step, self.needs.writing.get(key, {}))

    def _find_runs(
        self, cells: Sequence[int], arrivals: Mapping[int, Sequence[_Arrival]]
    ) -> Iterator[range]:
        """Neighbouring cells whose arrivals are parts of the same, up to a block."""
        start = 0
        while start < len(cells):
            first, stop = cells[start], start + 1
            while stop < len(cells) and self._belongs(
                first, cells[stop - 1], cells[stop], arrivals
            ):
                stop += 1
            yield range(first, cells[stop - 1] + 1)
            start = stop

    def _belongs(
        self, first: int, last: int, cell: int, arrivals: Mapping[int, Sequence[_Arrival]]
    ) -> bool:
        chunk, other = self.grid.chunks[first], self.grid.chunks[cell]
        return (
            cell == last + 1
            and arrivals[cell] == arrivals[first]
            and self.holds[other] == self.holds[chunk]
            and self.ends.get(other) == self.ends.get(chunk)
            and self.grid.length(range(first, cell + 1)) <= self.cut.cell
        )

    def _settle_run(self, step: int, run: range, arrivals: Sequence[Incoming | Transfer]) -> None:
        for arrival in arrivals:
            if isinstance(arrival, Transfer) or arrival.message is None or arrival.is_finished:
                continue
            self.instructions.append(Finish(arrival.message))
            arrival.is_finished = True
        operands = [self._make_operand(run, arrival) for arrival in arrivals if _is_added(arrival)]
        if not operands:
            return
        start = self.grid.edges[run.start]
        chunk = self.grid.chunks[run.start]
        if self.holds[chunk]:
            operands.append(Operand(Source.OWN, self.rank, start))
        operands.sort(key=lambda operand: operand.rank)
        self._land(run)
        self.instructions.append(
            Reduce(
                step,
                start,
                self.grid.length(run),
                tuple(operands),
                step in self.ends.get(chunk, ()),
            )
        )

    def _make_operand(self, run: range, arrival: Incoming | Transfer) -> Operand:
        start = self.grid.edges[run.start]
        if isinstance(arrival, Transfer):
            return Operand(Source.PEER, arrival.src, start)
        assert arrival.slot is not None
        offset = start - self.grid.edges[arrival.cells.start]
        return Operand(Source.SCRATCH, arrival.transfer.src, arrival.slot + offset)

    def _release_run(self, run: range, arrivals: Sequence[Incoming | Transfer]) -> None:
        for arrival in arrivals:
            if isinstance(arrival, Incoming):
                self.scratch.release(arrival, len(run))

    # ---- what flows ahead of its step ---------------------------------------------------

    def _let_go(self, step: int, run: range) -> None:
        ready = []
        for cell in run:
            for piece in self.pieces.triggers.get((cell, step), ()):
                piece.missing -= 1
                if piece.missing == 0 and piece.may_flow and self._is_known(piece.waits):
                    ready.append(piece)
        for piece in ready:
            if piece.message is None:
                self._push(piece)
            else:
                self._start([piece])

    def _post_ahead(self, following: Round) -> None:
        """Receives of the next step, as far as their places are free, in their order."""
        if not self.cut.flows:
            return
        posted = []
        for piece in self.pieces.arriving[following.step]:
            if piece.is_posted:
                continue
            if not self._can_post(piece):
                break
            self._post(piece)
            posted.append(piece)
        self._start([], posted)

    def _can_post(self, piece: Incoming) -> bool:
        if piece.is_added:
            return not self.scratch.is_full
        # In place: nothing may still leave from there, or be read from there.
        key = (piece.step, piece.transfer)
        if not self._is_known(self.needs.writing.get(key, {})):
            return False
        return self.unsettled.isdisjoint(piece.cells) and not any(
            not other.is_finished for cell in piece.cells for other in self.flying.get(cell, ())
        )

    def compile(self) -> Program:
        for this, following in itertools.zip_longest(self.rounds, self.rounds[1:]):
            self.emit_round(this, following)
        self._land(range(len(self.grid.chunks)))
        self.emit_waits(len(self.schedule.steps), self.needs.leaving)
        partners = {
            instruction.rank
            for instruction in self.instructions
            if isinstance(instruction, (Fetch, Push))
        }
        partners |= {t.src for transfers in self.pieces.direct.values() for t in transfers}
        return Program(
            self.rank,
            self.count,
            len(self.schedule.steps),
            tuple(self.instructions),
            tuple(self.pieces.messages),
            self.scratch.size,
            tuple(sorted(partners)),
            self.cut.cell,
        )


_Arrival = tuple[int, Incoming | Transfer]
"""What arrives for a cell: its source, and the message, what was fetched early, or the transfer
that is added straight from the source's memory."""


def _is_added(arrival: Incoming | Transfer) -> bool:
    return arrival.reduce if isinstance(arrival, Transfer) else arrival.is_added


def compile_part(part: Part, count: int, cut: Cut) -> Program:
    """The instructions of a part for ``count`` elements.

    With all ranks in its group there are no messages, with nobody in it there is nothing else.
    """
    return _Compiler(part, count, cut).compile()
