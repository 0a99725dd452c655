"""The process beside a rank that forwards what the rank prints to its log and to the console.

A separate program, which needs the standard library alone: it outlives a rank that is killed,
and takes what that one has left in its pipes. Started as

    python -I -S output_writer.py SETTINGS

by ``mpiddp.process.streams.output``, which says in SETTINGS which descriptors are what.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import stat
import struct
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK = 1 << 16
LONGEST_LINE = 1 << 20
"""Bytes of a line that is not written before its end."""
PATIENCE_SECONDS = 1.0
"""How long a line without an end is kept back."""
PORTION = 4000
"""Bytes that are written to a launcher at once: it may read up to 4096 (Open MPI), and what it
reads in two parts it mixes with the lines of other ranks."""
UNREAD_SECONDS, LONGEST_UNREAD_SECONDS = 0.0005, 0.02
"""How long to wait before looking again whether the launcher has read the last portion."""
TERMINAL_PORTION = 1700
TERMINAL_SECONDS = 0.01
"""The same for a terminal, which does not tell. Open MPI 4 reads one (standard output), and gets
what Linux puts into one of its buffers of 1792 bytes (TTY_BUFFER_PAGE) in one piece."""

ASK, ANSWER = b"?", b"!"
"""What a rank sends to have everything written that it has printed, and what it gets back."""

_END = re.compile(rb"\r\n|\n|\r")


@dataclass
class Lines:
    """Puts a label before each line, and gives out whole lines only."""

    label: bytes
    _begun: bytes = b""
    """The last line, which has no end yet."""
    _returned: bool = False
    """Whether the last end was that of a line that is written over, as a progress bar's."""
    since: float | None = None
    """Since when a line without an end has been waiting, by time.monotonic()."""

    def add(self, data: bytes, now: float) -> bytes:
        """What is complete by now."""
        found = []
        if self._returned and data.startswith(b"\n") and not self._begun:
            found.append(b"\n")
            data = data[1:]
            self._returned = False
        data = self._begun + data
        begin = 0
        for end in _END.finditer(data):
            found.append(self._format(data[begin : end.start()], end.group()))
            begin = end.end()
        self._begun = data[begin:]
        if begin or self.since is None:
            self.since = now if self._begun else None
        if len(self._begun) > LONGEST_LINE:
            found.append(self.flush())
        return b"".join(found)

    def flush(self) -> bytes:
        """What waits for its end. It becomes a line, unless it is one that is written over."""
        begun, self._begun, self.since = self._begun, b"", None
        if not begun:
            return b""
        return self.label + begun + (b"" if self._returned else b"\n")

    def is_late(self, now: float) -> bool:
        """Whether a line has waited for its end long enough."""
        return self.since is not None and now - self.since >= PATIENCE_SECONDS

    def _format(self, line: bytes, end: bytes) -> bytes:
        self._returned = end == b"\r"
        # What begins with a return, as tqdm's bars do, would have its label written over.
        return end if self._returned and not line else self.label + line + end


@dataclass
class Console:
    """Where this process may write what others see; given up when it has no reader any more."""

    descriptor: int
    is_pipe: bool = False
    is_terminal: bool = False
    is_gone: bool = False
    _last: float = field(default=float("-inf"))

    @classmethod
    def find(cls, descriptor: int) -> Console:
        """One whose reader may mix up the lines of ranks, if it reads them in parts."""
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        return cls(descriptor, is_pipe, os.isatty(descriptor))

    def write(self, data: bytes) -> None:
        """Write bytes as they are."""
        if self.is_gone or not data:
            return
        try:
            write_all(self.descriptor, data)
        except OSError:
            self.is_gone = True

    def write_lines(self, data: bytes) -> None:
        """Write whole lines, in portions that a launcher reads at once."""
        while data and not self.is_gone:
            portion = TERMINAL_PORTION if self.is_terminal else PORTION
            cut = data.rfind(b"\n", 0, portion) + 1 if len(data) > portion else len(data)
            cut = cut or (data.find(b"\n") + 1 or len(data))
            self._await_reader()
            self.write(data[:cut])
            self._last = time.monotonic()
            data = data[cut:]

    def _await_reader(self) -> None:
        if self.is_terminal:
            time.sleep(max(0.0, self._last + TERMINAL_SECONDS - time.monotonic()))
        # A pipe that is broken holds nothing unread for anybody.
        pause = UNREAD_SECONDS
        while self.is_pipe and self._count_unread() and not self._is_broken():
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_UNREAD_SECONDS)

    def _count_unread(self) -> int:
        try:
            found = fcntl.ioctl(self.descriptor, termios.FIONREAD, b"\0" * 4)
        except OSError:
            return 0
        return int(struct.unpack("i", found)[0])

    def _is_broken(self) -> bool:
        poller = select.poll()
        poller.register(self.descriptor, select.POLLOUT)
        return any(event & select.POLLERR for _, event in poller.poll(0))


