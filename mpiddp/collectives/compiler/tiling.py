"""One rank's transfers, cut into the pieces that are added, copied or sent at once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mpiddp.collectives.compiler.hazards import Dependencies, Stages
from mpiddp.collectives.compiler.instructions import Message
from mpiddp.schedules.schedule import Rounds, Transfer


@dataclass(frozen=True)
class Cut:
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

    def length(self, cells: range) -> int:
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
class Outgoing:
    """A message, or a copy into the memory of another rank of the node."""

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
class Incoming:
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

    @property
    def is_added(self) -> bool:
        """Whether it lands beside the buffer, and is added then."""
        return self.transfer.reduce


class Pieces:
    """The rounds of one rank, cut; by step."""

    def __init__(
        self, rounds: Rounds, grid: Grid, cut: Cut, group: Collection[int], needs: Dependencies
    ) -> None:
        """``group``: the other ranks that share their memory with this one."""
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
        self._group = group
        self._needs = needs
        self._written: dict[int, int | None] = {}
        """For each cell the step that changed it last; None if a neighbour did."""
        self._tags: dict[tuple[bool, int], int] = defaultdict(int)
        for number, receives, sends in rounds:
            for transfer in sends:
                self._cut_send(number, transfer)
            for transfer in receives:
                self._cut_receive(number, transfer)
                is_remote = transfer.src in group and not transfer.reduce
                for cell in grid.cells(transfer):
                    self._written[cell] = None if is_remote else number

    def added(self, step: int) -> list[Incoming]:
        """What lands beside the buffer in that step."""
        both = (*self.arriving[step], *self.fetched[step])
        return [piece for piece in both if piece.is_added]

    def _cut_send(self, number: int, transfer: Transfer) -> None:
        is_local = transfer.dst in self._group
        if is_local and transfer.reduce:
            # Its destination fetches it.
            return
        key = (number, transfer)
        waits = dict(self._needs.reading.get(key, {}))
        if is_local:
            for rank, stage in self._needs.writing.get(key, {}).items():
                waits[rank] = max(stage, waits.get(rank, stage))
        most = self._cut.cell if is_local else self._cut.message
        for cells in self._grid.group(self._grid.cells(transfer), most):
            message = None if is_local else self._number(True, number, transfer.dst, cells)
            piece = Outgoing(number, transfer.dst, cells, waits, message)
            self.outgoing[number].append(piece)
            self._watch(piece)

    def _watch(self, piece: Outgoing) -> None:
        """Note which cells it waits for. It may flow if this rank itself makes them, not before."""
        steps = {cell: self._written.get(cell, -1) for cell in piece.cells}
        for cell, step in steps.items():
            if step is not None and step >= 0:
                piece.missing += 1
                self.triggers[cell, step].append(piece)
        piece.may_flow = self._cut.flows and None not in steps.values() and piece.missing > 0

    def _cut_receive(self, number: int, transfer: Transfer) -> None:
        cells = self._grid.cells(transfer)
        if transfer.src not in self._group:
            for part in self._grid.group(cells, self._cut.message):
                message = self._number(False, number, transfer.src, part)
                piece = Incoming(number, transfer, part, message, missing=len(part))
                self.arriving[number].append(piece)
        elif (number, transfer) in self._needs.early:
            self.fetched[number] += [
                Incoming(number, transfer, part, missing=len(part))
                for part in self._grid.group(cells, self._cut.cell)
            ]
        elif transfer.reduce:
            self.direct[number].append(transfer)

    def _number(self, sends: bool, step: int, peer: int, cells: range) -> int:
        tag = self._tags[sends, peer]
        self._tags[sends, peer] += 1
        start, length = self._grid.edges[cells.start], self._grid.length(cells)
        self.messages.append(Message(sends, step, peer, start, length, False, tag))
        return len(self.messages) - 1


class Scratch:
    """Space beside the buffer: slots of one length, enough for what lands there in any step."""

    def __init__(self, pieces: Pieces, grid: Grid, steps: Sequence[int]) -> None:
        added = [pieces.added(step) for step in steps]
        self._length = max((grid.length(p.cells) for step in added for p in step), default=0)
        slots = max(map(len, added), default=0)
        self.size = slots * self._length
        """Elements."""
        self._free = list(range(slots - 1, -1, -1))

    @property
    def is_full(self) -> bool:
        return not self._free

    def take(self, piece: Incoming) -> int:
        """Give it a slot; returns the slot's first element."""
        piece.slot = self._free.pop() * self._length
        return piece.slot

    def release(self, piece: Incoming, cells: int) -> None:
        """``cells`` of its cells have been added; after the last one its slot is free."""
        piece.missing -= cells
        if piece.missing == 0 and piece.slot is not None:
            self._free.append(piece.slot // self._length)
