"""Parameter servers: workers pull weights and push gradients, servers aggregate and update.

A server holds a part of the weights and the optimiser's state for them (Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014). Synchronous servers wait for all
workers, add their gradients in the order of ranks, and make one update of the average; others make
an update of each gradient as it comes, divided by the number of workers, so that a pass over the
data moves the weights as far. Which worker may go on when is the `Clock`'s to say.

Messages, for each server and worker: one from the worker with its gradient, which asks for weights,
too, and one back with the weights. An empty one from the worker says that its last step is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mpiddp.errors import PeerLostError
from mpiddp.sync.flat import FlatModel
from mpiddp.sync.staleness import Clock

if TYPE_CHECKING:
    from mpi4py import MPI

GRADIENT, WEIGHTS = 0, 1
"""What a message is, added to twice the number of its server to make its tag."""
PAUSE = 5e-5
"""Seconds between two looks for messages; the rank's own work needs the core."""

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def _tag(server: int, kind: int) -> int:
    return 2 * server + kind


def _wait(request: MPI.Request, timeout: float, what: str) -> None:
    end = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > end:
            raise PeerLostError(f"{what} for {timeout:g} s")
        time.sleep(PAUSE)


class Server:
    """One server's weights and optimiser; ``serve`` is its life."""

    def __init__(
        self,
        communicator: MPI.Intracomm,
        number: int,
        workers: Sequence[int],
        weights: torch.Tensor,
        make_optimizer: MakeOptimizer,
        rate: Callable[[int], float],
        clock: Clock,
        timeout: float,
    ) -> None:
        """A server that has not heard of anybody yet.

        Args:
            communicator: used for nothing else but parameter servers.
            number: of this server, from 0.
            workers: their ranks, in the order in which gradients are added.
            weights: this server's part, flat, on the CPU; copied.
            make_optimizer: its optimiser is this server's own.
            rate: the learning rate of a step, counted from 0.
            timeout: seconds without any message after which workers are taken to be lost.
        """
        self._communicator = communicator
        self.number = number
        """Of this server, from 0."""
        self._workers = tuple(workers)
        self._rate = rate
        self.clock = clock
        """Who has come how far, and how stale gradients were."""
        self._timeout = timeout
        self._weights = weights.clone().requires_grad_()
        self._optimizer = make_optimizer([self._weights])
        self._sum = torch.zeros_like(weights)
        self._gradients = [torch.empty_like(weights) for _ in workers]
        self._answers = [torch.empty_like(weights) for _ in workers]
        self._sends: dict[int, MPI.Request] = {}
        self._here: set[int] = set()
        self._added = 0
        """Of the present step's gradients, in their order."""

    def serve(self) -> None:
        """Answer all workers until the last one has left. Raises PeerLostError."""
        from mpi4py import MPI

        receives = {place: self._listen(place) for place in range(len(self._workers))}
        status = MPI.Status()
        end = time.monotonic() + self._timeout
        while receives:
            came = []
            for place, request in receives.items():
                if request.Test(status):
                    came.append((place, status.Get_count(MPI.BYTE) == 0))
            for place, leaves in came:
                del receives[place]
                if not leaves:
                    receives[place] = self._take(place)
            if came:
                end = time.monotonic() + self._timeout
            elif time.monotonic() > end:
                missing = ", ".join(str(self._workers[place]) for place in sorted(receives))
                raise PeerLostError(
                    f"parameter server {self.number} heard nothing of rank {missing} for "
                    f"{self._timeout:g} s"
                )
            else:
                time.sleep(PAUSE)
        for place in list(self._sends):
            self._finish_send(place)

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
            self.update(gradient, self.clock.step(place) - 1)
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
            self.update(self._sum.div_(len(self._workers)), self.clock.step(0) - 1)
            self.clock.update_together()

    def update(self, gradient: torch.Tensor, step: int) -> None:
        """One step of the optimiser."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(step)
        self._weights.grad = gradient
        self._optimizer.step()

    def read_weights(self, target: torch.Tensor) -> None:
        """Copy the present weights; while all workers wait for each other elsewhere."""
        target.copy_(self._weights.detach())
        self.clock.renew()

    def _answer(self, place: int) -> None:
        self._finish_send(place)
        # The weights change while they are on their way to a slow worker.
        self._answers[place].copy_(self._weights.detach())
        buffer, tag = self._answers[place].numpy(), _tag(self.number, WEIGHTS)
        self._sends[place] = self._communicator.Isend(buffer, self._workers[place], tag)

    def _finish_send(self, place: int) -> None:
        request = self._sends.pop(place, None)
        if request is not None:
            rank = self._workers[place]
            what = f"parameter server {self.number} waited for rank {rank} to take its weights"
            _wait(request, self._timeout, what)


class Worker:
    """One worker's side: its model is computed with the servers' weights."""

    def __init__(
        self, communicator: MPI.Intracomm, servers: Sequence[int], model: FlatModel, timeout: float
    ) -> None:
        """``servers``: their ranks, by number. The model's memory is used as it is on the CPU; what
        is on a GPU is staged in pinned memory."""
        self._communicator = communicator
        self._servers = tuple(servers)
        self._model = model
        self._timeout = timeout
        self._weights = _stage(model.parameters)
        self._gradients = _stage(model.gradients)
        self._shards = model.shards(len(servers))
        self._requests: list[MPI.Request] = []

    def push_gradients(self) -> None:
        """Send each server its part of the gradients, and ask for weights.

        The gradients must stay as they are until ``pull_weights`` has returned.
        """
        if self._gradients is not self._model.gradients:
            self._gradients.copy_(self._model.gradients)
        for number, (rank, shard) in enumerate(zip(self._servers, self._shards, strict=True)):
            weights, gradients = self._weights[shard].numpy(), self._gradients[shard].numpy()
            comm = self._communicator
            self._requests.append(comm.Irecv(weights, rank, _tag(number, WEIGHTS)))
            self._requests.append(comm.Isend(gradients, rank, _tag(number, GRADIENT)))

    def pull_weights(self) -> None:
        """Wait for the weights to go on with. Raises PeerLostError."""
        for request, rank in zip(
            self._requests, (rank for rank in self._servers for _ in range(2)), strict=True
        ):
            _wait(request, self._timeout, f"waited for rank {rank}'s weights")
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
