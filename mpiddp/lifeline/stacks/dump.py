"""Where a rank is: its Python stack, which it writes when the companion sends it a signal.

faulthandler writes it from within the signal's handler, so it comes from inside C calls, too, and
while another thread holds the interpreter's lock. The signal goes to the main thread, which writes
its own stack only: to read those of running threads crashes the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mpiddp.process.descendants import list_children

FILE = "mpiddp-stacks"
"""The name of its file, as /proc shows it."""
SIGNAL = int(signal.SIGRTMAX) - 1
"""What makes a rank write its stack; real-time signals mean nothing to anybody else."""
LOOK_SECONDS = 0.005
"""How often the companion looks whether it is done."""
QUIET_SECONDS = 0.5
"""How long nothing must have been added if the end cannot be told; a rank may wait for a core."""
LONGEST_SECONDS = 1.2
"""How long a rank may take; the question itself has two seconds."""
MOST_BYTES = 1 << 20
MOST_FRAMES = 100
"""Of a stack, the innermost ones; faulthandler writes as many."""

STOPPED = ("T", "t")
"""States of a process that is stopped, by a signal or by a debugger."""

USER, TRAINER, LIBRARY = "user", "trainer", "library"
"""Whose code a frame runs."""
PACKAGE = Path(__file__).parents[2]
STANDARD = Path(os.__file__).parent
INSTALLED = ("site-packages", "dist-packages")

FATAL = "Fatal Python error: "
"""How faulthandler begins to report a signal that ends the process."""

_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_OUTERMOST = ("<module>", "_run_module_as_main")


@dataclass(frozen=True)
class Frame:
    """One level of a stack."""

    file: str
    line: int
    """0 if it is not known."""
    function: str
    owner: str
    """``user``, ``trainer`` or ``library``."""

    def pack(self) -> list[Any]:
        """For a message."""
        return [self.file, self.line, self.function, self.owner]


def find_owner(file: str) -> str:
    """Whose code a file is: the script's and its modules', mpiddp's trainer, or a library's."""
    path = Path(file)
    if PACKAGE in path.parents:
        return TRAINER if PACKAGE / "training" in path.parents else LIBRARY
    if file.startswith("<frozen") or any(part in INSTALLED for part in path.parts):
        return LIBRARY
    return LIBRARY if STANDARD in path.parents else USER


def make_frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, find_owner(file))


def read_traceback(trace: TracebackType | None) -> list[Frame]:
    """Where an exception came from, the innermost frame first, and MOST_FRAMES at most."""
    found: list[Frame] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append(make_frame(code.co_filename, trace.tb_lineno or 0, code.co_name))
        trace = trace.tb_next
    return found[-MOST_FRAMES:][::-1]


def read_thread(identifier: int) -> list[Frame]:
    """The stack of a thread of this process, the innermost frame first; empty once it has ended."""
    found: list[Frame] = []
    frame = sys._current_frames().get(identifier)
    while frame is not None and len(found) < MOST_FRAMES:
        found.append(
            make_frame(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)
        )
        frame = frame.f_back
    return found


def parse_dump(text: str) -> list[Frame]:
    """The stack that faulthandler has written, the innermost frame first."""
    found = (_FRAME.match(line) for line in text.splitlines())
    return [
        make_frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3])
        for frame in found
        if frame
    ]


class StackWriter:
    """The rank's part: its main thread writes its stack into a file without a name."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(FILE)
        """For the companion."""
        # What `close` restores: the signal of a companion that is late must not end this process.
        with contextlib.suppress(ValueError):  # In another thread than the main one.
            signal.signal(SIGNAL, signal.SIG_IGN)
        faulthandler.register(SIGNAL, self.descriptor, all_threads=False, chain=False)
        if not faulthandler.is_enabled():
            # A file of its own, which stays open: a signal may come at any time.
            faulthandler.enable(os.dup(self.descriptor))

    def close(self) -> None:
        """From now on the signal has no effect."""
        faulthandler.unregister(SIGNAL)
        os.close(self.descriptor)


def write_for(rank: int) -> None:
    """Have this process, a data worker that is no fork of its rank, write its stack as the rank.

    ``rank``: its process. Nothing happens if that has no file for stacks.
    """
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{rank}/fd").iterdir():
            if os.readlink(path).startswith(f"/memfd:{FILE}"):
                # At the end of what is there: a second opening has a position of its own.
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
                faulthandler.register(SIGNAL, descriptor, all_threads=False, chain=False)
                return


class StackReader:
    """The companion's part: asks for the stack of a rank, and reads what comes."""

    def __init__(self, process: int, descriptor: int) -> None:
        self._process = process
        self._descriptor = descriptor
        self._begin = 0.0
        self._size, self._since = 0, 0.0

    def ask(self) -> None:
        """Send the signal, if the rank handles it: it would end one that does not."""
        self._begin = self._since = time.monotonic()
        self._size = 0
        with contextlib.suppress(OSError):
            # Both processes share one position in the file.
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            if self._handles_signal():
                _signal_main_thread(self._process)

    def read(self) -> list[Frame] | None:
        """The main thread's stack; None while it is being written; empty if it does not come."""
        now = time.monotonic()
        try:
            data = os.pread(self._descriptor, MOST_BYTES, 0)
        except OSError:
            return []
        if len(data) != self._size:
            self._size, self._since = len(data), now
        if not data and self.find_state() in STOPPED:
            return []
        frames = parse_dump(data.decode(errors="replace"))
        is_whole = bool(frames) and data.endswith(b"\n") and frames[-1].function in _OUTERMOST
        is_quiet = bool(data) and now - self._since > QUIET_SECONDS
        return frames if is_whole or is_quiet or now - self._begin > LONGEST_SECONDS else None

    def find_state(self) -> str:
        """The process's state as ps shows it: R, S, D, T, Z; empty once it has gone."""
        return self._read_status().get("State", "")[:1]

    def read_last(self) -> list[Frame]:
        """Where the main thread was when a signal (SIGSEGV, SIGABRT, …) ended the process; empty
        if none did."""
        try:
            text = os.pread(self._descriptor, MOST_BYTES, 0).decode(errors="replace")
        except OSError:
            return []
        _, fatal, stacks = text.rpartition(FATAL)
        threads = [parse_dump(stack) for stack in stacks.split("\n\n")] if fatal else []
        return next((each for each in threads if each and each[-1].function in _OUTERMOST), [])

    def list_children(self) -> list[int]:
        """The processes that this one has started, such as data workers, and those that they
        have: a server may fork workers."""
        found = sorted(list_children(self._process))
        return found + [each for child in found for each in sorted(list_children(child))]

    def open_child(self, process: int) -> StackReader | None:
        """For a child that writes to the same file, as forks of this process do.

        None if it writes none: it is another program, or is stopped.
        """
        child = StackReader(process, self._descriptor)
        return child if child.find_state() not in STOPPED and child._handles_signal() else None

    def _handles_signal(self) -> bool:
        return bool(int(self._read_status().get("SigCgt", "0"), 16) >> (SIGNAL - 1) & 1)

    def _read_status(self) -> dict[str, str]:
        try:
            text = Path(f"/proc/{self._process}/status").read_text()
        except OSError:
            return {}
        rows = (line.partition(":") for line in text.splitlines())
        return {name: value.strip() for name, _, value in rows}


def _signal_main_thread(process: int) -> None:
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if send is not None:
        send(process, process, SIGNAL)
    else:
        # Before glibc 2.30. The kernel prefers the main thread if that can take the signal.
        os.kill(process, SIGNAL)
