"""Parameter servers: workers pull weights and push gradients, servers aggregate and update.

A server holds a part of the weights and the optimiser's state for them (Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014). Synchronous servers wait for all
workers, add their gradients in the order of ranks, and make one update of the average; others make
an update of each gradient as it comes, at the learning rate divided by the number of workers, so
that a pass over the data moves the weights as far. Which worker may go on when is the `Clock`'s to
say.

Messages, for each server and worker: one from the worker with its gradient, which asks for weights,
too, and one back with the weights. An empty one from the worker says that its epoch is over; it is
answered by signs of life until all workers' are.
Without a bound server 0 also says which batch the worker should take next, so that a slow worker
takes fewer of them, and nobody waits for it before the epoch is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mpiddp.collectives.transport.mpi import find_thread_limit
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.mpi.pauses import Pauses
from mpiddp.sync.parameter_server.flat_parameters import FlatModel
from mpiddp.sync.parameter_server.mpi_messages import LONGEST_PAUSE, Array, Message, Wire
from mpiddp.sync.parameter_server.staleness import Clock
from mpiddp.sync.parameter_server.worker_deadlines import Watch

GRADIENT, WEIGHTS, TICKET, SIGN = range(4)
"""What a message is, added to four times the number of its server to make its tag."""
PRESENT, OVER = np.zeros(1, np.uint8), np.ones(1, np.uint8)
"""Signs to a worker that waits for an epoch's end."""
SIGNS = 4
"""Of them in the time after which a server that gives none is lost."""
PATIENCE = 2.0
"""Seconds by which workers wait longer than servers, who know which worker all wait for."""

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def _tag(server: int, kind: int) -> int:
    return 4 * server + kind


def shares_batches(server: int, bound: int | None) -> bool:
    """Whether this server tells workers which batches to take."""
    return server == 0 and bound is None


def check_threads() -> None:
    """Raise ConfigurationError where a rank cannot serve and compute at once."""
    if limit := find_thread_limit():
        raise ConfigurationError(
            f"parameter servers need MPI_THREAD_MULTIPLE, but MPI has {limit} in this process: use "
            "--sync auto, or an MPI library that was built with thread support"
        )


