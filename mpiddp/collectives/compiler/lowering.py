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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from mpiddp.collectives.compiler.hazards import ENTERED, Part, Stages, done_stage, read_stage
from mpiddp.collectives.compiler.instructions import (
    Fetch,
    Finish,
    Instruction,
    Message,
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
from mpiddp.schedules.schedule import Round, Transfer

# ---- pieces -------------------------------------------------------------------------------

Cells = range | tuple[int, ...]
"""Neighbouring cells of a buffer; or several that lie apart, and side by side in a message."""


@dataclass(frozen=True)
class BufferCut:
    """How a transport cuts a buffer."""

    cell: int
    """The most elements of a chunk that are added, copied or sent at once."""
    message: int
    """The most elements of one message, which may hold several short chunks."""
    flows: bool
    """Whether messages may start before their step, and receives be posted before theirs. Without,
    all messages of a step start at once."""


class Grid:
    """The cells of a buffer: every chunk in parts of equal length, up to one element."""

    def __init__(self, bounds: Sequence[int], cell: int) -> None:
        self.edges = [0]
        """Where each cell begins, and where the last one ends."""
        self.first: list[int] = []
        """The first cell of each chunk, and the number of cells."""
        self.chunks: list[int] = []
        """The chunk of each cell."""
        for chunk, (lo, hi) in enumerate(itertools.pairwise(bounds)):
            self.first.append(len(self.edges) - 1)
            parts = -(-(hi - lo) // cell)
            self.edges += [lo + (hi - lo) * part // parts for part in range(1, parts + 1)]
            self.chunks += [chunk] * parts
        self.first.append(len(self.edges) - 1)

    def cells(self, transfer: Transfer) -> range:
        """The cells that a transfer moves; none if its chunks are empty."""
        return range(self.first[transfer.lo], self.first[transfer.hi])

    def length(self, cells: Cells) -> int:
        if isinstance(cells, range):
            return self.edges[cells.stop] - self.edges[cells.start]
        return sum(self.edges[cell + 1] - self.edges[cell] for cell in cells)

    def offset(self, cells: Cells, cell: int) -> int:
        """Where a cell begins in a message of these cells."""
        if isinstance(cells, range):
            return self.edges[cell] - self.edges[cells.start]
        return self.length(cells[: cells.index(cell)])

    def group(self, cells: Sequence[int], most: int) -> Iterator[Cells]:
        """Cells together, as long as they have no more than ``most`` elements.

        Both ends of a transfer group alike.
        """
        first = length = 0
        for place, cell in enumerate(cells):
            more = self.edges[cell + 1] - self.edges[cell]
            if length and length + more > most:
                yield _join(cells[first:place])
                first, length = place, 0
            length += more
        if length:
            yield _join(cells[first:])


def _join(cells: Sequence[int]) -> Cells:
    """As a range if they are neighbours."""
    whole = range(cells[0], cells[-1] + 1)
    return whole if len(whole) == len(cells) else tuple(cells)


def _list_runs(cells: Cells) -> Iterator[range]:
    """Neighbours among the cells."""
    ends = [place for place in range(1, len(cells)) if cells[place] != cells[place - 1] + 1]
    for first, end in itertools.pairwise([0, *ends, len(cells)]):
        yield range(cells[first], cells[end - 1] + 1)


@dataclass(eq=False)
class Outgoing:
    """A message, or a copy into the memory of another rank of the node."""

    step: int
    peer: int
    cells: Cells
    waits: Stages
    message: int | None
    """Its number, if it is one."""
    slot: int | None = None
    """Where its cells were packed, if they lie apart."""
    missing: int = 0
    """Cells that do not have the value yet that is to leave."""
    may_flow: bool = True
    is_started: bool = False
    is_finished: bool = False


@dataclass(eq=False)
class Incoming:
    """A message that arrives, or an addition that is fetched early."""

    step: int
    transfers: tuple[Transfer, ...]
    """From one source; several, if it packs them."""
    cells: Cells
    message: int | None = None
    slot: int | None = None
    is_posted: bool = False
    is_finished: bool = False
    missing: int = 0
    """Cells whose scratch space is still needed."""

    @property
    def src(self) -> int:
        return self.transfers[0].src

    @property
    def reduce(self) -> bool:
        """Whether it is added."""
        return self.transfers[0].reduce

    @property
    def lands_aside(self) -> bool:
        """Whether it lands beside the buffer, and is added or taken from there."""
        return self.reduce or not isinstance(self.cells, range)


class Pieces:
    """The rounds of one rank, cut; by step."""

    def __init__(self, part: Part, grid: Grid, cut: BufferCut) -> None:
        self.outgoing: dict[int, list[Outgoing]] = defaultdict(list)
        self.arriving: dict[int, list[Incoming]] = defaultdict(list)
        """Messages."""
        self.fetched: dict[int, list[Incoming]] = defaultdict(list)
        """Additions that are read early from a neighbour's memory."""
        self.direct: dict[int, list[Transfer]] = defaultdict(list)
        """Additions straight from a neighbour's memory."""
        self.messages: list[Message] = []
        self.triggers: dict[tuple[int, int], list[Outgoing]] = defaultdict(list)
        """By cell and step: what may leave once the cell has the value of that step."""
        self._grid = grid
        self._cut = cut
        self._packed = part.schedule.packed
        self._group = part.group
        self._needs = part.needs
        self._written: dict[int, int | None] = {}
        """For each cell the step that changed it last; None if a neighbour did."""
        self._tags: dict[tuple[bool, int], int] = defaultdict(int)
        for number, receives, sends in part.rounds:
            for together in self._bundle(sends):
                self._cut_send(number, together)
            for together in self._bundle(receives):
                self._cut_receive(number, together)
            for transfer in receives:
                is_remote = transfer.src in part.group and not transfer.reduce
                for cell in grid.cells(transfer):
                    self._written[cell] = None if is_remote else number

    def _bundle(self, transfers: Sequence[Transfer]) -> Iterable[tuple[Transfer, ...]]:
        """Those that share their messages: all between two ranks of different nodes, if packed."""
        bundles: dict[object, list[Transfer]] = defaultdict(list)
        for place, transfer in enumerate(transfers):
            src, dst, _, _, reduce = transfer
            is_local = src in self._group or dst in self._group
            key = (src, dst, reduce) if self._packed and not is_local else place
            bundles[key].append(transfer)
        return (tuple(sorted(bundle)) for bundle in bundles.values())

    def _list_cells(self, transfers: Sequence[Transfer]) -> Sequence[int]:
        """The cells that they move, in order."""
        if len(transfers) == 1:
            return self._grid.cells(transfers[0])
        return [cell for transfer in transfers for cell in self._grid.cells(transfer)]

    def _cut_send(self, number: int, transfers: tuple[Transfer, ...]) -> None:
        peer = transfers[0].dst
        is_local = peer in self._group
        if is_local and transfers[0].reduce:
            # Its destination fetches it.
            return
        waits: Stages = {}
        for key in ((number, transfer) for transfer in transfers):
            for table in (self._needs.reading, self._needs.writing)[: 1 + is_local]:
                for rank, stage in table.get(key, {}).items():
                    waits[rank] = max(stage, waits.get(rank, stage))
        most = self._cut.cell if is_local else self._cut.message
        for cells in self._grid.group(self._list_cells(transfers), most):
            message = None if is_local else self._number(True, number, peer, cells)
            piece = Outgoing(number, peer, cells, waits, message)
            self.outgoing[number].append(piece)
            if isinstance(cells, range):
                self._watch(piece)
            else:
                piece.may_flow = False

    def _watch(self, piece: Outgoing) -> None:
        """Note which cells it waits for. It may flow if this rank itself makes them, not before."""
        steps = {cell: self._written.get(cell, -1) for cell in piece.cells}
        for cell, step in steps.items():
            if step is not None and step >= 0:
                piece.missing += 1
                self.triggers[cell, step].append(piece)
        piece.may_flow = self._cut.flows and None not in steps.values() and piece.missing > 0

    def _cut_receive(self, number: int, transfers: tuple[Transfer, ...]) -> None:
        transfer, cells = transfers[0], self._list_cells(transfers)
        if transfer.src not in self._group:
            for part in self._grid.group(cells, self._cut.message):
                message = self._number(False, number, transfer.src, part)
                piece = Incoming(number, transfers, part, message, missing=len(part))
                self.arriving[number].append(piece)
        elif (number, transfer) in self._needs.early:
            self.fetched[number] += [
                Incoming(number, transfers, part, missing=len(part))
                for part in self._grid.group(cells, self._cut.cell)
            ]
        elif transfer.reduce:
            self.direct[number].append(transfer)

    def _number(self, sends: bool, step: int, peer: int, cells: Cells) -> int:
        tag = self._tags[sends, peer]
        self._tags[sends, peer] += 1
        # Where cells that lie apart are packed, or land, is known when it has a slot.
        start, length = self._grid.edges[cells[0]], self._grid.length(cells)
        self.messages.append(Message(sends, step, peer, start, length, False, tag))
        return len(self.messages) - 1


class Scratch:
    """Space beside the buffer: slots of one length, enough for what lands there in any step."""

    def __init__(self, pieces: Pieces, grid: Grid, steps: Sequence[int]) -> None:
        landing = [(*pieces.arriving[step], *pieces.fetched[step]) for step in steps]
        aside: list[list[Incoming | Outgoing]] = [
            [piece for piece in each if piece.lands_aside] for each in landing
        ]
        for each, step in zip(aside, steps, strict=True):
            each += [out for out in pieces.outgoing[step] if not isinstance(out.cells, range)]
        self._length = max((grid.length(p.cells) for each in aside for p in each), default=0)
        slots = max(map(len, aside), default=0)
        self.size = slots * self._length
        """Elements."""
        self.free = list(range(slots - 1, -1, -1))

    def take(self, piece: Incoming | Outgoing) -> int:
        """Give it a slot; returns the slot's first element."""
        piece.slot = self.free.pop() * self._length
        return piece.slot

    def release(self, piece: Incoming, cells: int) -> None:
        """``cells`` of its cells have been added; after the last one its slot is free."""
        piece.missing -= cells
        if piece.missing == 0:
            self.give_back(piece)

    def give_back(self, piece: Incoming | Outgoing) -> None:
        """Its slot is free, if it has one."""
        if piece.slot is not None:
            self.free.append(piece.slot // self._length)
            piece.slot = None


# ---- instructions -------------------------------------------------------------------------


class _Compiler:
    def __init__(self, part: Part, count: int, cut: BufferCut) -> None:
        self.part = part
        self.needs = part.needs
        self.cut = cut
        self.count = count
        self.grid = Grid(part.schedule.bounds(count), cut.cell)
        self.pieces = Pieces(part, self.grid, cut)
        self.scratch = Scratch(self.pieces, self.grid, [each.step for each in part.rounds])
        self.instructions: list[Instruction] = []
        # Nobody works in the memory of a rank that has not entered: the executor waits for that.
        self.known: Stages = dict.fromkeys(part.group, ENTERED)
        self.flying: dict[int, list[Outgoing]] = defaultdict(list)
        """By cell, the messages that were started and not yet finished."""
        self.unsettled: set[int] = set()
        """Cells that are still to be added, or taken in, in the present step."""
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

    def _land(self, cells: range, step: int | None = None) -> None:
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

    def _finish(self, piece: Incoming | Outgoing) -> None:
        if piece.message is not None and not piece.is_finished:
            self.instructions.append(Finish(piece.message))
            piece.is_finished = True

    def _start(self, pieces: Sequence[Outgoing], receives: Sequence[Incoming] = ()) -> None:
        """One instruction for all that starts at once."""
        both: list[Incoming | Outgoing] = [*receives, *pieces]
        numbers = [piece.message for piece in both if piece.message is not None]
        if numbers:
            self.instructions.append(Start(tuple(numbers)))
        for piece in pieces:
            piece.is_started = True
            for cell in piece.cells if piece.slot is None else ():
                self.flying[cell].append(piece)

    def _pack(self, piece: Outgoing) -> None:
        """Its cells side by side into a slot, if they lie apart."""
        if isinstance(piece.cells, range) or piece.message is None:
            return
        slot = self.scratch.take(piece)
        message = self.pieces.messages[piece.message]
        self.pieces.messages[piece.message] = message._replace(start=slot, scratch=True)
        for run in _list_runs(piece.cells):
            place = slot + self.grid.offset(piece.cells, run.start)
            self.instructions.append(Pack(self.grid.edges[run.start], self.grid.length(run), place))

    def _push(self, piece: Outgoing) -> None:
        start, count = self.grid.edges[piece.cells[0]], self.grid.length(piece.cells)
        self.instructions.append(Push(piece.step, piece.peer, start, count))
        piece.is_started = True

    def _post(self, piece: Incoming) -> None:
        """Give a receive its place; ``_start`` makes it."""
        assert piece.message is not None
        if piece.lands_aside:
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
        self._settle(this, following)
        for out in leaving:
            if out.slot is not None:
                self._finish(out)
                self.scratch.give_back(out)
        if done_stage(step) in self.needs.published:
            # A neighbour may write, from then on, where a message still leaves from. One that has
            # left ahead of its step must not be waited for: it may be received no earlier.
            self._land(range(len(self.grid.chunks)), step)
        self.emit_publish(done_stage(step))

    def _fetch(self, step: int) -> None:
        for piece in self.pieces.fetched[step]:
            self.emit_waits(step, self.needs.reading.get((step, piece.transfers[0]), {}))
            slot = self.scratch.take(piece)
            start, count = self.grid.edges[piece.cells[0]], self.grid.length(piece.cells)
            self.instructions.append(Fetch(step, piece.src, start, count, slot))
        self.emit_publish(read_stage(step))

    def _settle(self, this: Round, following: Round | None) -> None:
        """Add and take in cell by cell; let go on what can."""
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
        self.unsettled = set(arrivals)
        for run in self._find_runs(arrivals):
            self._settle_run(step, run, arrivals[run.start])
            self.unsettled.difference_update(run)
            for arrival in arrivals[run.start]:
                if isinstance(arrival, Incoming):
                    self.scratch.release(arrival, len(run))
            self._let_go(step, run)
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

    def _settle_run(self, step: int, run: range, arrivals: Sequence[_Arrival]) -> None:
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
        self._land(run)
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
        if piece.lands_aside:
            return bool(self.scratch.free)
        # In place: nothing may still leave from there, or be read from there.
        needs = [self.needs.writing.get((piece.step, each), {}) for each in piece.transfers]
        if not all(map(self._is_known, needs)):
            return False
        return self.unsettled.isdisjoint(piece.cells) and not any(
            not other.is_finished for cell in piece.cells for other in self.flying.get(cell, ())
        )

    def compile(self) -> RankProgram:
        for this, following in itertools.zip_longest(self.part.rounds, self.part.rounds[1:]):
            self.emit_round(this, following)
        self._land(range(len(self.grid.chunks)))
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


def compile_part(part: Part, count: int, cut: BufferCut) -> RankProgram:
    """The instructions of a part for ``count`` elements.

    With all ranks in its group there are no messages, with nobody in it there is nothing else.
    """
    return _Compiler(part, count, cut).compile()
