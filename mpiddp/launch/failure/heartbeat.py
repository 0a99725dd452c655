"""Whether the other ranks are alive while a rank waits for them at the end.

A rank may work for hours while the others wait for it to close the session; to MPI, a rank that
was killed looks the same. So each rank but the first counts up a key in the store, every few
seconds, from a thread of its own: rank 0 sees whose count stands still, the others whether rank 0
still answers.
"""

from __future__ import annotations

import threading
from typing import Any

LONGEST_PERIOD = 5.0
"""Seconds between two beats."""
BEATS = 10
"""How many beats fit at least into the time after which a silent rank is lost."""


class Heartbeat:
    """Beats until it is stopped."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        """``seconds``: how long a rank may be silent. ``store`` is shared by all ranks."""
        self.period = min(seconds / BEATS, LONGEST_PERIOD)
        self._seconds = seconds
        self._store = store
        self._rank = rank
        self._peers = range(1, size) if rank == 0 else range(1)
        self._count = 0
        self._counts: dict[int, int] = {}
        self._silent: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if rank != 0:
            self._thread = threading.Thread(target=self._beat, name="mpiddp-heartbeat", daemon=True)
            self._thread.start()

    def find_silent(self) -> int | None:
        """The lowest rank that was silent for too long, as seen from here; None if there is none.

        Call it once in each `period` of waiting. Periods are counted and not the clock, since
        this process may have been stopped meanwhile together with the others.
        """
        for peer in self._peers:
            count = self._read(peer)
            if self._counts.get(peer) == count:
                self._silent[peer] += self.period
            else:
                self._counts[peer], self._silent[peer] = count, 0.0
        return next((p for p in self._peers if self._silent[p] >= self._seconds), None)

    def stop(self) -> None:
        """Let go of the store."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._store = None

    def _read(self, peer: int) -> int:
        if self._rank != 0:
            return self._count
        try:
            found: int = self._store.add(f"alive/{peer}", 0)
        except Exception:  # Nothing is heard of anybody.
            return self._counts.get(peer, 0)
        return found

    def _beat(self) -> None:
        while not self._stop.wait(self.period):
            try:
                self._store.add(f"alive/{self._rank}", 1)
            except Exception:  # Rank 0 may have been stopped for a while.
                continue
            self._count += 1
