"""A schedule for the terminal: step by step, which chunk goes where and what each rank holds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import accumulate

from benchmarks.show.drawing.holdings import Holdings, follow, letter, spell
from mpiddp.schedules.schedule import Schedule, Step, Transfer

SHADES = "·░▒▓█"
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


def describe(
    schedule: Schedule,
    *,
    width: int = 100,
    colour: bool = False,
    notes: Sequence[str] = (),
    nodes: Sequence[int] | None = None,
) -> Iterator[str]:
    """Lines of text, at most ``width`` columns where the chunks go into them.

    ``notes`` has a remark for each step, such as its price, ``nodes`` the ranks of each node. What
    a step changed is marked with ``*``, and is bold if ``colour``.
    """
    states = follow(schedule)
    table = _Table(schedule, states, width, colour, nodes or ())
    yield from table.legend()
    yield ""
    yield "before the first step"
    yield from table.rows(states[0], states[0])
    last = len(schedule.steps)
    for number, step in enumerate(schedule.steps, 1):
        note = f" ({notes[number - 1]})" if notes else ""
        yield ""
        together = _bundle(step, packed=schedule.packed)
        yield f"step {number} of {last}: {summarize(step, len(together))}{note}"
        moves = "   ".join(map(_describe_message, together))
        yield from textwrap.wrap(
            moves, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False
        )
        yield from table.rows(states[number - 1], states[number])


def _bundle(step: Step, *, packed: bool) -> list[list[Transfer]]:
    """The transfers of each message: all between two ranks, if they are packed."""
    messages: dict[object, list[Transfer]] = {}
    for place, transfer in enumerate(step):
        key = (transfer.src, transfer.dst, transfer.reduce) if packed else place
        messages.setdefault(key, []).append(transfer)
    return list(messages.values())


def summarize(step: Step, messages: int) -> str:
    added = sum(transfer.reduce for transfer in step)
    parts = [f"{added} added"] * (added > 0) + [f"{len(step) - added} copied"] * (added < len(step))
    pieces = f" of {len(step)} pieces" if messages < len(step) else ""
    return f"{messages} message{'s' if messages > 1 else ''}{pieces}, {' and '.join(parts)}"


def _describe_message(transfers: Sequence[Transfer]) -> str:
    src, dst, _, _, reduce = transfers[0]
    chunks = ",".join(
        f"{lo}" if hi == lo + 1 else f"{lo}-{hi - 1}" for _, _, lo, hi, _ in transfers
    )
    # Not to be broken: a line break belongs between two messages.
    return f"{src}→{dst}\N{NO-BREAK SPACE}{'+' if reduce else '='}{chunks}"


class _Table:
    """Ranks below each other, chunks side by side, in as much detail as there is room for."""

    def __init__(
        self,
        schedule: Schedule,
        states: Sequence[Holdings],
        width: int,
        colour: bool,
        nodes: Sequence[int],
    ) -> None:
        self._nodes = {first: node for node, first in enumerate(accumulate(nodes, initial=0))}
        self._nodes.pop(schedule.ranks, None)
        self._chunks, self._colour = schedule.chunks, colour
        self._schedule = schedule
        self._members = len(schedule.contributors(0))
        self._label = max(len("chunk"), len(f"rank {schedule.ranks - 1}")) + 2
        room = (width - self._label) // schedule.chunks - 1
        longest = max(len(spell(chunk)) for state in states for row in state for chunk in row)
        counts = len(str(self._members))
        self._form = "letters" if longest < room else "counts" if counts < room else "shades"
        content = {"letters": longest, "counts": counts, "shades": 0}[self._form]
        self._cell = max(content + 1, len(str(schedule.chunks - 1))) if content else 0

    def legend(self) -> Iterator[str]:
        members, chunks = self._schedule.members, range(self._schedule.chunks)
        if self._form == "letters":
            ranks = sorted({r for chunk in chunks for r in self._schedule.contributors(chunk)})
            names = [f"{letter(rank)} of rank {rank}" for rank in ranks]
            who = ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"
            yield f"contributions: {who}"
        elif self._form == "counts":
            yield f"each cell: how many of the {self._members} contributions are in it"
        else:
            yield f"each cell: how much of the sum is in it, {SHADES[1:]}; █ is all of it"
        servers = [str(rank) for rank in range(self._schedule.ranks) if rank not in members]
        if servers:
            verb = "serves" if len(servers) == 1 else "serve"
            yield f"rank {', '.join(servers)} {verb}, and contributes nothing"
        if not any(self._schedule.steps):
            return
        transfers = [transfer for step in self._schedule.steps for transfer in step]
        first = next((each for each in transfers if each.reduce), transfers[0])
        what = f"{first.src}→{first.dst} {'+' if first.reduce else '='}{first.lo}"
        new = "bold" if self._form == "shades" and self._colour else "*"
        new = "" if self._form == "shades" and not self._colour else f"; {new} is new"
        verb, copy = ("adds", "; = instead of + is a copy") if first.reduce else ("keeps", "")
        yield (
            f"{what}: rank {first.src} sends chunk {first.lo} to rank {first.dst}, "
            f"which {verb} it{copy}{new}"
        )

    def rows(self, before: Holdings, after: Holdings) -> Iterator[str]:
        if self._form != "shades":
            numbers = "  ".join(f"{chunk:<{self._cell}}" for chunk in range(self._chunks))
            yield f"{'chunk':<{self._label}}{numbers}".rstrip()
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            if rank in self._nodes and len(self._nodes) > 1:
                yield f"node {self._nodes[rank]}"
            cells = [self._draw(was, now) for was, now in zip(old, new, strict=True)]
            gap = "" if self._form == "shades" else "  "
            yield (f"rank {rank}".ljust(self._label) + gap.join(cells)).rstrip()

    def _draw(self, before: frozenset[int], after: frozenset[int]) -> str:
        changed = before != after
        if self._form == "shades":
            text = SHADES[-(-(len(SHADES) - 1) * len(after) // self._members)]
        else:
            text = spell(after) if self._form == "letters" else str(len(after) or "·")
            text = f"{text}{'*' if changed else ''}".ljust(self._cell)
        return f"{BOLD}{text}{PLAIN}" if changed and self._colour else text