@dataclass
class Stream:
    """Standard output or standard error of the rank."""

    source: int
    log: int | None
    console: Console | None
    lines: Lines | None

    def forward(self) -> bool:
        """Take what is there, once there is something; False at the end."""
        try:
            data = os.read(self.source, BLOCK)
        except OSError:  # The end of a terminal.
            data = b""
        if not data:
            self.flush()
            return False
        self._write_log(data)
        if self.console is None:
            return True
        if self.lines is None:
            self.console.write(data)
        else:
            self.console.write_lines(self.lines.add(data, time.monotonic()))
        return True

    def flush(self) -> None:
        """Let a line go that has no end."""
        if self.lines is not None and self.console is not None:
            self.console.write_lines(self.lines.flush())

    def _write_log(self, data: bytes) -> None:
        if self.log is None:
            return
        try:
            write_all(self.log, data)
        except OSError as error:
            self.log = None
            if self.console is not None:
                label = self.lines.label if self.lines is not None else b""
                text = f"mpiddp: the log of this rank ends here: {error.strerror}\n"
                self.console.write(label + text.encode())


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it, also if the descriptor does not wait by itself."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


class Forwarder:
    """Forwards the streams of one rank until it, and all that it started, have closed them."""

    def __init__(self, streams: Sequence[Stream], control: int) -> None:
        self._streams = {stream.source: stream for stream in streams}
        self._control = control
        self._poller = select.poll()
        for descriptor in (control, *self._streams):
            self._poller.register(descriptor, select.POLLIN)

    def run(self) -> None:
        while self._streams:
            ready = [descriptor for descriptor, _ in self._poller.poll(self._find_pause())]
            for descriptor in ready:
                if descriptor in self._streams:
                    self._forward(descriptor)
            if self._control in ready:
                self._answer()
            now = time.monotonic()
            for stream in self._streams.values():
                if stream.lines is not None and stream.lines.is_late(now):
                    stream.flush()

    def _forward(self, source: int) -> None:
        if not self._streams[source].forward():
            self._poller.unregister(source)
            del self._streams[source]

    def _answer(self) -> None:
        """Say that all is written that the rank has printed so far, if it asks."""
        try:
            asked = os.read(self._control, BLOCK)
        except OSError:
            asked = b""
        if not asked:  # The rank has gone; what it started may still print.
            self._poller.unregister(self._control)
            return
        while waiting := [each for each in self._streams if select.select([each], [], [], 0)[0]]:
            for source in waiting:
                self._forward(source)
        for stream in self._streams.values():
            stream.flush()
        with contextlib.suppress(OSError):
            os.write(self._control, ANSWER)

    def _find_pause(self) -> float | None:
        """Milliseconds until a line without an end has waited long enough."""
        lines = [stream.lines for stream in self._streams.values() if stream.lines is not None]
        since = [each.since for each in lines if each.since is not None]
        if not since:
            return None
        return 1e3 * max(0.0, min(since) + PATIENCE_SECONDS - time.monotonic()) + 1


def main() -> None:
    settings = json.loads(sys.argv[1])
    label = settings["label"]
    control: int = settings["control"]
    find = Console.find if settings["in_portions"] else Console
    streams = [
        Stream(
            source=row["source"],
            log=row["log"],
            console=find(row["console"]) if row["console"] is not None else None,
            lines=Lines(label.encode()) if label is not None else None,
        )
        for row in settings["streams"]
    ]
    Forwarder(streams, control).run()


if __name__ == "__main__":
    main()
