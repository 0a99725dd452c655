"""A companion's answer to where its rank is: the stack, the last collectives, its data workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mpiddp.lifeline.stacks.dump import LOOK_SECONDS, STOPPED, Frame, StackReader
from mpiddp.lifeline.stacks.positions import LOADER, DataWorker
from mpiddp.process.sockets.event_loop import EventLoop

WORKERS_SECONDS = 0.5
"""How long all workers of a rank may take."""
RECORD_SECONDS = 0.5
"""How long the rank may take to read its flight record: another thread may hold the lock."""

Reply = Callable[[Any], object]


class StackAnswers:
    """Questions that come while one is being answered get the same answer."""

    def __init__(
        self, reader: StackReader, loop: EventLoop, ask_for_record: Callable[[], object]
    ) -> None:
        self.reader = reader
        self._frames: list[Frame] = []
        self._children: list[int] = []
        """Those that have not been asked."""
        self._workers: list[DataWorker] = []
        self._workers_end = 0.0
        self._failed: list[Any] | None = None
        self._loop = loop
        self._ask_for_record = ask_for_record
        self._replies: list[Reply] = []
        self._record: list[Any] | None = None
        self._record_end = 0.0

    def ask(self, reply: Reply) -> None:
        """Have ``reply`` called with the answer."""
        self._replies.append(reply)
        if len(self._replies) > 1:
            return
        now = time.monotonic()
        self._record, self._record_end = None, now + RECORD_SECONDS
        self._ask_for_record()
        self.reader.ask()
        self._loop.call_at(now + LOOK_SECONDS, self._look)

    def note_failure(self, frames: list[Any]) -> None:
        """Where the rank was when an error ended its work: the stack shows it no more."""
        self._failed = frames

    def take_record(self, calls: list[Any]) -> None:
        """What the rank has read in its groups' records, packed `RecordedCall`s."""
        self._record = calls

    def _look(self, now: float) -> None:
        frames = self.reader.read()
        is_stopped = self.reader.find_state() in STOPPED
        waits_for_record = self._record is None and now < self._record_end and not is_stopped
        if frames is None or waits_for_record:
            self._loop.call_at(now + LOOK_SECONDS, self._look)
            return
        self._frames, self._workers = frames, []
        waits_for_data = any(frame.file.endswith(LOADER) for frame in frames)
        self._children = self.reader.list_children() if waits_for_data else []
        self._workers_end = now + WORKERS_SECONDS
        self._ask_next(now)

    def _ask_next(self, now: float) -> None:
        """Ask the next worker: one after the other, for they write to one file."""
        while self._children and now < self._workers_end:
            process = self._children.pop(0)
            reader = self.reader.open_child(process)
            if reader is not None:
                reader.ask()
                look = partial(self._look_at_worker, process, reader)
                self._loop.call_at(now + LOOK_SECONDS, look)
                return
        self._finish()

    def _look_at_worker(self, process: int, reader: StackReader, now: float) -> None:
        frames = reader.read()
        if frames is None and now < self._workers_end:
            again = partial(self._look_at_worker, process, reader)
            self._loop.call_at(now + LOOK_SECONDS, again)
            return
        self._workers.append(DataWorker(process, tuple(frames or ())))
        self._ask_next(now)

    def _finish(self) -> None:
        answer = {
            "state": self.reader.find_state(),
            "failed": self._failed is not None,
            "frames": self._failed or [frame.pack() for frame in self._frames],
            "record": self._record,
            "workers": [worker.pack() for worker in self._workers],
        }
        replies, self._replies = self._replies, []
        for reply in replies:
            reply(answer)