class Server:
    """One server's weights and optimiser; ``serve`` is its life."""

    number: int
    """Of this server, from 0."""
    clock: Clock
    """Who has come how far, and how stale gradients were."""
    epochs: int
    """In how many all workers have said that they have no more gradients; from any thread."""

    def __init__(
        self,
        wire: Wire,
        number: int,
        workers: Sequence[int],
        weights: torch.Tensor,
        pieces: Sequence[int],
        make_optimizer: MakeOptimizer,
        rate: Callable[[int], float],
        clock: Clock,
    ) -> None:
        """A server that has not heard of anybody yet.

        Args:
            wire: used for nothing else but parameter servers. A worker that was given weights is
                lost after its time-out.
            number: of this server, from 0.
            workers: their ranks, in the order in which gradients are added.
            weights: this server's part, flat, on the CPU; copied.
            pieces: how many of them belong to each parameter, in order. An optimiser may round a
                number by where in its tensor it stands.
            make_optimizer: its optimiser is this server's own.
            rate: the learning rate of a step, counted from 0.
            clock: says who may go on; this server's own.
        """
        self._wire = wire
        self.number = number
        self._workers = tuple(workers)
        self._rate = rate
        self.clock = clock
        self._watch = Watch(len(workers), wire.timeout)
        self._weights = weights.clone()
        self._pieces = tuple(pieces)
        self._parameters = [
            piece.requires_grad_() for piece in torch.split(self._weights, list(pieces))
        ]
        self._optimizer = make_optimizer(self._parameters)
        self._sum = torch.zeros_like(weights)
        self._gradients = [torch.empty_like(weights) for _ in workers]
        # In step, weights stay as they are until all workers have them.
        self._answers = (
            [self._weights] * len(workers)
            if clock.bound == 0
            else [torch.empty_like(weights) for _ in workers]
        )
        self._sends: dict[int, list[Message]] = {}
        """What each worker has not taken yet, as far as is known."""
        self._here: set[int] = set()
        self._added = 0
        """Of the present step's gradients, in their order."""
        self._shares_batches = shares_batches(number, clock.bound)
        self._tickets = np.zeros((len(workers), 1), np.int64)
        """For each worker, the batch that it was last told to take."""
        self._next_ticket = len(workers)
        self._receives: dict[int, Message] = {}
        """From workers that have weights."""
        self._finished: set[int] = set()
        self._sign_due = 0.0
        self.epochs = 0
        self._stopped = threading.Event()

    def serve(self) -> None:
        """Answer all workers until ``stop`` is called. Raises PeerLostError."""
        from mpi4py import MPI

        for place in range(len(self._workers)):
            self._listen(place)
        status, pauses = MPI.Status(), Pauses(LONGEST_PAUSE)
        while not self._stopped.is_set():
            came = [place for place, each in self._receives.items() if each.test(status)]
            for place in came:
                self._hear(place, self._receives.pop(place))
            if lost := self._watch.find_lost():
                missing = ", ".join(self._name(place) for place in lost)
                raise PeerLostError(
                    f"parameter server {self.number} has heard nothing of {missing} for "
                    f"{self._wire.timeout:g} s"
                )
            if time.monotonic() > self._sign_due:
                self._sign(PRESENT)
            if came:
                pauses.begin()
            else:
                pauses.sleep()
        for message in self._receives.values():
            message.cancel()
        for place in list(self._sends):
            self._finish_sends(place)

    def stop(self) -> None:
        """Have ``serve`` return; from another thread, once no worker will send anything more."""
        self._stopped.set()

    def _hear(self, place: int, message: Message) -> None:
        if message.is_empty:
            self._watch.excuse(place)
            self._listen(place)
            self._finished.add(place)
            if len(self._finished) == len(self._workers):
                self._sign(OVER)
                self._finished.clear()
                self.epochs += 1
        else:
            self._watch.hear(place)
            self._take(place)

    def _sign(self, sign: Array) -> None:
        """Tell those who wait for the epoch's end how things are."""
        self._sign_due = time.monotonic() + self._wire.timeout / SIGNS
        for place in self._finished:
            self._send(place, sign, SIGN)

    def _name(self, place: int) -> str:
        return self._wire.names[self._workers[place]]

    def _listen(self, place: int) -> None:
        buffer, tag = _view_bytes(self._gradients[place]), _tag(self.number, GRADIENT)
        self._receives[place] = self._wire.receive(buffer, self._workers[place], tag)

    def _take(self, place: int) -> None:
        """A gradient has come."""
        self.clock.push(place)
        if self.clock.bound == 0:
            self._here.add(place)
            self.aggregate()
        else:
            count = len(self._workers)
            self.update(self._gradients[place], self.clock.updates // count, 1 / count)
            self.clock.update(place)
        for ready in self.clock.release():
            self._answer(ready)

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
            for place in range(len(self._workers)):
                # All have taken the weights that are about to change, or they had not come here.
                self._finish_sends(place)
            self.update(self._sum.div_(len(self._workers)), self.clock.updates)
            self.clock.update_together()

    def update(self, gradient: torch.Tensor, step: int, share: float = 1.0) -> None:
        """One step of the optimiser, with this server's part of a gradient, flat.

        ``share``: of the step's learning rate. It is not the gradient's: weight decay is to have
        its share, too, and some optimisers do not care how large a gradient is.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = share * self._rate(step)
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
        self._listen(place)
        self._watch.expect(place)
        if self._shares_batches:
            self._tickets[place] = self._next_ticket
            self._next_ticket += 1
            self._send(place, self._tickets[place], TICKET)
        if self.clock.bound != 0:
            # The weights change while they are on their way to a slow worker.
            self._answers[place].copy_(self._weights)
        self._send(place, _view_bytes(self._answers[place]), WEIGHTS)

    def _send(self, place: int, message: Array, kind: int) -> None:
        rank, tag = self._workers[place], _tag(self.number, kind)
        sends = self._sends.setdefault(place, [])
        sends.append(self._wire.send(message, rank, tag))

    def _finish_sends(self, place: int) -> None:
        what = f"parameter server {self.number} waited for {self._name(place)} to take its weights"
        for message in self._sends.pop(place, []):
            self._wire.wait(message, what)


class Worker:
    """One worker's side: its model is computed with the servers' weights."""

    def __init__(
        self,
        wire: Wire,
        servers: Sequence[int],
        model: FlatModel,
        place: int,
        bound: int | None,
    ) -> None:
        """A worker with the servers' first weights.

        Args:
            wire: the servers'.
            servers: their ranks, by number.
            model: its memory is used as it is on the CPU; on a GPU it is staged in pinned memory.
            place: this worker's, among all.
            bound: the servers'.
        """
        self._wire = wire
        self._servers = tuple(servers)
        self._model = model
        self._weights = _stage(model.parameters)
        self._gradients = _stage(model.gradients)
        self._shards = model.shards(len(servers))
        self._messages: list[tuple[Message, int]] = []
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
        """Collect the gradients, send each server its part of them, and ask for weights."""
        self._model.collect_gradients()
        if self._gradients is not self._model.gradients:
            self._gradients.copy_(self._model.gradients)
        if self._shares_batches:
            self._exchange(0, TICKET, self._ticket)
        # Each worker begins with another server, so that none of them is asked by all at once.
        count = len(self._servers)
        for number in ((self._place + each) % count for each in range(count)):
            shard = self._shards[number]
            self._exchange(number, WEIGHTS, _view_bytes(self._weights[shard]))
            self._exchange(number, GRADIENT, _view_bytes(self._gradients[shard]))

    def _exchange(self, number: int, kind: int, buffer: Array) -> None:
        rank = self._servers[number]
        begin = self._wire.send if kind == GRADIENT else self._wire.receive
        self._messages.append((begin(buffer, rank, _tag(number, kind)), rank))

    def pull_weights(self) -> None:
        """Wait for the weights to go on with. Raises PeerLostError."""
        for message, rank in self._messages:
            what = (
                f"waited for the weights of the parameter server that is {self._wire.names[rank]},"
            )
            self._wire.wait(message, what, PATIENCE)
        self._messages.clear()
        if self._weights is not self._model.parameters:
            self._model.parameters.copy_(self._weights)

    def finish_epoch(self) -> None:
        """Tell all servers that there will be no gradient before the next epoch.

        Waits until all workers have done so, however long that takes: meanwhile servers give signs
        of life. Raises PeerLostError where one does not.
        """
        for number, rank in enumerate(self._servers):
            nothing = np.empty(0, np.uint8)
            message = self._wire.send(nothing, rank, _tag(number, GRADIENT))
            self._wire.wait(
                message, f"waited for {self._wire.names[rank]} to hear of an epoch's end"
            )
        for number, rank in enumerate(self._servers):
            sign = PRESENT.copy()
            while sign[0] == PRESENT[0]:
                message = self._wire.receive(sign, rank, _tag(number, SIGN))
                name = self._wire.names[rank]
                what = f"heard nothing, at an epoch's end, of the parameter server that is {name},"
                self._wire.wait(message, what)


def _view_bytes(tensor: torch.Tensor) -> Array:
    """Its memory: NumPy has not all of torch's types."""
    return tensor.view(torch.uint8).numpy()


def _stage(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
