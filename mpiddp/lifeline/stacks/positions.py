"""Where ranks are, as a table: equal positions once, and whom the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.lifeline.stacks.dump import LIBRARY, TRAINER, USER, Frame
from mpiddp.wording import name_ranks

STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "waits in the kernel for a device or a file system",
    "Z": "has ended",
    "": "has ended",
}
"""What a process is in that writes no stack, by the state that ps shows."""

CARRIERS = frozenset(
    {"wrapper", "inner", "_call_impl", "_wrapped_call_impl", "decorate_context", "_fn"}
)
"""Functions that only pass a call on."""
LOADER = "torch/utils/data/dataloader.py"
COLLECTIVES = (
    *("torch/distributed/", "mpiddp/collectives/"),
    *("mpiddp/torch_backend/", "mpiddp/collective_calls.py"),
)
"""Where calls wait for other ranks, and ..."""
ALONE = ("torch/distributed/checkpoint/",)
"""... where they do not, though they lie there: they write files, ..."""
END = "mpiddp/launch/"
"""... and where a rank waits that has come to its end."""
PASSES = ("torch/autograd/", "torch/nn/parallel/", "torch/cuda/")
"""Where a rank may wait for the others, or for nobody."""


@dataclass(frozen=True)
class StackPosition:
    """Where one rank is."""

    rank: int
    hostname: str
    frames: tuple[Frame, ...]
    """The innermost first; empty if it has not told."""
    state: str = ""
    """Of its process, as ps shows it."""
    failed: bool = False
    """Whether an error has ended its work there."""
    finished: bool = False
    """Whether it has come to its end, and waits for the others to come to theirs."""
    record: tuple[str, ...] = ()
    """The last collectives of mpiddp's groups and of NCCL, one line each."""

    @property
    def place(self) -> int | None:
        """The innermost frame of the script, else of the trainer, else of all."""
        owners = [frame.owner for frame in self.frames]
        for owner in (USER, TRAINER):
            if owner in owners:
                return owners.index(owner)
        return 0 if owners else None

    @property
    def line(self) -> str:
        """``all_reduce, train.py:80``: the function that was called, and from where."""
        if self.finished:
            return "has closed its session, and waits for the others to close theirs"
        if self.place is None:
            return f"no answer: {STATES.get(self.state, 'it has written no stack')}"
        place = self.frames[self.place]
        # The outermost frame that the script has called, and that says something.
        calls = self.frames[: self.place][::-1]
        called = next((frame for frame in calls if frame.function not in CARRIERS), place)
        name = "DataLoader" if called.file.endswith(LOADER) else called.function
        return f"{name}, {Path(place.file).name}:{place.line}" + (" (failed)" * self.failed)

    @property
    def waits(self) -> bool | None:
        """Whether it waits for other ranks; None if that cannot be told."""
        if self.finished:
            return True
        below = self.frames[: self.place] if self.frames else ()
        found = find_wait([frame.file for frame in below if frame.owner != USER])
        if found:
            return True
        if self.frames and all(frame.owner == LIBRARY for frame in self.frames):
            return True if any(END in frame.file for frame in self.frames) else None
        return found


def find_wait(files: Sequence[str]) -> bool | None:
    """Whether a call waits for other ranks, by the libraries' files that it runs in.

    None if that cannot be told: in a pass that may have called a collective.
    """
    shared = [file for file in files if not any(part in file for part in ALONE)]
    if any(part in file for file in shared for part in COLLECTIVES):
        return True
    return None if any(part in file for file in files for part in PASSES) else False


def read_answers(
    hostnames: Sequence[str], answers: Mapping[int, Mapping[str, Any]]
) -> list[StackPosition]:
    """The position of every rank; without frames for those that have not answered."""
    return [_read_answer(rank, name, answers.get(rank)) for rank, name in enumerate(hostnames)]


def _read_answer(rank: int, hostname: str, answer: Mapping[str, Any] | None) -> StackPosition:
    if answer is None:
        return StackPosition(rank, hostname, ())
    return StackPosition(
        rank=rank,
        hostname=hostname,
        frames=tuple(Frame(*row) for row in answer["frames"]),
        state=answer["state"],
        failed=answer["failed"],
        finished=answer["finished"],
        record=tuple(answer["record"]),
    )


def describe(positions: Sequence[StackPosition], *, is_full: bool = False) -> str:
    """The table, one row for each position, and whom the others wait for."""
    rows: dict[object, list[StackPosition]] = {}
    for position in positions:
        key = (position.line, position.frames if is_full else None, position.record)
        rows.setdefault(key, []).append(position)
    named = [(name_positions(found), found[0]) for found in rows.values()]
    width = max((len(name) for name, _ in named), default=0)
    lines = []
    for name, first in named:
        lines.append(f"  {name.ljust(width)}  {first.line}")
        lines += [f"      {line}" for line in first.record]
        if is_full:
            lines += [f"      {each.function}, {each.file}:{each.line}" for each in first.frames]
    missed = find_missed(positions)
    blamed = find_blamed(positions)
    if missed:
        lines.append(f"  in collectives the others wait in vain for {name_positions(missed)}")
    elif blamed:
        lines.append(f"  the others wait for {name_positions(blamed)}")
    return "".join(f"{line}\n" for line in lines)


def name_positions(positions: Sequence[StackPosition]) -> str:
    """``rank 7 on node2``, ``ranks 0-6``."""
    where = f" on {positions[0].hostname}" if len(positions) == 1 else ""
    return name_ranks(position.rank for position in positions) + where


def find_blamed(positions: Sequence[StackPosition]) -> list[StackPosition]:
    """The ranks that do not wait while others do; empty if the stacks do not show any."""
    waits = [position.waits for position in positions]
    blamed = [each for each, wait in zip(positions, waits, strict=True) if wait is False]
    # Those that may wait are no reason to blame anybody, nor to be blamed.
    return blamed if True in waits or (None in waits and len(blamed) < len(positions)) else []


def find_missed(positions: Sequence[StackPosition]) -> list[StackPosition]:
    """The ranks that have come to their end, if all others seem to be in collectives."""
    finished = [each for each in positions if each.finished]
    others = [each for each in positions if not each.finished]
    return finished if others and all(each.waits is not False for each in others) else []
