"""Memory that a rank shares with the companion: noting a step takes no system call."""

from __future__ import annotations

import mmap
import os
import time


class Progress:
    """One end of the memory: the step, and how the rank's main thread moves."""

    SIZE = 24
    """Bytes: the step, -1 before the first; when the main thread was last seen to move, of
    time.monotonic_ns(), 0 for none; whether it is in a collective, 0 or 1."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: of a file of SIZE bytes, which stays its owner's."""
        self._fields = memoryview(mmap.mmap(descriptor, self.SIZE)).cast("q")
        self._pause = (0, 0.0)
        """A move of the main thread, and the seconds after it that do not count."""

    @classmethod
    def make_file(cls) -> int:
        """The descriptor of a new file, in which there is no step; the caller owns it."""
        descriptor = os.memfd_create("mpiddp-lifeline")
        os.ftruncate(descriptor, cls.SIZE)
        cls(descriptor).note_step(None)
        return descriptor

    def note_step(self, step: int | None) -> None:
        self._fields[0] = -1 if step is None else step

    def note_move(self) -> None:
        """The rank's main thread has moved."""
        self._fields[1] = time.monotonic_ns()

    def note_collective(self, is_inside: bool) -> None:
        """Whether the rank's main thread is in a collective, or in a pass that may call one."""
        self._fields[2] = is_inside

    def is_in_collective(self) -> bool:
        return bool(self._fields[2])

    def read_step(self) -> int | None:
        """None before the first step."""
        step: int = self._fields[0]
        return step if step >= 0 else None

    def find_idle_seconds(self) -> float:
        """How long the rank's main thread has not moved; 0 if that is not watched."""
        moved: int = self._fields[1]
        paused = self._pause[1] if self._pause[0] == moved else 0.0
        return max(0.0, (time.monotonic_ns() - moved) / 1e9 - paused) if moved else 0.0

    def add_pause(self, seconds: float) -> None:
        """For so long the rank could not move."""
        moved: int = self._fields[1]
        self._pause = (moved, seconds + (self._pause[1] if self._pause[0] == moved else 0.0))
