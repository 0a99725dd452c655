"""A server that forks a rank of a training for each connection, and does as the rank is told.

    python forked_jobs.py SOCKET

What is sent is (name, arguments), and what comes back ("done", value) or ("error", type, text).
torch is imported once, so that a rank is there in milliseconds, and can be killed as often.
"""

import contextlib
import copy
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

import mpiddp
from histories import HEAD, OPTIMIZERS, STEPS, Gradients, History, Trainee, Twin
from mpiddp.checkpoints.optimizer_state import OptimizerState
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage.directory import CheckpointSource
from mpiddp.training.data.seeding import seed_generators

READS = frozenset(
    ("read", "readinto", "readall", "lstat", "stat", "fstat", "listdir", "scandir", "open")
)
"""Functions of Python that read a file or a directory."""
WRITES = frozenset(
    ("open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "remove",
     "pwrite", "ftruncate", "lockf", "close")
)  # fmt: skip
"""Functions that change them, or see to it that a change lasts."""


@dataclass(frozen=True)
class Trap:
    """What happens instead of a system call."""

    names: frozenset[str]
    count: int
    """The first one has 0."""
    is_after: bool = False
    """Whether the call itself is made."""
    error: int | None = None
    """Number of the OSError; None for SIGKILL."""


@contextlib.contextmanager
def set_trap(trap: Trap | None) -> Iterator[None]:
    """Functions are counted in this thread, and in threads that start meanwhile."""
    left = trap.count if trap is not None else 0
    event = "c_return" if trap is not None and trap.is_after else "c_call"

    def look(frame: Any, kind: str, function: Any) -> None:
        nonlocal left
        if kind != event or trap is None or not _is_of_files(frame, function, trap.names):
            return
        left -= 1
        if left == -1:
            if trap.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            sys.setprofile(None)
            raise OSError(trap.error, os.strerror(trap.error))

    if trap is None:
        yield
        return
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _is_of_files(frame: Any, function: Any, names: frozenset[str]) -> bool:
    if getattr(function, "__name__", "") not in names:
        return False
    module = getattr(function, "__module__", None) or type(function.__self__).__module__
    if module not in ("_io", "io", "posix", "fcntl"):
        return False
    code = frame.f_code
    if "multiprocessing" in code.co_filename or "importlib" in code.co_filename:
        return False
    if function.__name__ != "open" or names is not READS:
        return True
    # Path.open, and os.open of a directory.
    return str(frame.f_locals.get("mode", "")).startswith("r")


@dataclass(frozen=True)
class Rank:
    """What a rank is told when it begins."""

    directory: str
    """Of checkpoints."""
    kind: str
    """Of the optimizer."""
    run: str
    attempt: str
    keep: int
    has_head: bool
    rank: int = 0
    world: int = 1
    store: str = ""
    """File in which ranks find each other."""


