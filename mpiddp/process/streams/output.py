"""Where the output of this rank goes: logs, the console, labels.

It is set up before anything else, by descriptors: what libraries in C print is in the log as well,
and so is the last line before a SIGKILL. A rank that prints into its log alone writes there
itself. If it goes to the console as well, or with labels, a small process forwards it
(`mpiddp.process.streams.output_writer`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import io
import json
import os
import pty
import re
import socket
import subprocess
import sys
import termios
import time
import tty
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp import environment
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument
from mpiddp.process import detached
from mpiddp.process.streams import output_writer
from mpiddp.process.streams.output_writer import ANSWER, ASK
from mpiddp.wording import encode

STREAMS = {1: "out", 2: "err"}
"""Descriptor and the end of its log's name."""
ALL, NONE = "all", "none"
DRAIN_SECONDS = 1.0
"""How long a rank that ends waits until what it has printed is written."""
LINE_BUFFERED = 1
"""_IOLBF of stdio.h."""


@dataclass(frozen=True, kw_only=True)
class RankOutput:
    """What the user asked for."""

    log_dir: Annotated[Path | None, Argument("DIR")] = None
    """Directory for what each rank prints: rank-N.out and rank-N.err."""
    console: Annotated[str, Argument("RANKS")] = ALL
    """Ranks that print to the console: all, none, or ranks such as 0,3-5."""
    label: bool = False
    """Put [rank@host] before each line on the console."""
    quiet: bool = False
    """Leave out the block that says what was started: ranks, addresses, devices."""

    def __post_init__(self) -> None:
        parse_ranks(self.console)

    def check_world(self, ranks: int) -> None:
        """Raise ConfigurationError if none of the listed ranks exists."""
        refuse_absent_ranks(self.console, "--console", ranks)

    def shows(self, rank: int) -> bool:
        """Whether ``rank`` prints to the console."""
        return any(rank in part for part in parse_ranks(self.console))


def refuse_absent_ranks(text: str, option: str, ranks: int) -> None:
    """Raise ConfigurationError if a list of ranks names none of the job's.

    A restart may have fewer ranks than the first attempt: then there is no error.
    """
    listed = parse_ranks(text, option)
    if listed and all(part.start >= ranks for part in listed) and find_attempt() == 1:
        raise ConfigurationError(
            f"{option} {text} names none of the job's ranks: expected all, none, or ranks out of "
            f"0-{ranks - 1}"
        )


