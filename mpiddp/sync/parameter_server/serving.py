"""Parameter servers in a job: which ranks serve, which compute, and this rank's part."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpiddp import environment
from mpiddp.collectives.bootstrap import find_longest_message
from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Session
from mpiddp.sync.parameter_server.flat_parameters import FlatModel
from mpiddp.sync.parameter_server.mpi_messages import ByteCounter, Wire
from mpiddp.sync.parameter_server.server import Server, UpdateRule, Worker, check_threads
from mpiddp.wording import count_noun

FOLLOW_SECONDS = 0.002
"""Between two looks at how far the workers are."""
MANY = 8
"""Ranks that are counted in a message, not listed."""


@dataclass(frozen=True)
class Roles:
    """The ranks that serve, by number of the server, and those that compute, in order."""

    servers: tuple[int, ...]
    workers: tuple[int, ...]


def assign_roles(ranks: int, servers: int, *, dedicated: bool) -> Roles:
    """The last ranks serve; with ``dedicated`` they do nothing else.

    Raises ConfigurationError if there are too few ranks.
    """
    everyone = tuple(range(ranks))
    if dedicated and servers >= ranks:
        fewer = "" if servers == ranks else f"{ranks} --servers or fewer and "
        raise ConfigurationError(
            f"{servers} dedicated servers leave no worker on {ranks} ranks: start more ranks, or "
            f"use {fewer}--server-placement colocated"
        )
    if servers > ranks:
        raise ConfigurationError(
            f"{servers} servers need as many ranks, found {ranks}: start more ranks, or fewer "
            "--servers"
        )
    first = ranks - servers
    return Roles(everyone[first:], everyone[:first] if dedicated else everyone)


class Serving:
    """This rank's part: a thread if it serves, and a worker if it computes."""

    averages_weights = False

    def __init__(
        self,
        session: Session,
        roles: Roles,
        module: nn.Module,
        rule: UpdateRule,
        fail: Callable[[BaseException], object],
    ) -> None:
        """Begin to serve. Collective over the session's ranks, whose modules have equal weights.

        ``fail`` is called with the error that ends the server's thread.
        """
        if session.comm is None:
            raise ConfigurationError("parameter servers need MPI: start ranks with srun or mpirun")
        check_threads()
        self._roles = roles
        self._model = FlatModel(module)
        count = len(self._model.parameters)
        if len(roles.servers) > count:
            raise ConfigurationError(
                f"{len(roles.servers)} servers share {count} parameters: use fewer --servers"
            )
        self._shards = self._model.shards(len(roles.servers))
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._fail = fail
        self._rank = rank = session.world.rank
        self._epochs = 0
        self._followed = 0
        """Steps of its workers that a rank that only serves has followed, by its server's clock."""
        self._wire = wire = self._make_wire(session)
        if rank in roles.servers:
            number = roles.servers.index(rank)
            shard = self._shards[number]
            weights, pieces = self._model.parameters[shard].cpu(), self._model.pieces(shard)
            self._server = Server(wire, number, roles.workers, weights, pieces, rule)
            # A daemon: an error elsewhere in this process must not wait for the workers.
            self._thread = threading.Thread(
                target=self._serve, name="parameter-server", daemon=True
            )
            self._thread.start()
        self._worker: Worker | None = None
        if rank in roles.workers:
            place = roles.workers.index(rank)
            self._worker = Worker(wire, roles.servers, self._model, place, rule)

    def _make_wire(self, session: Session) -> Wire:
        wish = os.environ.get(environment.MESSAGE_BYTES, "")
        found = session.gather((session.world.hostname, wish))
        names = tuple(f"rank {rank} on {host}" for rank, (host, _) in enumerate(found))
        longest = find_longest_message([each for _, each in found], session.world.node_count > 1)
        communicator = session.duplicate()
        assert communicator is not None
        return Wire(communicator, names, session.timeout, longest)

    @property
    def sent(self) -> ByteCounter:
        """What this rank sends, as server and as worker."""
        return self._wire.counter

    @property
    def has_idle_ranks(self) -> bool:
        """Whether there are ranks that only serve, until this is closed."""
        return bool(self._wire.communicator) and self._roles.servers[-1] not in self._roles.workers

    @property
    def staleness(self) -> dict[int, int]:
        """How many gradients of this rank's server were how many updates late."""
        return {} if self._server is None else dict(sorted(self._server.clock.staleness.items()))

    def _serve(self) -> None:
        assert self._server is not None
        try:
            self._server.serve()
        except BaseException as error:  # In a thread: it ends the job.
            self._fail(error)

    def begin_step(self) -> None:
        self._model.let_go_of_gradients()

    def finish_step(self, *, is_bad: bool = False) -> bool:
        """After it: push the gradients, and pull the weights for the next one.

        ``is_bad``: the servers drop them, and in step all gradients of the step. Returns whether
        this rank's were not dropped.
        """
        assert self._worker is not None
        self._worker.push_gradients(is_bad=is_bad)
        self._worker.pull_weights()
        return not (is_bad or self._worker.is_dropped)

    def follow_steps(self, count: int) -> Iterator[None]:
        """On a rank that only serves: so many steps, each once all workers have pushed in it.

        Ends early if the workers have left the epoch.
        """
        assert self._server is not None
        for _ in range(count):
            self._followed += 1
            # Read before the clock: a worker pushes its last step before it leaves the epoch. If a
            # worker is lost, the server's thread ends the process.
            is_over = self._server.epochs > self._epochs
            while self._server.clock.slowest < self._followed:
                if is_over:
                    return  # All workers have left the epoch before its end.
                time.sleep(FOLLOW_SECONDS)
                is_over = self._server.epochs > self._epochs
            yield

    def exchange_weights(self, *, is_due: bool = False) -> None:
        """The servers have them."""

    def finish_epoch(self) -> None:
        """This rank has no more steps in this epoch: wait for the ranks that have. Collective.

        That may take longer than the timeout of a collective call, which begins when all workers
        have finished.
        """
        self._epochs += 1
        if self._worker is not None:
            self._worker.finish_epoch()
        server = self._server
        self._meet(
            "all workers have finished an epoch, and",
            lambda: server is None or server.epochs >= self._epochs,
        )

    def _meet(self, when: str, is_due: Callable[[], bool]) -> None:
        names = self._wire.names
        others = [*names[: self._rank], *names[self._rank + 1 :]]
        listed = ", ".join(others) if len(others) <= MANY else f"{len(others)} ranks"
        whom = listed if len(others) == 1 else f"one of {listed}"
        self._wire.meet(is_due, f"{when} {whom} did not come")

    def settle(self) -> None:
        """Give all ranks the servers' weights; an epoch begins. Collective, between two steps."""
        dist.barrier()
        for number, (rank, shard) in enumerate(zip(self._roles.servers, self._shards, strict=True)):
            part = self._model.parameters[shard]
            if self._server is not None and self._server.number == number:
                self._server.read_weights(part)
            dist.broadcast(part, rank)

    def list_parts(self, step: int) -> dict[str, Any]:
        """This rank's server as a part of checkpoints, by its name; while all workers wait.

        ``step``: which one is next when it is loaded.
        """
        if self._server is None:
            return {}
        weights = self._model.parameters[self._shards[self._server.number]]
        part = ServerState(self._server, weights, self._rank, step)
        return {f"server-{self._server.number}": part}

    def begin_at(self, step: int) -> None:
        """Go on from a state that was loaded, before the first gradient."""
        if self._server is not None:
            # Workers may have pushed since.
            self._followed = self._server.clock.begun

    def close(self) -> None:
        """End the service, once all workers have come here. Collective."""
        self._meet("at the end of training", lambda: True)
        if self._server is not None and self._thread is not None:
            self._server.stop()
            self._thread.join()
        self._wire.communicator.Free()


class ServerState:
    """A server's state as a part of checkpoints, whichever rank it is on."""

    is_replicated = True

    def __init__(self, server: Server, weights: torch.Tensor, rank: int, step: int) -> None:
        """``weights``: its part of the module's, which are loaded before it."""
        self._server, self._weights, self._step = server, weights, step
        self.writer = rank

    def state_dict(self) -> dict[str, Any]:
        return self._server.read_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._server.load_state(self._weights, state, self._step)


def describe_roles(roles: Roles, bound: int | None) -> str:
    where = "colocated" if set(roles.servers) & set(roles.workers) else "dedicated"
    pace = {0: "in step", None: "at their own pace"}.get(bound, f"up to {bound} steps apart")
    whom = count_noun(len(roles.workers), "worker")
    return f"{count_noun(len(roles.servers), f'{where} parameter server')}, {whom} {pace}"
