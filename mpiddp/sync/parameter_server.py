"""Parameter servers: workers pull weights and push gradients, servers aggregate and update.

A server holds a part of the weights and the optimiser's state for them (Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014). Synchronous servers wait for all
workers, add their gradients in the order of ranks, and make one update of the average; others make
an update of each gradient as it comes, divided by the number of workers, so that a pass over the
data moves the weights as far. Which worker may go on when is the `Clock`'s to say.

Messages, for each server and worker: one from the worker with its gradient, which asks for weights,
too, and one back with the weights. An empty one from the worker says that its last step is done.
Without a bound server 0 also says which batch the worker should take next, so that a slow worker
takes fewer of them, and nobody waits for it before the epoch is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.sync.flat import FlatModel
from mpiddp.sync.staleness import Clock
from mpiddp.sync.watch import Watch

if TYPE_CHECKING:
    from mpi4py import MPI

GRADIENT, WEIGHTS, TICKET = range(3)
"""What a message is, added to three times the number of its server to make its tag."""
PAUSE = 5e-5
"""Seconds between two looks for messages; the rank's own work needs the core."""
PATIENCE = 2.0
"""Seconds by which workers wait longer than servers, who know which worker all wait for."""

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def _tag(server: int, kind: int) -> int:
    return 3 * server + kind


def _wait(request: MPI.Request, timeout: float, what: str) -> None:
    end = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > end:
            raise PeerLostError(f"{what} for {timeout:g} s")
        time.sleep(PAUSE)


def shares_batches(server: int, bound: int | None) -> bool:
    """Whether this server tells workers which batches to take."""
    return server == 0 and bound is None


def check_threads() -> None:
    """Raise ConfigurationError where a rank cannot serve and compute at once."""
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigurationError(
            "parameter servers need an MPI library with MPI_THREAD_MULTIPLE, which this one was "
            "built without: use --sync auto"
        )