def parse_ranks(text: str, option: str = "--console") -> list[range]:
    """The ranks of ``all``, ``none``, or ``0,3-5``. Raises ConfigurationError for anything else."""
    if text in (ALL, NONE):
        return [range(sys.maxsize)] if text == ALL else []
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip(), re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigurationError(
                f"{option}: expected all, none, or ranks as 0 or 0,3-5, found {text!r}"
            )
        found.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def open_log(path: Path, hint: str = "--log-dir") -> int:
    """A descriptor that appends to ``path``; directories are made.

    Raises ConfigurationError if it cannot be written; ``hint`` names another place.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unwritable(path, error, hint) from None


def _unwritable(path: Path, error: OSError, hint: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot write to {os.path.abspath(path.parent)} on {socket.gethostname()} "
        f"({error.strerror}); {hint} names another place"
    )


class Redirection:
    """Where this process's standard output and standard error go; made by `redirect`."""

    def __init__(self) -> None:
        """Nothing was changed."""
        self.log: Path | None = None
        """Where standard error is written, directly or by the writer."""
        self.console: int | None = None
        """The console, for reports, if standard error does not lead there."""
        self._control = self._inode = -1
        """The socket to the writer; another inode is what a script has opened in its place."""
        self._process = os.getpid()

    def write_console(self, text: str) -> None:
        """Write ``text`` to the console, if standard error leads elsewhere."""
        if self.console is not None:
            with contextlib.suppress(OSError):
                output_writer.write_all(self.console, encode(text, sys.stderr))

    def drain(self) -> None:
        """Return when everything is written that was printed so far, or when time is up.

        A launcher may end what its ranks have started as soon as they have gone.
        """
        with contextlib.suppress(OSError):
            if os.getpid() == self._process and os.fstat(self._control).st_ino == self._inode:
                with socket.socket(fileno=os.dup(self._control)) as control:
                    control.send(ASK)
                    control.settimeout(DRAIN_SECONDS)
                    control.recv(len(ANSWER))

    def _finish(self) -> None:
        """At the end of the interpreter, which flushes its streams later."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.drain()


def redirect(output: RankOutput, rank: int) -> Redirection:
    """Have this process, which is ``rank``, print where ``output`` says.

    Call it before other threads run. Raises ConfigurationError if a log cannot be written.
    """
    found = Redirection()
    is_shown = output.shows(rank)
    if is_shown and output.log_dir is None and not output.label:
        return found
    logs: dict[int, int] = {}
    if output.log_dir is not None:
        logs = {number: _open_log(output.log_dir, rank, end) for number, end in STREAMS.items()}
        found.log = name_log(output.log_dir, rank, STREAMS[2])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if is_shown:
        label = f"[{rank}@{socket.gethostname()}] " if output.label else None
        found._control, found._inode = _start_writer(logs, label)
        atexit.register(found._finish)
    else:
        found.console = _duplicate(2)
        _write_directly(logs)
    buffer_lines()
    return found


def name_log(folder: Path, rank: int, end: str) -> Path:
    """The log of one stream of a rank: ``rank-N.out`` or ``rank-N.err``."""
    # The script may change its working directory.
    return Path(os.path.abspath(folder)) / f"rank-{rank}.{end}"


def _open_log(folder: Path, rank: int, end: str) -> int:
    """A descriptor that appends; what an earlier attempt has written is closed with a line."""
    path = name_log(folder, rank, end)
    log = open_log(path)
    try:
        size = os.fstat(log).st_size
        if size > 0:
            start = "" if os.pread(log, 1, size - 1) == b"\n" else "\n"
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            line = f"{start}mpiddp: attempt {find_attempt()} on {socket.gethostname()}, {when}\n"
            output_writer.write_all(log, line.encode())
    except OSError as error:
        raise _unwritable(path, error, "--log-dir") from None
    return log


def find_attempt() -> int:
    """The number of the attempt, from 1; 1 if the launcher makes no restarts."""
    return 1 + environment.read_count(environment.TORCHELASTIC_RESTART_COUNT)


def _duplicate(number: int) -> int | None:
    """Another descriptor of the same file, which child programs do not get; None if closed."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(STREAMS) + 1)
    except OSError:
        return None


def _write_directly(logs: dict[int, int]) -> None:
    """Let both streams end in their logs, or nowhere if there are none."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for number in STREAMS:
        os.dup2(logs.get(number, nowhere), number)
    for descriptor in (nowhere, *logs.values()):
        os.close(descriptor)


def _start_writer(logs: dict[int, int], label: str | None) -> tuple[int, int]:
    """Let both streams end in a process that writes them; its socket's descriptor, and inode."""
    own, its = socket.socketpair()
    rows, channels = [], {}
    for number in STREAMS:
        console = _duplicate(number)
        source, channels[number] = _open_channel(console)
        rows.append({"source": source, "log": logs.get(number), "console": console})
    given = [its.detach(), *(d for row in rows for d in row.values() if d is not None)]
    settings = {"label": label, "control": given[0], "streams": rows}
    # It puts lines together again that it has read in parts.
    settings["in_portions"] = environment.PRRTE_LAUNCHED not in os.environ
    program = [sys.executable, "-I", "-S", output_writer.__file__, json.dumps(settings)]
    detached.start(program, given, subprocess.DEVNULL)
    for number, channel in channels.items():
        os.dup2(channel, number)
        os.close(channel)
    for descriptor in given:
        os.close(descriptor)
    return own.fileno(), os.fstat(own.detach()).st_ino


def _open_channel(console: int | None) -> tuple[int, int]:
    """Two ends of a pipe, or of a terminal in the place of one, for progress bars' sake."""
    if console is None or not os.isatty(console):
        return os.pipe()
    source, channel = pty.openpty()
    tty.setraw(channel)
    size = fcntl.ioctl(console, termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(channel, termios.TIOCSWINSZ, size)
    return source, channel


def buffer_lines() -> None:
    """Give out whole lines at once, so that the last one is there whatever ends this process."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    with contextlib.suppress(ValueError, AttributeError):  # No such name in this C library.
        library = ctypes.CDLL(None)
        library.setvbuf(ctypes.c_void_p.in_dll(library, "stdout"), None, LINE_BUFFERED, 0)
