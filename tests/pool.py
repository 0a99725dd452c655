"""Ranks that stay: a launch costs more than most of what tests ask of it.

    def double(session, tensor): ...

    def test_something(pool):
        called = pool("openmpi", 3).call(double, torch.ones(4))
        assert called.values == [...]           # of each rank what it returned

A pool is one job of a launcher, whose ranks (``pool_rank.py``) have a session and wait for calls.
Functions travel by their names, so they stand at the top of a module in this directory. What tests
start-up, or ranks that end, starts jobs of its own (``launchers.py``).

Every call has a deadline. A pool in which a rank raised, or did not answer, is ended; the next test
that asks for it gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launchers
from pool_rank import Answer, Request, receive, send

PROGRAM = Path(__file__).resolve().with_name("pool_rank.py")
START_SECONDS = 60.0
CALL_SECONDS = 60.0
LIFE_SECONDS = 3600.0
"""Longer than any test run."""


class PoolError(AssertionError):
    """A rank of a pool raised, ended, or did not answer in time."""


@dataclass(frozen=True)
class Called:
    """What a call left, by rank."""

    values: list[Any]
    stdout: list[str]
    stderr: list[str]

    @property
    def output(self) -> str:
        """All that was printed."""
        return "".join([*self.stdout, *self.stderr])


class Pool:
    """One job whose ranks wait for calls."""

    def __init__(
        self, launcher: launchers.Launcher, ranks: int, variables: Mapping[str, str]
    ) -> None:
        self._resources = contextlib.ExitStack()
        self._channels: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpiddp-")))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(self._folder / "socket"))
            listener.listen(ranks)
            # Ranks may run as another user; the socket is as private as the directory.
            arguments = [PROGRAM, self._folder / "socket"]
            self._job = stack.enter_context(
                launchers.start(launcher, ranks, arguments, timeout=LIFE_SECONDS, env=variables)
            )
            self._accept(listener, ranks, stack)
            self._resources = stack.pop_all()

    def _accept(self, listener: socket.socket, ranks: int, stack: contextlib.ExitStack) -> None:
        listener.settimeout(0.1)
        end = time.monotonic() + START_SECONDS
        while len(self._channels) < ranks:
            if self._job.process.poll() is not None or time.monotonic() > end:
                raise PoolError(f"a pool of {ranks} ranks did not start: {self._job.result()}")
            with contextlib.suppress(TimeoutError):
                channel, _ = listener.accept()
                stack.enter_context(channel)
                channel.settimeout(START_SECONDS)
                self._channels[receive(channel)] = channel

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return bool(self._channels) and self._job.process.poll() is None

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = CALL_SECONDS,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Called:
        """Have every rank run ``function(session, *arguments)``; seconds, from now.

        Raises PoolError, and ends this pool, if a rank raises or does not answer.
        """
        request = Request(function, arguments, cwd or self._folder, env or {})
        for channel in self._channels.values():
            send(channel, request)
        answers = self._collect(time.monotonic() + timeout, timeout)
        if errors := {rank: each.error for rank, each in answers.items() if each.error}:
            self.kill()
            raise PoolError("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        rows = [answers[rank] for rank in sorted(answers)]
        return Called(
            [row.value for row in rows], [row.stdout for row in rows], [row.stderr for row in rows]
        )

    def _collect(self, end: float, timeout: float) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        ranks = {channel: rank for rank, channel in self._channels.items()}
        while len(answers) < len(ranks):
            waiting = [channel for channel, rank in ranks.items() if rank not in answers]
            ready, _, _ = select.select(waiting, [], [], max(0.0, end - time.monotonic()))
            # Peers of a rank that raised wait for it, which says all.
            if not ready and not any(answer.error for answer in answers.values()):
                self._fail(sorted(ranks[channel] for channel in waiting), timeout)
            if not ready:
                break
            for channel in ready:
                try:
                    answers[ranks[channel]] = receive(channel)
                except (EOFError, ConnectionError):
                    self._job.process.wait(START_SECONDS)
                    self._fail([ranks[channel]], timeout)
            if any(answer.error for answer in answers.values()):
                end = min(end, time.monotonic() + 1)
        return answers

    def _fail(self, missing: list[int], timeout: float) -> None:
        names = ", ".join(map(str, missing))
        for pid in self._job.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)
        said = f"rank {names} did not answer within {timeout:g} s, or ended: {self._job.result()}"
        self.kill()
        raise PoolError(said)

    def close(self) -> None:
        """Let the ranks leave their session; AssertionError if they do not do so well."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        with self._resources:
            self._job.deadline = time.monotonic() + START_SECONDS
            self._job.wait().expect(0)

    def kill(self) -> None:
        """End the pool at once."""
        self._channels.clear()
        self._resources.close()


class Pools:
    """The pools of a test run, each started when it is first asked for."""

    def __init__(self, most: int | None = None) -> None:
        """``most``: how many may be open at once."""
        self._pools: dict[Any, Pool] = {}
        self._most = most

    def __call__(self, launcher: str | launchers.Launcher, ranks: int, **variables: str) -> Pool:
        """The pool of a launcher, which may be given by its name, with these variables."""
        row = launchers.table()[launcher] if isinstance(launcher, str) else launcher
        key = (row.mpirun, row.libmpi, row.flags, tuple(sorted(row.environment.items())), ranks)
        key += tuple(sorted(variables.items()))
        pool = self._pools.get(key)
        if pool is None or not pool.is_open:
            if pool is not None:
                self._pools.pop(key).kill()
            if len(self._pools) == self._most:
                self.close()
            pool = self._pools[key] = Pool(row, ranks, variables)
        return pool

    def close(self) -> None:
        """Close all; AssertionError, once all are closed, if a pool did not end well."""
        errors = []
        while self._pools:
            _, pool = self._pools.popitem()
            try:
                if pool.is_open:
                    pool.close()
            except AssertionError as error:
                errors.append(str(error))
        assert not errors, "\n".join(errors)
