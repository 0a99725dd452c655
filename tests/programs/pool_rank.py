"""The program that the ranks of a pool run (``pool.py``): they do what tests send, call after call.

    mpirun -n 3 python tests/programs/pool_rank.py SOCKET

Each rank connects to the tests' Unix socket, then answers requests until the socket closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.options import Options
from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.launch.startup import start

CORES = 2
"""All ranks share this many cores, so that on any machine some of them have to wait."""
LENGTH = struct.Struct("<Q")
STACKS = signal.SIGRTMIN + 5
"""Not SIGUSR2: a training takes that as its preemption."""


@dataclass(frozen=True)
class Request:
    """A call: every rank runs ``function(session, *arguments)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    folder: Path
    """The working directory meanwhile."""
    variables: Mapping[str, str]
    """Added to the environment meanwhile."""


@dataclass(frozen=True)
class Answer:
    """What one rank returned and printed; ``error`` is the traceback if it raised."""

    value: Any
    error: str | None
    stdout: str
    stderr: str


def send(channel: socket.socket, content: Any) -> None:
    """Send a length in eight bytes, then a pickle."""
    data = pickle.dumps(content)
    channel.sendall(LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> Any:
    """The next message. EOFError if the other side has gone."""
    (length,) = LENGTH.unpack(_read(channel, LENGTH.size))
    return pickle.loads(_read(channel, length))


def _read(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = channel.recv(count - len(data))
        if not part:
            raise EOFError("the other side of the pool's socket has gone")
        data += part
    return bytes(data)


@contextlib.contextmanager
def _captured(descriptor: int) -> Iterator[IO[bytes]]:
    """A file that holds what this process writes to ``descriptor`` meanwhile."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(descriptor)
        os.dup2(file.fileno(), descriptor)
        try:
            yield file
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def set_timeout(seconds: float) -> None:
    """Change the default group's time-out, by the name that this torch has for that."""
    from torch import distributed

    change = getattr(distributed, "set_timeout", None)
    change = change or distributed.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=seconds))


@contextlib.contextmanager
def _restored(session: Session) -> Iterator[None]:
    """Undo what a call may change in this process."""
    import torch

    before = dict(os.environ), Path.cwd(), os.sched_getaffinity(0), session._timeout
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    random = torch.get_rng_state()
    try:
        yield
    finally:
        variables, folder, cores, session._timeout = before
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        os.sched_setaffinity(0, cores)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
        # What training tells the report of a failure.
        handler = find_failure_handler(session)
        handler.run_directory, handler.step, handler.attempt = None, None, 1
        set_timeout(session._timeout)


def renew(session: Session) -> None:
    """Let the next collective call prepare everything again. Collective."""
    for work in reversed(session._resources.on_close):
        work()
    session._resources.on_close.clear()
    session.collectives = None


def _answer(request: Request, session: Session) -> Answer:
    value, error = None, None
    with _captured(1) as stdout, _captured(2) as stderr:
        with _restored(session), warnings.catch_warnings():
            warnings.simplefilter("error")
            os.chdir(request.folder)
            os.environ.update(request.variables)
            try:
                # Some variables are read when the first collective call is prepared.
                if request.variables:
                    renew(session)
                value = request.function(session, *request.arguments)
                if request.variables:
                    renew(session)
            except Exception:
                error = traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Answer(value, error, *texts)


def main() -> None:
    """Answer requests until there are no more."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    # On this signal a rank writes its stacks to the job's stderr; a call has another stderr.
    faulthandler.register(STACKS, os.fdopen(os.dup(2), "w"), all_threads=True)
    with (
        FailureHandler() as failure_handler,
        start(Options(timeout=60, allow_shared_gpu=True), failure_handler) as session,
        socket.socket(socket.AF_UNIX) as channel,
    ):
        channel.connect(sys.argv[1])
        send(channel, session.world.rank)
        with contextlib.suppress(EOFError):
            while True:
                answer = _answer(receive(channel), session)
                # Notice here, and not in a later test, that ranks made different calls.
                if answer.error is None:
                    session.agree(True, "the end of a call")
                send(channel, answer)


if __name__ == "__main__":
    # What travels is found by the module's name, which is not "__main__" to the tests.
    import pool_rank

    pool_rank.main()
