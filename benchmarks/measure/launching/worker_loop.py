"""Ranks that carry out commands: the other end of `remote_job`.

Rank 0 reads commands from the benchmark, passes them on to the other ranks of its job, and sends
back all answers, in order of ranks. Between two commands every rank sleeps in a read.
The job ends when the benchmark says so or has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import distributed

import mpiddp
from benchmarks.measure.launching.json_lines import JsonLine, accept, connect, get_port, listen
from benchmarks.measure.launching.processes import MARK
from benchmarks.records.contenders import MPI_JOB
from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler

CONNECT_SECONDS = 30.0

Perform = Callable[[Mapping[str, Any]], Any]
"""What a rank does with a command; returns its answer, which JSON can hold; not None."""


class Member(Protocol):
    rank: int
    size: int

    def broadcast(self, value: int) -> int:
        """Rank 0's value. Collective."""

    def greet(self) -> dict[str, Any]:
        """What rank 0 reports to the benchmark first."""


M = TypeVar("M", bound=Member)


class SessionMember:
    def __init__(self, session: mpiddp.Session) -> None:
        if session.comm is None:
            raise ConfigurationError("this benchmark's ranks need MPI: start them with mpirun")
        self._session, self._comm = session, session.comm
        self.rank, self.size = session.world.rank, session.world.size

    def broadcast(self, value: int) -> int:
        return self._session.broadcast(value)

    def greet(self) -> dict[str, Any]:
        return {**describe_place()}


class TorchMember:
    """A rank that torchrun started, which knows no MPI."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def broadcast(self, value: int) -> int:
        held = torch.tensor([value], device=self.device)
        distributed.broadcast(held, 0)
        return int(held.item())


def describe_place() -> dict[str, str | None]:
    """Where Slurm put this job, so that a second job can be put there, too."""
    names = {"slurm_job": "SLURM_JOB_ID", "slurm_nodes": "SLURM_STEP_NODELIST"}
    return {key: os.environ.get(name) for key, name in names.items()}


def serve(rank: int, perform: Perform, above: JsonLine, below: Sequence[JsonLine]) -> None:
    """Carry out the commands from ``above``: the benchmark on rank 0, rank 0 on the others."""
    while (command := above.receive()) is not None:
        for line in below:
            line.send(command)
        if command["do"] == "end":
            return
        own = perform(command)
        if rank == 0:
            answers = [own]
            for other, line in enumerate(below, start=1):
                answer = line.receive()
                if answer is None:
                    raise ConnectionError(f"rank {other} has ended")
                answers.append(answer)
            above.send(answers)
        else:
            above.send(own)


def _listen_as(master: str) -> socket.socket:
    """A server at the master's address, on the master itself.

    The name of a host may mean loopback there, where the other hosts cannot reach it.
    """
    address = socket.gethostbyname(master)
    is_only_here = address.startswith("127.") and master not in (address, "localhost")
    return listen("" if is_only_here else address)


@contextlib.contextmanager
def join_lines(
    member: Member, addresses: Sequence[str]
) -> Iterator[tuple[JsonLine, list[JsonLine]]]:
    """The line on which commands arrive, and rank 0's lines to the others. Collective."""
    token = os.environ[MARK]
    with contextlib.ExitStack() as stack:
        port = 0
        if member.rank == 0:
            server = stack.enter_context(contextlib.closing(_listen_as(os.environ["MASTER_ADDR"])))
            port = get_port(server)
        port = member.broadcast(port)
        if member.rank != 0:
            here = [f"{os.environ['MASTER_ADDR']}:{port}"]
            above = connect(here, token, member.rank, CONNECT_SECONDS)
            stack.callback(above.close)
            yield above, []
            return
        below: dict[int, JsonLine] = {}
        for line, rank in accept(server, token, member.size - 1, CONNECT_SECONDS):
            stack.callback(line.close)
            below[rank] = line
        server.close()
        above = connect(addresses, token, member.greet(), CONNECT_SECONDS)
        stack.callback(above.close)
        yield above, [below[rank] for rank in sorted(below)]


def run(
    join_session: Callable[[mpiddp.Session, FailureHandler], M],
    join_torchrun: Callable[[], M] | None,
    make_perform: Callable[[M], Perform],
) -> None:
    """Be a rank of the job that the command line names: ``mpi|torch HOST:PORT,…``.

    One job's ranks join a session, the other one's the group of torchrun, and never load MPI.
    ``join_torchrun``: None if there is no such job.
    """
    job, addresses = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        if job == MPI_JOB:
            failure_handler = stack.enter_context(FailureHandler())
            session = stack.enter_context(mpiddp.init(allow_shared_gpu=True, bind="none"))
            member = join_session(session, failure_handler)
        else:
            assert join_torchrun is not None
            member = join_torchrun()
            stack.callback(distributed.destroy_process_group)
        above, below = stack.enter_context(join_lines(member, addresses.split(",")))
        serve(member.rank, make_perform(member), above, below)
