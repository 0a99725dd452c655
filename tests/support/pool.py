"""Ranks that stay: starting ranks takes longer than most of the work that a test gives them.

    def double(session, tensor): ...

    def test_something(pool):
        result = pool("openmpi", 3).call(double, torch.ones(4))
        assert result.values == [...]           # what each rank returned

A pool is one job of a launcher, made by `mpiddp.ranks`: ``pool_rank.py`` is what its ranks do in a
call. Functions are sent by name, so they must stand at the top of a module. Tests of
start-up, and of ranks that end, start jobs themselves (``launchers.py``).

Every call has a deadline. A pool is ended when a rank raises, ends or misses the deadline; the
next test that asks for this pool gets a new one.
"""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import launchers
import mpiddp
from mpiddp.errors import MpiddpError
from pool_rank import answer

CORES = 2
"""All ranks share this many cores, so that on any machine some of them have to wait."""
CALL_SECONDS = 150.0
LIMIT = 6
"""Pools that may be open at once: each rank holds 200 MB."""


@dataclass(frozen=True)
class CallResult:
    """What a call left, by rank."""

    values: list[Any]
    stdout: list[str]
    stderr: list[str]

    @property
    def output(self) -> str:
        return "".join([*self.stdout, *self.stderr])

    @property
    def printed(self) -> str:
        """What rank 0 wrote to stdout; AssertionError if another rank did, too."""
        assert not any(self.stdout[1:]), self.stdout
        return self.stdout[0]


@contextlib.contextmanager
def _inherited(environment: Mapping[str, str]) -> Iterator[None]:
    """What is started meanwhile has this environment, and few cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:CORES])
    try:
        with mock.patch.dict(os.environ, environment, clear=True):
            yield
    finally:
        os.sched_setaffinity(0, cores)


class Pool:
    """One job whose ranks wait for calls."""

    def __init__(
        self, launcher: launchers.Launcher, ranks: int, variables: Mapping[str, str]
    ) -> None:
        self.name = " ".join([f"{launcher} {ranks}", *(f"{k}={v}" for k, v in variables.items())])
        self.is_ended = False
        """Whether it was closed, or a call has failed, which ends it."""
        self._printed = {role: [""] * ranks for role in ("out", "err")}
        self._processes = launchers.Processes()
        # The front gives each launcher of the table its flags.
        flags = () if launcher in launchers.table().values() else launcher.flags
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mpiddp-")))
            self._folder = scratch / "calls"
            self._folder.mkdir()
            stack.callback(self._processes.kill)
            environment = launchers.make_environment(launcher, self._processes, scratch, variables)
            with _inherited(environment):
                self._ranks = mpiddp.ranks(
                    ranks, timeout=CALL_SECONDS, allow_shared_gpu=True,
                    launcher=str(launcher.mpirun), launcher_options=shlex.join(flags),
                    output=self._keep,
                )  # fmt: skip
            self._resources = stack.pop_all()

    def _keep(self, rank: int, role: str, text: str) -> None:
        self._printed[role][rank] += text

    @property
    def is_running(self) -> bool:
        """Whether the job is: it may have ended by itself, between two calls."""
        return self._ranks.state == "waiting"

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = CALL_SECONDS,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CallResult:
        """Have every rank run ``function(session, *arguments)`` within ``timeout`` seconds.

        Raises RankFailedError if a rank raises, ends or does not answer. Whatever is raised here
        ends the pool.
        """
        for texts in self._printed.values():
            texts[:] = [""] * len(texts)
        limited = self._ranks.within(timeout)
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        try:
            values = limited.run(answer, function, arguments, cwd or self._folder, env or {}, test)
        except BaseException:
            with contextlib.suppress(AssertionError, MpiddpError):
                self.close()
            raise
        stdout = [launchers.drop_gloo_lines(text) for text in self._printed["out"]]
        return CallResult(values, stdout, list(self._printed["err"]))

    def close(self) -> None:
        """Let the ranks close their session.

        MpiddpError if they had ended already or do not end well, AssertionError if a process stays.
        """
        self.is_ended = True
        with self._resources:
            self._ranks.close()
            self._processes.expect_gone()


class Pools:
    """The pools of a test run, each started when it is first asked for."""

    def __init__(self, limit: int = LIMIT) -> None:
        """``limit``: how many may be open at once; the one unused for longest is closed."""
        self._pools: dict[Any, Pool] = {}
        self._limit = limit

    def __call__(self, launcher: str | launchers.Launcher, ranks: int, **variables: str) -> Pool:
        """The pool of a launcher, which may be given by its name, with these variables.

        MpiddpError if that pool has ended since its last call.
        """
        row = launchers.find(launcher)
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
            except (AssertionError, MpiddpError) as error:
                errors.append(f"pool {pool.name}: {error}")
        assert not errors, "\n".join(errors)
