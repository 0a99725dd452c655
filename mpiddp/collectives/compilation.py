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
from dataclasses import dataclass, field

from mpiddp.collectives.dependencies import (
    ENTERED,
    Dependencies,
    Stages,
    done_stage,
    find_dependencies,
    read_stage,
)
from mpiddp.collectives.instructions import (
    Fetch,
    Finish,
    Instruction,
    Message,
    Operand,
    Program,
    Publish,
    Push,
    Reduce,
    Source,
    Start,
    Wait,
)
from mpiddp.collectives.schedule import Round, Schedule, Transfer, project
from mpiddp.collectives.sums import find_sums


@dataclass(frozen=True)
class Cut:
    """How a transport wants its work."""

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

    def length(self, cells: range) -> int:
        """Elements of neighbouring cells."""
        return self.edges[cells.stop] - self.edges[cells.start]

    def group(self, cells: range, most: int) -> Iterator[range]:
        """Neighbouring cells together, as long as they have no more than ``most`` elements.

        Both ends of a transfer group alike.
        """
        start = cells.start
        for cell in cells:
            if cell > start and self.edges[cell + 1] - self.edges[start] > most:
                yield range(start, cell)
                start = cell
        if len(cells):
            yield range(start, cells.stop)


@dataclass(eq=False)
class _Outgoing:
    """Something that leaves this rank: a message, or a copy into a neighbour's memory."""

    step: int
    peer: int
    cells: range
    waits: Stages
    message: int | None
    """Its number, if it is one."""
    missing: int = 0
    """Cells that do not have the value yet that is to leave."""
    may_flow: bool = True
    is_started: bool = False
    is_finished: bool = False


@dataclass(eq=False)
class _Incoming:
    """A message that arrives, or an addition that is fetched early."""

    step: int
    transfer: Transfer
    cells: range
    message: int | None = None
    slot: int | None = None
    is_posted: bool = False
    is_finished: bool = False
    missing: int = 0
    """Cells whose scratch space is still needed."""


@dataclass
class _Plan:
    """The rounds of one rank, cut into pieces."""

    outgoing: dict[int, list[_Outgoing]] = field(default_factory=lambda: defaultdict(list))
    arriving: dict[int, list[_Incoming]] = field(default_factory=lambda: defaultdict(list))
    """Messages, by step."""
    fetched: dict[int, list[_Incoming]] = field(default_factory=lambda: defaultdict(list))
    direct: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    """Additions straight from a neighbour's memory, by step."""
    messages: list[Message] = field(default_factory=list)


