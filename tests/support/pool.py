"""Ranks that stay: starting ranks takes longer than most of the work that a test gives them.

    def double(session, tensor): ...

    def test_something(pool):
        result = pool("openmpi", 3).call(double, torch.ones(4))
        assert result.values == [...]           # what each rank returned

A pool is one job of a launcher. Its ranks (``pool_rank.py``) open a session and wait for calls.
Functions are sent by name, so they must stand at the top of a module. Tests of
start-up, and of ranks that end, start jobs themselves (``launchers.py``).

Every call has a deadline. A pool is ended when a rank raises, ends or misses the deadline; the
next test that asks for this pool gets a new one.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import launchers
from pool_rank import STACKS, Answer, Request, receive, send

PROGRAM = launchers.PROGRAMS / "pool_rank.py"
START_SECONDS = 60.0
CALL_SECONDS = 60.0
END_SECONDS = 5.0
"""How long a job may take to end after one of its ranks has."""
LIMIT = 6
"""Pools that may be open at once: each rank holds 200 MB."""


class PoolError(AssertionError):
    """A rank of a pool raised, ended, or did not answer in time."""


@dataclass(frozen=True)
class CallResult:
    """What a call left, by rank."""

    values: list[Any]
    stdout: list[str]
    stderr: list[str]

    @property
    def output(self) -> str:
        """All that was printed."""
        return "".join([*self.stdout, *self.stderr])

    @property
    def printed(self) -> str:
        """What rank 0 wrote to stdout; AssertionError if another rank did, too."""
        assert not any(self.stdout[1:]), self.stdout
        return self.stdout[0]


def _list_paths() -> str:
    """Where the ranks find the modules of the functions that are sent: where this process does."""
    inherited = launchers.clean_environment()["PYTHONPATH"]
    ours = [path for path in sys.path if Path(path).is_relative_to(launchers.ROOT / "tests")]
    return os.pathsep.join([inherited, *ours])


class Pool:
    """One job whose ranks wait for calls."""

    def __init__(
        self, launcher: launchers.Launcher, ranks: int, variables: Mapping[str, str]
    ) -> None:
        self.name = " ".join([f"{launcher} {ranks}", *(f"{k}={v}" for k, v in variables.items())])
        self._channels: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpiddp-")))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(self._folder / "socket"))
            listener.listen(ranks)
            arguments = [PROGRAM, self._folder / "socket"]
            env = {**variables, "PYTHONPATH": _list_paths()}
            self._job = stack.enter_context(
                launchers.start(launcher, ranks, arguments, timeout=START_SECONDS, env=env)
            )
            self._accept(listener, ranks, stack)
            self._resources = stack.pop_all()

    def _accept(self, listener: socket.socket, ranks: int, stack: contextlib.ExitStack) -> None:
        listener.settimeout(0.1)
        while len(self._channels) < ranks:
            if self._job.process.poll() is not None or time.monotonic() > self._job.deadline:
                raise PoolError(f"pool {self.name} did not start: {self._job.result()}")
            with contextlib.suppress(TimeoutError):
                channel, _ = listener.accept()
                stack.enter_context(channel)
                channel.settimeout(START_SECONDS)
                self._channels[receive(channel)] = channel

    @property
    def is_ended(self) -> bool:
        """Whether it was closed, or a call has failed, which ends it."""
        return not self._channels

    @property
    def is_running(self) -> bool:
        """Whether the job is: it may have ended by itself, between two calls."""
        return self._job.process.poll() is None

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = CALL_SECONDS,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CallResult:
        """Have every rank run ``function(session, *arguments)`` within ``timeout`` seconds.

        Raises PoolError if a rank raises, ends or does not answer. Whatever is raised here ends
        the pool, since answers may still be under way.
        """
        request = Request(function, arguments, cwd or self._folder, env or {})
        try:
            self._send(request, timeout)
            answers = self._collect(timeout)
            if errors := [
                f"rank {rank}: {answer.error}" for rank, answer in answers.items() if answer.error
            ]:
                raise PoolError("\n".join(errors))
        except BaseException:
            self.kill()
            raise
        rows = [answers[rank] for rank in sorted(answers)]
        return CallResult(
            [row.value for row in rows],
            [launchers.drop_gloo_lines(row.stdout) for row in rows],
            [row.stderr for row in rows],
        )

    def _send(self, request: Request, timeout: float) -> None:
        for rank, channel in self._channels.items():
            channel.settimeout(timeout)
            try:
                send(channel, request)
            except OSError as error:
                self._fail([rank], f"takes no call ({error})")

    def _collect(self, timeout: float) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        end = time.monotonic() + timeout
        ranks = {channel: rank for rank, channel in self._channels.items()}
        while waiting := [channel for channel, rank in ranks.items() if rank not in answers]:
            ready, _, _ = select.select(waiting, [], [], max(0.0, end - time.monotonic()))
            is_broken = any(answer.error for answer in answers.values())
            if not ready and is_broken:
                # The other ranks wait for the one that raised; its error says enough.
                break
            if not ready:
                missing = sorted(ranks[channel] for channel in waiting)
                self._fail(missing, f"did not answer within {timeout:g} s")
            for channel in ready:
                try:
                    answers[ranks[channel]] = receive(channel)
                except (EOFError, OSError):
                    if is_broken:
                        return answers
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._job.process.wait(END_SECONDS)
                    self._fail([ranks[channel]], "ended")
            if any(answer.error for answer in answers.values()):
                end = min(end, time.monotonic() + 1)
        return answers

    def _fail(self, who: list[int], how: str) -> NoReturn:
        """Raise PoolError, with the stacks of the ranks that still run."""
        for pid in self._job.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS)
        time.sleep(0.5)
        names = ", ".join(map(str, who))
        raise PoolError(f"pool {self.name}: rank {names} {how}\n{self._job.stderr()}")

    def close(self) -> None:
        """Let the ranks close their session.

        AssertionError if the job had ended already, or does not end with 0.
        """
        has_ended = not self.is_running
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        with self._resources:
            self._job.deadline = time.monotonic() + START_SECONDS
            result = self._job.wait()
            assert not has_ended, f"it ended between two calls: {result}"
            result.expect(0)

    def kill(self) -> None:
        """End the pool at once."""
        self._channels.clear()
        self._resources.close()


class Pools:
    """The pools of a test run, each started when it is first asked for."""

    def __init__(self, limit: int = LIMIT) -> None:
        """``limit``: how many may be open at once; the one unused for longest is closed."""
        self._pools: dict[Any, Pool] = {}
        self._limit = limit

    def __call__(self, launcher: str | launchers.Launcher, ranks: int, **variables: str) -> Pool:
        """The pool of a launcher, which may be given by its name, with these variables.

        AssertionError if that pool has ended since its last call.
        """
        row = launchers.table()[launcher] if isinstance(launcher, str) else launcher
        key = (row.mpirun, row.libmpi, row.flags, tuple(sorted(row.environment.items())), ranks)
        key += tuple(sorted(variables.items()))
        pool = self._pools.pop(key, None)
        if pool is not None and not pool.is_ended and not pool.is_running:
            pool.close()
        if pool is None or pool.is_ended:
            self.close(down_to=self._limit - 1)
            pool = Pool(row, ranks, variables)
        # The last one in the dictionary is the one that was used last.
        self._pools[key] = pool
        return pool

    def close(self, down_to: int = 0) -> None:
        """Close all but ``down_to``. AssertionError, after that, if one did not end with 0."""
        errors = []
        while len(self._pools) > down_to:
            pool = self._pools.pop(next(iter(self._pools)))
            try:
                if not pool.is_ended:
                    pool.close()
            except AssertionError as error:
                errors.append(f"pool {pool.name}: {error}")
        assert not errors, "\n".join(errors)
