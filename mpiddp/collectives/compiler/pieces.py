"""The parts of a buffer that one instruction or message moves, and the space beside the buffer."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpiddp.collectives.compiler.hazards import RankPart, Stages
from mpiddp.collectives.compiler.instructions import ProgramMessage
from mpiddp.schedules.schedule import Transfer

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


def list_runs(cells: Cells) -> Iterator[range]:
    """Neighbours among the cells."""
    ends = [place for place in range(1, len(cells)) if cells[place] != cells[place - 1] + 1]
    for first, end in itertools.pairwise([0, *ends, len(cells)]):
        yield range(cells[first], cells[end - 1] + 1)


@dataclass(eq=False)
class BufferPiece:
    """What is sent, received or copied at once."""

    step: int
    cells: Cells
    message: int | None = None
    """Its number, if it is one."""
    slot: int | None = None
    """Its place in the scratch space, if it has one."""
    missing: int = 0
    """Outgoing: cells that lack the value that is to leave. Incoming: cells that need the slot."""
    is_started: bool = False
    is_finished: bool = False

    def start(self) -> None:
        self.is_started = True

    def finish(self) -> None:
        self.is_finished = True


@dataclass(eq=False, kw_only=True)
class Outgoing(BufferPiece):
    """A message, or a copy into the memory of another rank of the node."""

    peer: int
    waits: Stages
    may_flow: bool = True

    def complete_cell(self) -> None:
        """One more of its cells has the value that is to leave."""
        self.missing -= 1


@dataclass(eq=False, kw_only=True)
class Incoming(BufferPiece):
    """A message that arrives, or an addition that is fetched early."""

    transfers: tuple[Transfer, ...]
    """From one source; several, if it packs them."""

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

    def __init__(self, part: RankPart, grid: Grid, cut: BufferCut) -> None:
        self.outgoing: dict[int, list[Outgoing]] = defaultdict(list)
        self.arriving: dict[int, list[Incoming]] = defaultdict(list)
        """Messages."""
        self.fetched: dict[int, list[Incoming]] = defaultdict(list)
        """Additions that are read early from a neighbour's memory."""
        self.direct: dict[int, list[Transfer]] = defaultdict(list)
        """Additions straight from a neighbour's memory."""
        self.messages: list[ProgramMessage] = []
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
            piece = Outgoing(number, cells, message, peer=peer, waits=waits)
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
                piece = Incoming(number, part, message, missing=len(part), transfers=transfers)
                self.arriving[number].append(piece)
        elif (number, transfer) in self._needs.early:
            self.fetched[number] += [
                Incoming(number, part, missing=len(part), transfers=transfers)
                for part in self._grid.group(cells, self._cut.cell)
            ]
        elif transfer.reduce:
            self.direct[number].append(transfer)

    def _number(self, sends: bool, step: int, peer: int, cells: Cells) -> int:
        tag = self._tags[sends, peer]
        self._tags[sends, peer] += 1
        # Where cells that lie apart are packed, or land, is known when it has a slot.
        start, length = self._grid.edges[cells[0]], self._grid.length(cells)
        self.messages.append(ProgramMessage(sends, step, peer, start, length, False, tag))
        return len(self.messages) - 1


class Scratch:
    """Space beside the buffer: slots of one length, enough for what lands there in any step."""

    def __init__(self, pieces: Pieces, grid: Grid, steps: Sequence[int]) -> None:
        landing = [(*pieces.arriving[step], *pieces.fetched[step]) for step in steps]
        aside: list[list[BufferPiece]] = [
            [piece for piece in each if piece.lands_aside] for each in landing
        ]
        for each, step in zip(aside, steps, strict=True):
            each += [out for out in pieces.outgoing[step] if not isinstance(out.cells, range)]
        self._length = max((grid.length(p.cells) for each in aside for p in each), default=0)
        slots = max(map(len, aside), default=0)
        self.size = slots * self._length
        """Elements."""
        self.free = list(range(slots - 1, -1, -1))

    def take(self, piece: BufferPiece) -> int:
        """Give it a slot; returns the slot's first element."""
        piece.slot = self.free.pop() * self._length
        return piece.slot

    def release(self, piece: Incoming, cells: int) -> None:
        """``cells`` of its cells have been added; after the last one its slot is free."""
        piece.missing -= cells
        if piece.missing == 0:
            self.give_back(piece)

    def give_back(self, piece: BufferPiece) -> None:
        """Its slot is free, if it has one."""
        if piece.slot is not None:
            self.free.append(piece.slot // self._length)
            piece.slot = None