class _Compiler:
    def __init__(
        self, schedule: Schedule, rank: int, count: int, group: Collection[int], cut: Cut
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self.group = frozenset(group) - {rank}
        self.cut = cut
        self.grid = Grid(schedule.bounds(count), cut.cell)
        self.count = count
        self.rounds = project(schedule)[rank]
        self.needs = (
            find_dependencies(schedule, rank, group)
            if self.group
            else Dependencies({}, {}, frozenset(), {}, frozenset())
        )
        self.ends: dict[int, set[int]] = defaultdict(set)
        """For each chunk the steps in which this rank completes it."""
        for step, dst, chunk in find_sums(schedule).final:
            if dst == rank:
                self.ends[chunk].add(step)
        self.plan = _Plan()
        self.triggers: dict[tuple[int, int], list[_Outgoing]] = defaultdict(list)
        self.instructions: list[Instruction] = []
        # Nobody works in the memory of a rank that has not entered: the executor waits for that.
        self.known: Stages = dict.fromkeys(self.group, ENTERED)
        self.flying: dict[int, list[_Outgoing]] = defaultdict(list)
        """By cell, the messages that were started and not yet finished."""
        self.unsettled: set[int] = set()
        """Cells that are still to be added, or taken in, in the present step."""
        self.holds = [rank in schedule.contributors(chunk) for chunk in range(schedule.chunks)]

    # ---- cutting ------------------------------------------------------------------------

    def cut_rounds(self) -> None:
        written: dict[int, int | None] = {}
        tags: dict[tuple[bool, int], int] = defaultdict(int)
        for number, receives, sends in self.rounds:
            for transfer in sends:
                self._cut_send(number, transfer, written, tags)
            for transfer in receives:
                self._cut_receive(number, transfer, tags)
                is_remote = transfer.src in self.group and not transfer.reduce
                for cell in self.grid.cells(transfer):
                    written[cell] = None if is_remote else number

    def _cut_send(
        self,
        number: int,
        transfer: Transfer,
        written: dict[int, int | None],
        tags: dict[tuple[bool, int], int],
    ) -> None:
        is_local = transfer.dst in self.group
        if is_local and transfer.reduce:
            return
        key = (number, transfer)
        waits = dict(self.needs.reading.get(key, {}))
        if is_local:
            for rank, stage in self.needs.writing.get(key, {}).items():
                waits[rank] = max(stage, waits.get(rank, stage))
        most = self.cut.cell if is_local else self.cut.message
        for cells in self.grid.group(self.grid.cells(transfer), most):
            message = None
            if not is_local:
                message = self._number(True, number, transfer.dst, cells, tags)
            piece = _Outgoing(number, transfer.dst, cells, waits, message)
            self.plan.outgoing[number].append(piece)
            steps = {cell: written.get(cell, -1) for cell in cells}
            piece.may_flow = self.cut.flows and None not in steps.values()
            for cell, step in steps.items():
                if step is not None and step >= 0:
                    piece.missing += 1
                    self.triggers[cell, step].append(piece)
            piece.may_flow = piece.may_flow and piece.missing > 0

    def _cut_receive(
        self, number: int, transfer: Transfer, tags: dict[tuple[bool, int], int]
    ) -> None:
        if transfer.src in self.group:
            if not transfer.reduce:
                return
            if (number, transfer) in self.needs.early:
                self.plan.fetched[number] += [
                    _Incoming(number, transfer, cells, missing=len(cells))
                    for cells in self.grid.group(self.grid.cells(transfer), self.cut.cell)
                ]
            else:
                self.plan.direct[number].append(transfer)
            return
        for cells in self.grid.group(self.grid.cells(transfer), self.cut.message):
            message = self._number(False, number, transfer.src, cells, tags)
            self.plan.arriving[number].append(
                _Incoming(number, transfer, cells, message, missing=len(cells))
            )

    def _number(
        self, sends: bool, step: int, peer: int, cells: range, tags: dict[tuple[bool, int], int]
    ) -> int:
        tag = tags[sends, peer]
        tags[sends, peer] += 1
        start, count = self.grid.edges[cells.start], self.grid.length(cells)
        self.plan.messages.append(Message(sends, step, peer, start, count, False, tag))
        return len(self.plan.messages) - 1

    # ---- scratch space ------------------------------------------------------------------

    def lay_out_scratch(self) -> None:
        """Slots of one length for all that lands beside the buffer, enough for any one step."""
        steps = [
            [piece for piece in (*self.plan.arriving[n], *self.plan.fetched[n]) if _is_added(piece)]
            for n, _, _ in self.rounds
        ]
        self.slot_length = max(
            (self.grid.length(piece.cells) for step in steps for piece in step), default=0
        )
        self.slots = max(map(len, steps), default=0)
        self.free = list(range(self.slots - 1, -1, -1))

    def _take_slot(self, piece: _Incoming) -> int:
        piece.slot = self.free.pop() * self.slot_length
        return piece.slot

    def _release(self, piece: _Incoming, cells: int) -> None:
        piece.missing -= cells
        if piece.missing == 0 and piece.slot is not None:
            self.free.append(piece.slot // self.slot_length)

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

    def _start(self, pieces: Sequence[_Outgoing], receives: Sequence[_Incoming] = ()) -> None:
        """One instruction for all that starts at once."""
        both: list[_Incoming | _Outgoing] = [*receives, *pieces]
        numbers = [piece.message for piece in both if piece.message is not None]
        if numbers:
            self.instructions.append(Start(tuple(numbers)))
        for piece in pieces:
            piece.is_started = True
            for cell in piece.cells:
                self.flying[cell].append(piece)

    def _push(self, piece: _Outgoing) -> None:
        start, count = self.grid.edges[piece.cells.start], self.grid.length(piece.cells)
        self.instructions.append(Push(piece.step, piece.peer, start, count))
        piece.is_started = True

    def _post(self, piece: _Incoming) -> None:
        """Give a receive its place; ``_start`` makes it."""
        assert piece.message is not None
        if _is_added(piece):
            slot = self._take_slot(piece)
            message = self.plan.messages[piece.message]
            self.plan.messages[piece.message] = message._replace(start=slot, scratch=True)
        else:
            self._land(piece.cells)
        piece.is_posted = True

    def emit_round(self, this: Round, following: Round | None) -> None:
        step = this.step
        leaving = [piece for piece in self.plan.outgoing[step] if not piece.is_started]
        for out in leaving:
            self.emit_waits(step, out.waits)
        arriving = [piece for piece in self.plan.arriving[step] if not piece.is_posted]
        for piece in arriving:
            if not _is_added(piece):
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
        for piece in self.plan.fetched[step]:
            self.emit_waits(step, self.needs.reading.get((step, piece.transfer), {}))
            slot = self._take_slot(piece)
            start, count = self.grid.edges[piece.cells.start], self.grid.length(piece.cells)
            self.instructions.append(Fetch(step, piece.transfer.src, start, count, slot))
        self.emit_publish(read_stage(step))

    # ---- additions and arrivals ---------------------------------------------------------

    def _settle(self, this: Round, following: Round | None) -> None:
        """Add and take in cell by cell; let go on what can."""
        step = this.step
        pieces = [*self.plan.arriving[step], *self.plan.fetched[step]]
        arrivals: dict[int, list[_Arrival]] = defaultdict(list)
        for piece in pieces:
            for cell in piece.cells:
                arrivals[cell].append((piece.transfer.src, piece))
        for transfer in self.plan.direct[step]:
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
            if transfer in self.plan.direct[this.step]:
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
            and self.ends[other] == self.ends[chunk]
            and self.grid.length(range(first, cell + 1)) <= self.cut.cell
        )

    def _settle_run(self, step: int, run: range, arrivals: Sequence[_Incoming | Transfer]) -> None:
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
                step in self.ends[chunk],
            )
        )

    def _make_operand(self, run: range, arrival: _Incoming | Transfer) -> Operand:
        start = self.grid.edges[run.start]
        if isinstance(arrival, Transfer):
            return Operand(Source.PEER, arrival.src, start)
        assert arrival.slot is not None
        offset = start - self.grid.edges[arrival.cells.start]
        return Operand(Source.SCRATCH, arrival.transfer.src, arrival.slot + offset)

    def _release_run(self, run: range, arrivals: Sequence[_Incoming | Transfer]) -> None:
        for arrival in arrivals:
            if isinstance(arrival, _Incoming):
                self._release(arrival, len(run))

    # ---- what flows ahead of its step ---------------------------------------------------

    def _let_go(self, step: int, run: range) -> None:
        ready = []
        for cell in run:
            for piece in self.triggers.get((cell, step), ()):
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
        for piece in self.plan.arriving[following.step]:
            if piece.is_posted:
                continue
            if not self._can_post(piece):
                break
            self._post(piece)
            posted.append(piece)
        self._start([], posted)

    def _can_post(self, piece: _Incoming) -> bool:
        if _is_added(piece):
            return len(self.free) > 0
        # In place: nothing may still leave from there, or be read from there.
        key = (piece.step, piece.transfer)
        if not self._is_known(self.needs.writing.get(key, {})):
            return False
        return self.unsettled.isdisjoint(piece.cells) and not any(
            not other.is_finished for cell in piece.cells for other in self.flying.get(cell, ())
        )

    def compile(self) -> Program:
        self.cut_rounds()
        self.lay_out_scratch()
        for this, following in itertools.zip_longest(self.rounds, self.rounds[1:]):
            self.emit_round(this, following)
        self._land(range(len(self.grid.chunks)))
        self.emit_waits(len(self.schedule.steps), self.needs.leaving)
        partners = {
            instruction.rank
            for instruction in self.instructions
            if isinstance(instruction, (Fetch, Push))
        }
        partners |= {t.src for transfers in self.plan.direct.values() for t in transfers}
        return Program(
            self.rank,
            self.count,
            len(self.schedule.steps),
            tuple(self.instructions),
            tuple(self.plan.messages),
            self.slots * self.slot_length,
            tuple(sorted(partners)),
            self.cut.cell,
        )


_Arrival = tuple[int, _Incoming | Transfer]
"""What arrives for a cell: its source, and the message, what was fetched early, or the transfer
that is added straight from the source's memory."""


def _is_added(piece: _Incoming | Transfer) -> bool:
    return piece.reduce if isinstance(piece, Transfer) else piece.transfer.reduce


def compile_program(
    schedule: Schedule, rank: int, count: int, group: Collection[int], cut: Cut
) -> Program:
    """The instructions of ``rank`` for ``count`` elements; ``group`` shares its memory with it.

    With all in ``group`` there are no messages, with nobody else in it there is nothing else.
    """
    return _Compiler(schedule, rank, count, group, cut).compile()