class Server:
    """One server's weights and optimiser; ``serve`` is its life."""

    def __init__(
        self,
        communicator: MPI.Intracomm,
        number: int,
        workers: Sequence[int],
        weights: torch.Tensor,
        pieces: Sequence[int],
        make_optimizer: MakeOptimizer,
        rate: Callable[[int], float],
        clock: Clock,
        timeout: float,
        names: Sequence[str],
    ) -> None:
        """A server that has not heard of anybody yet.

        Args:
            communicator: used for nothing else but parameter servers.
            number: of this server, from 0.
            workers: their ranks, in the order in which gradients are added.
            weights: this server's part, flat, on the CPU; copied.
            pieces: how many of them belong to each parameter, in order. An optimiser may round a
                number by where in its tensor it stands.
            make_optimizer: its optimiser is this server's own.
            rate: the learning rate of a step, counted from 0.
            timeout: seconds after which a worker that was given weights is taken to be lost.
            names: of all ranks, for people.
        """
        self._communicator = communicator
        self.number = number
        """Of this server, from 0."""
        self._workers = tuple(workers)
        self._rate = rate
        self.clock = clock
        """Who has come how far, and how stale gradients were."""
        self._timeout = timeout
        self._watch = Watch(len(workers), timeout)
        self._names = tuple(names)
        self._weights = weights.clone()
        self._pieces = tuple(pieces)
        self._parameters = [
            piece.requires_grad_() for piece in torch.split(self._weights, list(pieces))
        ]
        self._optimizer = make_optimizer(self._parameters)
        self._sum = torch.zeros_like(weights)
        self._gradients = [torch.empty_like(weights) for _ in workers]
        self._answers = [torch.empty_like(weights) for _ in workers]
        self._sends: dict[int, list[MPI.Request]] = {}
        """What each worker has not taken yet, as far as is known."""
        self._here: set[int] = set()
        self._added = 0
        """Of the present step's gradients, in their order."""
        self._shares_batches = shares_batches(number, clock.bound)
        self._tickets = np.zeros((len(workers), 1), np.int64)
        """For each worker, the batch that it was last told to take."""
        self._next_ticket = len(workers)

    def serve(self) -> None:
        """Answer all workers until the last one has left. Raises PeerLostError."""
        from mpi4py import MPI

        receives = {place: self._listen(place) for place in range(len(self._workers))}
        status = MPI.Status()
        while receives:
            came = []
            for place, request in receives.items():
                if request.Test(status):
                    came.append((place, status.Get_count(MPI.BYTE) == 0))
            for place, leaves in came:
                self._watch.hear(place)
                del receives[place]
                if not leaves:
                    receives[place] = self._take(place)
            if lost := self._watch.find_lost():
                missing = ", ".join(self._name(place) for place in lost)
                raise PeerLostError(
                    f"parameter server {self.number} has heard nothing of {missing} for "
                    f"{self._timeout:g} s"
                )
            if not came:
                time.sleep(PAUSE)
        for place in list(self._sends):
            self._finish_sends(place)

    def _name(self, place: int) -> str:
        return self._names[self._workers[place]]

    def _listen(self, place: int) -> MPI.Request:
        buffer = self._gradients[place].numpy()
        return self._communicator.Irecv(buffer, self._workers[place], _tag(self.number, GRADIENT))

    def _take(self, place: int) -> MPI.Request:
        """A gradient has come; listens for the next one."""
        self.clock.push(place)
        if self.clock.bound == 0:
            self._here.add(place)
            self.aggregate()
        else:
            gradient = self._gradients[place].div_(len(self._workers))
            self.update(gradient, self.clock.updates // len(self._workers))
            self.clock.update(place)
        # The worker sends no gradient before it has had its weights.
        request = self._listen(place)
        for ready in self.clock.release():
            self._answer(ready)
        return request

    def aggregate(self) -> None:
        """Add what has come of the present step, in order; with the last one, update."""
        while self._added in self._here:
            gradient = self._gradients[self._added]
            if self._added == 0:
                self._sum.copy_(gradient)
            else:
                self._sum.add_(gradient)
            self._here.remove(self._added)
            self._added += 1
        if self._added == len(self._workers):
            self._added = 0
            self.update(self._sum.div_(len(self._workers)), self.clock.updates)
            self.clock.update_together()

    def update(self, gradient: torch.Tensor, step: int) -> None:
        """One step of the optimiser, with this server's part of a gradient, flat."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(step)
        for parameter, piece in zip(
            self._parameters, torch.split(gradient, list(self._pieces)), strict=True
        ):
            parameter.grad = piece
        self._optimizer.step()

    def read_weights(self, target: torch.Tensor) -> None:
        """Copy the present weights, and begin an epoch; all workers wait for it elsewhere."""
        target.copy_(self._weights)
        self.clock.renew()
        self._watch.rest()
        self._next_ticket = len(self._workers)

    def _answer(self, place: int) -> None:
        self._finish_sends(place)
        if self._shares_batches:
            self._tickets[place] = self._next_ticket
            self._next_ticket += 1
            self._send(place, self._tickets[place], TICKET)
        # The weights change while they are on their way to a slow worker.
        self._answers[place].copy_(self._weights)
        self._send(place, self._answers[place].numpy(), WEIGHTS)
        self._watch.expect(place)

    def _send(self, place: int, message: np.ndarray[Any, Any], kind: int) -> None:
        rank, tag = self._workers[place], _tag(self.number, kind)
        sends = self._sends.setdefault(place, [])
        sends.append(self._communicator.Isend(message, rank, tag))

    def _finish_sends(self, place: int) -> None:
        what = f"parameter server {self.number} waited for {self._name(place)} to take its weights"
        for request in self._sends.pop(place, []):
            _wait(request, self._timeout, what)


class Worker:
    """One worker's side: its model is computed with the servers' weights."""

    def __init__(
        self,
        communicator: MPI.Intracomm,
        servers: Sequence[int],
        model: FlatModel,
        place: int,
        bound: int | None,
        timeout: float,
        names: Sequence[str],
    ) -> None:
        """A worker with the servers' first weights.

        Args:
            communicator: the servers'.
            servers: their ranks, by number.
            model: its memory is used as it is on the CPU; on a GPU it is staged in pinned memory.
            place: this worker's, among all.
            bound: the servers'.
            timeout: seconds to wait for weights.
            names: of all ranks, for people.
        """
        self._communicator = communicator
        self._servers = tuple(servers)
        self._model = model
        self._timeout = timeout
        self._names = tuple(names)
        self._weights = _stage(model.parameters)
        self._gradients = _stage(model.gradients)
        self._shards = model.shards(len(servers))
        self._requests: list[tuple[MPI.Request, int]] = []
        """And the servers' ranks."""
        self._place = place
        self._shares_batches = shares_batches(0, bound)
        self._ticket = np.array([place], np.int64)

    @property
    def ticket(self) -> int:
        """Which of the epoch's batches to take next, where servers share them out."""
        return int(self._ticket[0])

    def begin_epoch(self) -> None:
        """All workers have the servers' weights, and take their first batches."""
        self._ticket[0] = self._place

    def push_gradients(self) -> None:
        """Send each server its part of the gradients, and ask for weights.

        The gradients must stay as they are until ``pull_weights`` has returned.
        """
        if self._gradients is not self._model.gradients:
            self._gradients.copy_(self._model.gradients)
        comm = self._communicator
        if self._shares_batches:
            server = self._servers[0]
            self._requests.append((comm.Irecv(self._ticket, server, _tag(0, TICKET)), server))
        for number, (rank, shard) in enumerate(zip(self._servers, self._shards, strict=True)):
            weights, gradients = self._weights[shard].numpy(), self._gradients[shard].numpy()
            self._requests.append((comm.Irecv(weights, rank, _tag(number, WEIGHTS)), rank))
            self._requests.append((comm.Isend(gradients, rank, _tag(number, GRADIENT)), rank))

    def pull_weights(self) -> None:
        """Wait for the weights to go on with. Raises PeerLostError."""
        for request, rank in self._requests:
            what = f"waited for the weights of the parameter server that is {self._names[rank]},"
            _wait(request, self._timeout + PATIENCE, what)
        self._requests.clear()
        if self._weights is not self._model.parameters:
            self._model.parameters.copy_(self._weights)

    def leave(self) -> None:
        """Tell all servers that there will be no more gradients."""
        for number, rank in enumerate(self._servers):
            self._communicator.Isend(bytearray(), rank, _tag(number, GRADIENT)).Wait()


def _stage(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
