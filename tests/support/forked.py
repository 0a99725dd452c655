"""Jobs of `forked_jobs`: ranks that train, save and restore as they are told, and can be killed."""

import itertools
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, wait
from pathlib import Path
from typing import Any

import launchers
from forked_jobs import Rank

PROGRAM = launchers.ROOT / "tests/programs/forked_jobs.py"
DEADLINE = 120.0
"""Seconds for an answer."""


class EndedError(Exception):
    """A rank has ended, and gives no answer."""


class Server:
    """Forks ranks; ``close`` ends it, not its ranks."""

    def __init__(self, folder: Path) -> None:
        """``folder``: for its socket and its standard error."""
        self.socket = folder / "s"
        self._numbers = itertools.count()
        self._folder = folder
        path = os.pathsep.join(map(str, sys.path))
        # Not a file, which ranks on a full disk could not write.
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(self.socket)],
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def wait(self) -> None:
        """Until it can be asked."""
        assert self._process.stdout.readline() == "ready\n"

    def make_store(self) -> Path:
        """A new name for what a job's ranks find each other by."""
        return self._folder / f"store-{next(self._numbers)}"

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()
        self._process.wait(DEADLINE)


class Process:
    def __init__(self, server: Server) -> None:
        self.connection = Client(str(server.socket), "AF_UNIX")
        self.pid = int(self.connection.recv())
        self._pidfd = os.pidfd_open(self.pid)

    def send(self, name: str, *arguments: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send((name, arguments))

    def receive(self) -> tuple[Any, ...]:
        """Raises EndedError once the process has ended."""
        assert self.connection.poll(DEADLINE), "no answer"
        try:
            answer: tuple[Any, ...] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            answer = ("broken", "it was killed")
        if answer[0] == "broken":
            self.kill()
            raise EndedError(answer[1])
        return answer

    def ask(self, name: str, *arguments: Any) -> Any:
        """What a call returns. Raises EndedError, and AssertionError for the call's own error."""
        self.send(name, *arguments)
        kind, *found = self.receive()
        assert kind == "done", f"{name}{arguments}: {found}"
        return found[0]

    def kill(self) -> None:
        """Returns once nothing is left of the process, its locks included."""
        if self.connection.closed:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        assert select.select([self._pidfd], [], [], DEADLINE)[0], "it does not end"
        os.close(self._pidfd)
        self.connection.close()


class Job:
    def __init__(self, server: Server, given: Rank) -> None:
        """``given``: what rank 0 is told."""
        self.given = given
        self._ranks = [Process(server) for _ in range(given.world)]
        store = str(server.make_store())
        for rank, each in enumerate(self._ranks):
            each.send("begin", replace(given, rank=rank, store=store))
        for each in self._ranks:
            assert each.receive()[0] == "done"

    def ask(self, name: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Every rank's answer, by rank. Raises EndedError if one has ended: then none is left."""
        return self.ask_each(name, [arguments] * len(self._ranks))

    def ask_each(self, name: str, arguments: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The same with each rank's own arguments."""
        for each, given in zip(self._ranks, arguments, strict=True):
            each.send(name, *given)
        answers: dict[Process, tuple[Any, ...]] = {}
        while left := {each.connection: each for each in self._ranks if each not in answers}:
            ready = wait(list(left), DEADLINE)
            assert ready, f"no answer to {name}"
            try:
                answers |= {left[each]: left[each].receive() for each in ready}
            except EndedError:
                self.kill()
                raise
        return [answers[each] for each in self._ranks]

    def kill(self) -> None:
        for each in self._ranks:
            each.kill()