class Job:
    def __init__(self, given: Rank) -> None:
        if given.world > 1:
            store = dist.FileStore(given.store, given.world)
            dist.init_process_group("gloo", store=store, rank=given.rank, world_size=given.world)
        self._world = given.world
        self._trainee = Trainee(given.kind, given.rank, has_head=given.has_head)
        self._states = OptimizerState(self._trainee.optimizer, {"": self._trainee.net})
        self._checkpointer = mpiddp.Checkpointer(
            given.directory, self._trainee.net, self._states, keep=given.keep,
            source=CheckpointSource(given.run, given.attempt),
        )  # fmt: skip

    def follow(self, event: str, step: int) -> str:
        """Make an event of the history; returns the digest afterwards."""
        trainee = self._trainee
        if event in STEPS:
            trainee.apply(self._exchange(trainee.find_gradients(event, step)))
        elif event == "add":
            trainee.add_head()
        elif event == "slow":
            trainee.slow_down()
        else:
            trainee.freeze(event == "freeze")
        return self.digest()

    def _exchange(self, own: Gradients) -> list[Gradients]:
        if self._world == 1:
            return [own]
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, own)
        return found

    def digest(self) -> str:
        return self._trainee.digest(self._states.state_dict()["state"])

    def seed(self) -> None:
        """As scripts do at their beginning."""
        seed_generators(100 + self._trainee.rank)

    def save(self, step: int, number: int, score: float | None) -> str:
        note = {"number": number, "some": [None, True, 0.1 * number, "é"], "map": {3: {}}}
        tensors = torch.arange(number % 7) / 3
        self._checkpointer.save(step, score=score, number=number, note=note, tensors=tensors)
        return self.digest()

    def wait(self) -> str:
        self._checkpointer.wait()
        return self.digest()

    def save_and_wait(
        self, trap: Trap | None, limit: int | None, step: int, number: int, score: float | None
    ) -> str:
        """``limit``: bytes after which no file can grow."""
        with set_trap(trap), _limit_files(limit):
            self.save(step, number, score)
            return self.wait()

    def restore(self, path: str | None, trap: Trap | None) -> Any:
        """The number of the save and the digest now; None if there is no checkpoint."""
        with set_trap(trap):
            state = self._checkpointer.restore(path)
        if state is None:
            return None, self.digest()
        number = state["number"]
        expected = {"number": number, "some": [None, True, 0.1 * number, "é"], "map": {3: {}}}
        assert state["note"] == expected, state
        assert torch.equal(state["tensors"], torch.arange(number % 7) / 3), state
        return number, self.digest()

    def close(self) -> None:
        self._checkpointer.close()


@contextlib.contextmanager
def _limit_files(limit: int | None) -> Iterator[None]:
    """A disk that is full once a file has so many bytes."""
    if limit is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def follow_twin(twins: dict[tuple[Any, ...], Twin], kind: str, history: History) -> list[str]:
    """Digests of a training that nobody interrupted; ``twins``: as they were on the way."""
    length = len(history)
    while length and (kind, *history[:length]) not in twins:
        length -= 1
    twin = copy.deepcopy(twins[kind, *history[:length]]) if length else Twin(kind)
    for place in range(length, len(history)):
        twin.follow(history[place])
        twins[kind, *history[: place + 1]] = copy.deepcopy(twin)
    return twin.digest()


def read_all(given: Rank, paths: list[str]) -> list[Any]:
    """The number and digest of each checkpoint, or the error's name and text."""
    job, found = Job(given), list[Any]()
    for path in paths:
        # A checkpoint of more ranks leaves them as they are.
        job.seed()
        try:
            found.append(job.restore(path, None))
        except mpiddp.MpiddpError as error:
            found.append((type(error).__name__, str(error)))
    job.close()
    return found


def serve(connection: Connection) -> None:
    connection.send(os.getpid())
    job: Any = None
    twins: dict[tuple[Any, ...], Twin] = {}
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            name, arguments = connection.recv()
            try:
                if name == "begin":
                    job, value = Job(*arguments), None
                elif name == "twin":
                    value = follow_twin(twins, *arguments)
                elif name == "read_all":
                    value = read_all(*arguments)
                else:
                    work: Callable[..., Any] = getattr(job, name)
                    value = work(*arguments)
                answer: tuple[Any, ...] = ("done", value)
            except (OSError, mpiddp.MpiddpError) as error:
                answer = ("error", type(error).__name__, str(error))
            except Exception:
                answer = ("broken", traceback.format_exc())
            connection.send(answer)


def warm_up() -> None:
    """Import and compile what each rank would have to, before there are any."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in OPTIMIZERS:
            job = Job(Rank(f"{folder}/{kind}", kind, "a", "a", 1, has_head=True))
            job.follow(HEAD, 1)
            job.save_and_wait(None, None, 1, 1, None)
            job.restore(None, None)
            job.close()


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # An error of reading is to cost milliseconds.
    manifests.FIRST_PAUSE, manifests.PATIENCE_SECONDS = 0.001, 20.0
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    warm_up()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(16)
        print("ready", flush=True)
        # Until who started it leaves.
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection = Connection(listener.accept()[0].detach())
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    serve(connection)
                finally:
                    os._exit(0)
            connection.close()
        # Its ranks end by themselves, and torch takes long to.
        os._exit(0)


if __name__ == "__main__":
    main()
