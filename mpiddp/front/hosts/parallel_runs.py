"""Many programs at once, each with what it printed. A signal that ends this process ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mpiddp.errors import ConfigurationError, StoppedError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    code: int
    """Its exit code; that of a shell after a signal."""
    output: str
    errors: str


@dataclass(frozen=True)
class _Run:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def find_end(self) -> Ended | None:
        code = self.process.poll()
        if code is None:
            return None
        texts = [_read(each) for each in (self.output, self.errors)]
        return Ended(code if code >= 0 else 128 - code, *texts)

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def run_each(
    commands: Mapping[str, Sequence[str]], source: Path, *, most: int
) -> Iterator[tuple[str, Ended]]:
    """Run ``commands``, so many at a time; yields the name and the end of each when it ends.

    Each reads ``source`` from standard input. Only its own end counts, not that of a process that
    keeps its output open, as ssh's ControlPersist does. After SIGINT, SIGTERM or SIGHUP all are
    killed, the signal is sent again, and if this process goes on, StoppedError is raised.
    """
    waiting, running = [*commands.items()][::-1], dict[str, _Run]()
    with _collect_signals() as signals:
        try:
            while (waiting or running) and not signals:
                while waiting and len(running) < most:
                    name, words = waiting.pop()
                    running[name] = _start(words, source)
                ended = [(name, end) for name, run in running.items() if (end := run.find_end())]
                for name, end in ended:
                    del running[name]
                    yield name, end
                if not ended:
                    time.sleep(PAUSE_SECONDS)
        finally:
            for run in running.values():
                run.kill()
    for number in signals[-1:]:
        signal.raise_signal(number)
        raise StoppedError(number)


def _start(words: Sequence[str], source: Path) -> _Run:
    """Raises ConfigurationError if there is no such program."""
    # In memory: a full disk is one of the things that hosts are asked about.
    files = [os.fdopen(os.memfd_create(name), "w+b") for name in ("output", "errors")]
    try:
        with source.open("rb") as text:
            process = subprocess.Popen(
                words, stdin=text, stdout=files[0], stderr=files[1], start_new_session=True
            )
    except OSError as error:
        raise ConfigurationError(f"{words[0]} cannot be run: {error.strerror}") from None
    return _Run(process, *files)


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """The signals that come meanwhile, for nobody else."""
    found: list[int] = []
    before = {number: signal.getsignal(number) for number in ENDING}
    taken = [number for number, usual in before.items() if usual is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, lambda number, _: found.append(number))
    try:
        yield found
    finally:
        for number in taken:
            signal.signal(number, before[number])
