"""Where ranks are, as a table: equal positions once, and whom the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.lifeline.stacks.dump import LIBRARY, TRAINER, USER, Frame
from mpiddp.lifeline.stacks.recorded_call import RecordedCall
from mpiddp.wording import name_ranks

STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "waits in the kernel for a device or a file system",
    "Z": "has ended",
    "": "has ended",
}
"""What a process is in that writes no stack, by the state that ps shows."""

SHOWN = 12
"""Rows of a table that is not full; of a large job each rank may be elsewhere."""
ENDED = " (its end)"
"""Behind the place where a signal has ended a rank."""
UNKNOWN = "?"
"""In place of such a state."""
CARRIERS = frozenset(
    {"wrapper", "inner", "_call_impl", "_wrapped_call_impl", "decorate_context", "_fn"}
)
"""Functions that only pass a call on."""
LOADER = "torch/utils/data/dataloader.py"
WORKER_LOOP = "torch/utils/data/_utils/worker.py"
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
class DataWorker:
    """A process that a rank has forked to load data."""

    process: int
    frames: tuple[Frame, ...]
    """The innermost first; empty if it has not told."""

    def pack(self) -> list[Any]:
        """For a message."""
        return [self.process, [frame.pack() for frame in self.frames]]

    @staticmethod
    def unpack(content: Sequence[Any]) -> DataWorker:
        process, frames = content
        return DataWorker(process, tuple(Frame(*row) for row in frames))

    @property
    def line(self) -> str:
        """Where it loads data; empty if it waits for orders, or is another process.

        What is outside of the loop of orders is the stack of the rank that has forked it.
        """
        files = [frame.file.endswith(WORKER_LOOP) for frame in self.frames]
        inner = self.frames[: files.index(True)] if True in files else ()
        found = next((frame for frame in inner if frame.owner == USER), None)
        return _name_call(inner, inner.index(found)) if found is not None else ""


@dataclass(frozen=True)
class StackPosition:
    """Where one rank is."""

    rank: int
    hostname: str
    frames: tuple[Frame, ...]
    """The innermost first; empty if it has not told."""
    state: str = ""
    """Of its process, as ps shows it."""
    ended: bool = False
    """Whether its process has gone. ``frames`` are where a signal has ended it, if it told that."""
    failed: bool = False
    """Whether an error has ended its work there."""
    finished: bool = False
    """Whether it has come to its end, and waits for the others to come to theirs."""
    record: tuple[RecordedCall, ...] | None = None
    """The last collectives; None if it could not be asked."""
    workers: tuple[DataWorker, ...] = ()
    """The processes that load its data, if it waits for those."""

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
        return self.place_name + " (failed)" * self.failed + ENDED * self.ended

    @property
    def place_name(self) -> str:
        """Like ``line``, without what became of it; empty if it is not known."""
        return "" if self.place is None else _name_call(self.frames, self.place)

    @property
    def name(self) -> str:
        """``rank 7 on node2``."""
        return f"rank {self.rank} on {self.hostname}"

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


def _name_call(frames: Sequence[Frame], at: int) -> str:
    """``all_reduce, train.py:80``: the function that a frame has called, and from where."""
    place = frames[at]
    # The outermost frame that the script has called, and that says something.
    calls = frames[:at][::-1]
    called = next((frame for frame in calls if frame.function not in CARRIERS), place)
    name = "DataLoader" if called.file.endswith(LOADER) else called.function
    return f"{name}, {Path(place.file).name}:{place.line}"


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
        return StackPosition(rank, hostname, (), UNKNOWN)
    if answer["state"] == "":
        frames = tuple(Frame(*row) for row in answer["frames"])
        return StackPosition(rank, hostname, frames, ended=True)
    return StackPosition(
        rank=rank,
        hostname=hostname,
        frames=tuple(Frame(*row) for row in answer["frames"]),
        state=answer["state"],
        failed=answer["failed"],
        finished=answer["finished"],
        record=_read_record(answer["record"]),
        workers=tuple(map(DataWorker.unpack, answer["workers"])),
    )


def _read_record(rows: Sequence[Mapping[str, Any]] | None) -> tuple[RecordedCall, ...] | None:
    return None if rows is None else tuple(RecordedCall(**row) for row in rows)


def tabulate(positions: Sequence[StackPosition], *, is_full: bool = False) -> str:
    """The table, one row for each position; ``is_full``: one for each stack, with that stack, and
    the last collectives."""
    rows: dict[object, list[StackPosition]] = {}
    for position in positions:
        more = tuple(_list_details(position)) if is_full else ()
        rows.setdefault((position.line, *more), []).append(position)
    named = [(name_positions(found), found[0]) for found in rows.values()]
    hidden = named[SHOWN:] if not is_full else []
    named = named[: len(named) - len(hidden)]
    width = max((len(name) for name, _ in named), default=0)
    lines = []
    for name, first in named:
        lines.append(f"  {name.ljust(width)}  {first.line}")
        if is_full:
            lines += [f"      {line}" for line in _list_details(first)]
    if hidden:
        lines.append(f"  and others at {len(hidden)} more places")
    return "".join(f"{line}\n" for line in lines)


def _list_details(position: StackPosition) -> list[str]:
    lines = [_name_frame(frame) for frame in position.frames]
    for worker in position.workers:
        lines.append(f"process {worker.process}, started by it: {worker.line or 'loads nothing'}")
        lines += [f"  {_name_frame(frame)}" for frame in worker.frames]
    return [*lines, *(call.describe() for call in position.record or ())]


def _name_frame(frame: Frame) -> str:
    return f"{frame.function}, {frame.file}:{frame.line}"


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
