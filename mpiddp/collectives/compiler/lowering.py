"""A schedule becomes one rank's list of instructions.

The buffer is cut into cells: a chunk, or parts of one if a chunk is longer than a message or a
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
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from mpiddp.collectives.compiler.hazards import ENTERED, RankPart, Stages, done_stage, read_stage
from mpiddp.collectives.compiler.instructions import (
    Fetch,
    Finish,
    Instruction,
    Operand,
    Pack,
    Publish,
    Push,
    RankProgram,
    Reduce,
    Source,
    Start,
    Wait,
)
from mpiddp.collectives.compiler.pieces import (
    BufferCut,
    BufferPiece,
    Cells,
    Grid,
    Incoming,
    Outgoing,
    Pieces,
    Scratch,
    list_runs,
)
from mpiddp.schedules.schedule import Round, Transfer

# ---- instructions -------------------------------------------------------------------------


class _Compiler:
    def __init__(self, part: RankPart, count: int, cut: BufferCut) -> None:
        self.part = part
        self.needs = part.needs
        self.cut = cut
        self.count = count
        self.grid = Grid(part.schedule.bounds(count), cut.cell)
        self.pieces = Pieces(part, self.grid, cut)
        self.scratch = Scratch(self.pieces, self.grid, [each.step for each in part.rounds])
        self.instructions: list[Instruction] = []
        # No rank works in the memory of one that has not entered: the executor waits for that.
        self.known: Stages = dict.fromkeys(part.group, ENTERED)
        self.flying: dict[int, list[Outgoing]] = defaultdict(list)
        """By cell, the messages that were started and not yet finished."""
        self.incomplete: set[int] = set()
        """Cells that do not have their value of the present step yet."""
        chunks = range(part.schedule.chunks)
        self.holds = [part.rank in part.schedule.contributors(chunk) for chunk in chunks]

    def emit_waits(self, step: int, waits: Stages) -> None:
        for rank, stage in sorted(waits.items()):
            if self.known.get(rank, -1) < stage:
                self.instructions.append(Wait(step, rank, stage))
                self.known[rank] = stage

    def _is_known(self, waits: Stages) -> bool:
        return all(self.known.get(rank, -1) >= stage for rank, stage in waits.items())

    def emit_publish(self, stage: int) -> None:
        if stage in self.needs.published:
            self.instructions.append(Publish(stage))

    def _finish_leaving(self, cells: Cells, step: int | None = None) -> None:
        """Wait for the messages that leave from these cells, which are about to change.

        For those up to ``step`` alone, if it is given.
        """
        for cell in cells:
            pieces = self.flying.pop(cell, [])
            for piece in pieces:
                if step is None or piece.step <= step:
                    self._finish(piece)
            if later := [piece for piece in pieces if not piece.is_finished]:
                self.flying[cell] = later

    def _finish(self, piece: BufferPiece) -> None:
        if piece.message is not None and not piece.is_finished:
            self.instructions.append(Finish(piece.message))
            piece.finish()

    def _start(self, pieces: Sequence[Outgoing], receives: Sequence[Incoming] = ()) -> None:
        """One instruction for all that starts at once."""
        both: list[BufferPiece] = [*receives, *pieces]
        numbers = [piece.message for piece in both if piece.message is not None]
        if numbers:
            self.instructions.append(Start(tuple(numbers)))
        for piece in pieces:
            piece.start()
            for cell in piece.cells if piece.slot is None else ():
                self.flying[cell].append(piece)

    def _pack(self, piece: Outgoing) -> None:
        """Copy its cells side by side into a slot, if they lie apart."""
        if isinstance(piece.cells, range) or piece.message is None:
            return
        slot = self.scratch.take(piece)
        message = self.pieces.messages[piece.message]
        self.pieces.messages[piece.message] = message._replace(start=slot, scratch=True)
        for run in list_runs(piece.cells):
            place = slot + self.grid.offset(piece.cells, run.start)
            self.instructions.append(Pack(self.grid.edges[run.start], self.grid.length(run), place))

    def _push(self, piece: Outgoing) -> None:
        start, count = self.grid.edges[piece.cells[0]], self.grid.length(piece.cells)
        self.instructions.append(Push(piece.step, piece.peer, start, count))
        piece.start()

    def _post(self, piece: Incoming) -> None:
        """Give a receive its place; ``_start`` makes it."""
        assert piece.message is not None
        if piece.lands_aside:
            slot = self.scratch.take(piece)
            message = self.pieces.messages[piece.message]
            self.pieces.messages[piece.message] = message._replace(start=slot, scratch=True)
        else:
            self._finish_leaving(piece.cells)
        piece.start()

    def emit_round(self, this: Round, following: Round | None) -> None:
        step = this.step
        leaving = [piece for piece in self.pieces.outgoing[step] if not piece.is_started]
        for out in leaving:
            self.emit_waits(step, out.waits)
        arriving = [piece for piece in self.pieces.arriving[step] if not piece.is_started]
        for piece in arriving:
            if not piece.reduce:
                for transfer in piece.transfers:
                    self.emit_waits(step, self.needs.writing.get((step, transfer), {}))
            self._post(piece)
        for out in leaving:
            self._pack(out)
        self._start([out for out in leaving if out.message is not None], arriving)
        for out in leaving:
            if out.message is None:
                self._push(out)
        self._fetch(step)
        self._complete_cells(this, following)
        for out in leaving:
            if out.slot is not None:
                self._finish(out)
                self.scratch.give_back(out)
        if done_stage(step) in self.needs.published:
            # From then on a neighbour may overwrite what a message still sends. A message that has
            # left ahead of its step must not be waited for: it may be received no earlier.
            self._finish_leaving(range(len(self.grid.chunks)), step)
        self.emit_publish(done_stage(step))

    def _fetch(self, step: int) -> None:
        for piece in self.pieces.fetched[step]:
            self.emit_waits(step, self.needs.reading.get((step, piece.transfers[0]), {}))
            slot = self.scratch.take(piece)
            start, count = self.grid.edges[piece.cells[0]], self.grid.length(piece.cells)
            self.instructions.append(Fetch(step, piece.src, start, count, slot))
        self.emit_publish(read_stage(step))

    def _complete_cells(self, this: Round, following: Round | None) -> None:
        """Add or store what has arrived, cell by cell; start what this makes ready."""
        step = this.step
        arrivals: dict[int, list[_Arrival]] = defaultdict(list)
        for piece in (*self.pieces.arriving[step], *self.pieces.fetched[step]):
            for cell in piece.cells:
                arrivals[cell].append(piece)
        for transfer in self.pieces.direct[step]:
            for cell in self.grid.cells(transfer):
                arrivals[cell].append(transfer)
        for entry in arrivals.values():
            entry.sort(key=attrgetter("src"))
        for transfer in this.receives:
            if transfer in self.pieces.direct[step]:
                self.emit_waits(step, self.needs.reading.get((step, transfer), {}))
            # For a copy that landed in its place this is known by now.
            self.emit_waits(step, self.needs.writing.get((step, transfer), {}))
        self.incomplete = set(arrivals)
        for run in self._find_runs(arrivals):
            self._complete_run(step, run, arrivals[run.start])
            self.incomplete.difference_update(run)
            for arrival in arrivals[run.start]:
                if isinstance(arrival, Incoming):
                    self.scratch.release(arrival, len(run))
            self._start_ready(step, run)
            if following is not None:
                self._post_ahead(following)
        for transfer in this.receives:
            self.holds[transfer.lo : transfer.hi] = [True] * (transfer.hi - transfer.lo)

    def _find_runs(self, arrivals: Mapping[int, Sequence[_Arrival]]) -> Iterator[range]:
        """Neighbouring cells whose arrivals are parts of the same, up to a block."""
        run = range(0)
        for cell in sorted(arrivals):
            if run and self._belongs(run, cell, arrivals):
                run = range(run.start, cell + 1)
                continue
            if run:
                yield run
            run = range(cell, cell + 1)
        if run:
            yield run

    def _belongs(self, run: range, cell: int, arrivals: Mapping[int, Sequence[_Arrival]]) -> bool:
        chunk, other = self.grid.chunks[run.start], self.grid.chunks[cell]
        ends = self.part.ends
        return (
            cell == run.stop
            and arrivals[cell] == arrivals[run.start]
            and self.holds[other] == self.holds[chunk]
            and ends.get(other) == ends.get(chunk)
            and self.grid.length(range(run.start, cell + 1)) <= self.cut.cell
        )

    def _complete_run(self, step: int, run: range, arrivals: Sequence[_Arrival]) -> None:
        for arrival in arrivals:
            if isinstance(arrival, Incoming):
                self._finish(arrival)
        aside = [
            each
            for each in arrivals
            if each.reduce or (isinstance(each, Incoming) and each.lands_aside)
        ]
        operands = [self._make_operand(run, arrival) for arrival in aside]
        if not operands:
            return
        start = self.grid.edges[run.start]
        chunk = self.grid.chunks[run.start]
        if self.holds[chunk] and aside[0].reduce:
            operands.append(Operand(Source.OWN, self.part.rank, start))
        operands.sort(key=lambda operand: operand.rank)
        self._finish_leaving(run)
        final = step in self.part.ends.get(chunk, ())
        length = self.grid.length(run)
        self.instructions.append(Reduce(step, start, length, tuple(operands), final))

    def _make_operand(self, run: range, arrival: _Arrival) -> Operand:
        start = self.grid.edges[run.start]
        if isinstance(arrival, Transfer):
            return Operand(Source.PEER, arrival.src, start)
        assert arrival.slot is not None
        offset = self.grid.offset(arrival.cells, run.start)
        return Operand(Source.SCRATCH, arrival.src, arrival.slot + offset)

    def _start_ready(self, step: int, run: range) -> None:
        ready = []
        for cell in run:
            for piece in self.pieces.triggers.get((cell, step), ()):
                piece.complete_cell()
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
            if piece.is_started:
                continue
            if not self._can_post(piece):
                break
            self._post(piece)
            posted.append(piece)
        self._start([], posted)

    def _can_post(self, piece: Incoming) -> bool:
        if piece.lands_aside:
            return bool(self.scratch.free)
        # In place: nothing may still leave from there, or be read from there.
        needs = [self.needs.writing.get((piece.step, each), {}) for each in piece.transfers]
        if not all(map(self._is_known, needs)):
            return False
        return self.incomplete.isdisjoint(piece.cells) and not any(
            not other.is_finished for cell in piece.cells for other in self.flying.get(cell, ())
        )

    def compile(self) -> RankProgram:
        for this, following in itertools.zip_longest(self.part.rounds, self.part.rounds[1:]):
            self.emit_round(this, following)
        self._finish_leaving(range(len(self.grid.chunks)))
        self.emit_waits(len(self.part.schedule.steps), self.needs.leaving)
        partners = {each.rank for each in self.instructions if isinstance(each, (Fetch, Push))}
        partners |= {t.src for transfers in self.pieces.direct.values() for t in transfers}
        return RankProgram(
            self.part.rank,
            self.count,
            tuple(self.instructions),
            tuple(self.pieces.messages),
            self.scratch.size,
            tuple(sorted(partners)),
            self.cut.cell,
        )


_Arrival = Incoming | Transfer
"""What arrives for a cell: a message, what was fetched early, or the transfer that is added from
where it lies in the memory of its source."""


def compile_part(part: RankPart, count: int, cut: BufferCut) -> RankProgram:
    """The instructions of a part for ``count`` elements.

    With all ranks in its group there are no messages; with no other rank, only messages.
    """
    return _Compiler(part, count, cut).compile()
