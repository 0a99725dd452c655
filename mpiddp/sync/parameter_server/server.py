"""Parameter servers: workers pull weights and push gradients, servers aggregate and update.

A server holds a part of the weights and the optimiser's state for them (Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014). Synchronous servers wait for all
workers, add their gradients in the order of ranks, and make one update of the average; others make
an update of each gradient as it arrives, at the learning rate divided by the number of workers, so
that a pass over the data moves the weights as far. `Clock` says which worker may continue. A
gradient that its worker has marked is dropped, and in step all gradients of that step are.

Messages between a server and a worker: the worker sends its gradient, which also asks for weights,
and the server sends the weights back. An empty message of the worker says that it has no more
gradients before the next epoch or checkpoint; the server answers with signs of life until all
workers have said so. In step, if workers may mark gradients, server 0 also sends with its weights
whether the step was dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpiddp.checkpoints.optimizer_state import load_uncast
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.mpi.mpi import find_thread_limit
from mpiddp.launch.mpi.pauses import Pauses
from mpiddp.sync.parameter_server.flat_parameters import FlatModel
from mpiddp.sync.parameter_server.mpi_messages import LONGEST_PAUSE, Array, PendingMessage, Wire
from mpiddp.sync.parameter_server.staleness import Clock
from mpiddp.sync.parameter_server.worker_deadlines import WorkerDeadlines

GRADIENT, WEIGHTS, VERDICT, SIGN = range(4)
"""Kinds of messages; a tag is the kind plus four times the number of the server."""
PRESENT, OVER = np.zeros(1, np.uint8), np.ones(1, np.uint8)
"""Signs of life to a worker that waits for the end of an epoch."""
MARK = 0xFF
"""Each byte of a gradient that servers drop. No arithmetic makes such numbers: they are NaNs with a
payload."""
SIGNS = 4
"""Signs of life in each timeout."""
PATIENCE = 2.0
"""Seconds by which workers wait longer than servers, which know which worker is missing."""


def _tag(server: int, kind: int) -> int:
    return 4 * server + kind


def check_threads() -> None:
    """Raise ConfigurationError if a rank cannot serve and compute at the same time."""
    if limit := find_thread_limit():
        raise ConfigurationError(
            f"parameter servers need MPI_THREAD_MULTIPLE, but MPI has {limit} in this process: use "
            "--sync auto, or an MPI library that was built with thread support"
        )


LR_SHARE = "lr_share"
"""Key of an optimizer's group: its learning rate by that of the step, if that is not 1."""


@dataclass(frozen=True)
class UpdateRule:
    """How servers turn gradients into weights."""

    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    """Makes each server's own, for its part of the weights."""
    rate: Callable[[int], float]
    """The learning rate of a step, counted from 0."""
    bound: int | None
    """How many steps a worker may be ahead of the slowest; None for any number."""
    may_drop: bool = False
    """Whether workers may mark gradients."""

    @property
    def has_verdicts(self) -> bool:
        """Whether server 0 says with its weights whether the step was dropped."""
        return self.bound == 0 and self.may_drop


class Server:
    """One server's weights and optimiser."""

    def __init__(
        self,
        wire: Wire,
        number: int,
        workers: Sequence[int],
        weights: torch.Tensor,
        pieces: Sequence[int],
        rule: UpdateRule,
    ) -> None:
        """
        Args:
            wire: used by parameter servers only. A worker that was given weights is lost after its
                timeout.
            workers: their ranks, in the order in which gradients are added.
            weights: this server's part, flat, on the CPU; copied.
            pieces: how many of them belong to each parameter, in order: the rounding of an
                optimiser may depend on the position in a tensor.
        """
        self._wire = wire
        self.number = number
        self._workers = tuple(workers)
        self._rate = rule.rate
        self.clock = Clock(len(workers), rule.bound)
        self._deadlines = WorkerDeadlines(len(workers), wire.timeout)
        self._weights = weights.clone()
        self._pieces = tuple(pieces)
        self._parameters = [
            piece.requires_grad_() for piece in torch.split(self._weights, list(pieces))
        ]
        self._optimizer = rule.make_optimizer(self._parameters)
        self._sum = torch.zeros_like(weights)
        self._gradients = [torch.empty_like(weights) for _ in workers]
        # In step, weights stay as they are until all workers have them.
        self._answers = (
            [self._weights] * len(workers)
            if rule.bound == 0
            else [torch.empty_like(weights) for _ in workers]
        )
        self._sends: dict[int, list[PendingMessage]] = {}
        """What each worker may not have received yet."""
        self._here: set[int] = set()
        self._added = 0
        """Of the present step's gradients, in their order."""
        self._is_dropped = False
        """Whether one of them is marked; until the next step's come."""
        self._has_verdicts = number == 0 and rule.has_verdicts
        self._verdicts = np.zeros((len(workers), 1), np.int64)
        """What each worker was told last: whether its step was dropped."""
        self._receives: dict[int, PendingMessage] = {}
        """From workers that have weights."""
        self._finished: set[int] = set()
        self._sign_due = 0.0
        self.epochs = 0
        """In which all workers have sent their last gradient; may be read in any thread."""
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
            if lost := self._deadlines.find_lost():
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
        """Have ``serve`` return. Called in another thread, once no worker sends any more."""
        self._stopped.set()

    def _hear(self, place: int, message: PendingMessage) -> None:
        if message.is_empty:
            self._deadlines.excuse(place)
            self._listen(place)
            self._finished.add(place)
            if len(self._finished) == len(self._workers):
                self._sign(OVER)
                self._finished.clear()
                self.epochs += 1
        else:
            self._deadlines.hear(place)
            self._take(place)

    def _sign(self, sign: Array) -> None:
        """Tell the workers that wait for the end of the epoch whether it is over."""
        self._sign_due = time.monotonic() + self._wire.timeout / SIGNS
        for place in self._finished:
            self._send(place, sign, SIGN)

    def _name(self, place: int) -> str:
        return self._wire.names[self._workers[place]]

    def _listen(self, place: int) -> None:
        buffer, tag = _view_bytes(self._gradients[place]), _tag(self.number, GRADIENT)
        self._receives[place] = self._wire.receive(buffer, self._workers[place], tag)

    def _take(self, place: int) -> None:
        self.clock.push(place)
        if self.clock.bound == 0:
            self._here.add(place)
            self.aggregate()
        else:
            count = len(self._workers)
            if not _is_marked(self._gradients[place]):
                self.update(self._gradients[place], self.clock.updates // count, 1 / count)
            self.clock.update(place)
        for ready in self.clock.release():
            self._answer(ready)

    def aggregate(self) -> None:
        """Add the gradients of the present step, in order; after the last one, update."""
        while self._added in self._here:
            gradient = self._gradients[self._added]
            if self._added == 0:
                self._is_dropped = False
                self._sum.copy_(gradient)
            else:
                self._sum.add_(gradient)
            self._is_dropped |= _is_marked(gradient)
            self._here.remove(self._added)
            self._added += 1
        if self._added == len(self._workers):
            self._added = 0
            for place in range(len(self._workers)):
                # All workers have received the weights that are about to change.
                self._finish_sends(place)
            if not self._is_dropped:
                self.update(self._sum.div_(len(self._workers)), self.clock.updates)
            self.clock.update_together()

    def update(self, gradient: torch.Tensor, step: int, share: float = 1.0) -> None:
        """One step of the optimiser, with this server's part of a gradient, flat.

        ``share`` scales the learning rate, not the gradient: weight decay must be scaled too, and
        some optimisers ignore the size of a gradient.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = share * self._rate(step) * group.get(LR_SHARE, 1.0)
        for parameter, piece in zip(
            self._parameters, torch.split(gradient, list(self._pieces)), strict=True
        ):
            parameter.grad = piece
        self._optimizer.step()

    def read_weights(self, target: torch.Tensor) -> None:
        """Copy the present weights, and begin an epoch, while all workers wait."""
        target.copy_(self._weights)
        self.clock.renew()
        self._deadlines.rest()

    def read_state(self) -> dict[str, Any]:
        """The optimizer's state and the clock's, while all workers wait."""
        return {"optimizer": self._optimizer.state_dict(), "clock": self.clock.read_state()}

    def load_state(self, weights: torch.Tensor, state: dict[str, Any], step: int) -> None:
        """Go on from a state, before the first gradient.

        ``weights``: this server's part; copied. ``step``: how many every worker has made.
        """
        with torch.no_grad():
            self._weights.copy_(weights)
        load_optimizer_state(self._optimizer, state["optimizer"])
        self.clock.load_state(state["clock"], step)

    def _answer(self, place: int) -> None:
        self._finish_sends(place)
        self._listen(place)
        self._deadlines.expect(place)
        if self._has_verdicts:
            self._verdicts[place] = self._is_dropped
            self._send(place, self._verdicts[place], VERDICT)
        if self.clock.bound != 0:
            # The weights may change while they are sent to a slow worker.
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
    """A worker: it computes gradients with the servers' weights."""

    def __init__(
        self, wire: Wire, servers: Sequence[int], model: FlatModel, place: int, rule: UpdateRule
    ) -> None:
        """A worker with the servers' first weights. ``servers``: their ranks, by number.

        The model's memory is used as it is on the CPU; on a GPU it is staged in pinned memory.
        """
        self._wire = wire
        self._servers = tuple(servers)
        self._model = model
        self._weights = _stage(model.parameters)
        self._gradients = _stage(model.gradients)
        self._shards = model.shards(len(servers))
        self._messages: list[tuple[PendingMessage, int]] = []
        """And the servers' ranks."""
        self._place = place
        self._has_verdicts = rule.has_verdicts
        self._verdict = np.zeros(1, np.int64)
        """What server 0 has sent with its last weights."""

    @property
    def is_dropped(self) -> bool:
        """Whether servers have dropped the last step of all workers, if they are in step."""
        return bool(self._verdict[0])

    def push_gradients(self, *, is_bad: bool = False) -> None:
        """Collect the gradients, send each server its part of them, and ask for weights.

        With ``is_bad`` the gradients are marked: servers drop them.
        """
        if is_bad:
            self._model.gradients.view(torch.uint8).fill_(MARK)
        else:
            self._model.collect_gradients()
        if self._gradients is not self._model.gradients:
            self._gradients.copy_(self._model.gradients)
        if self._has_verdicts:
            self._exchange(0, VERDICT, self._verdict)
        # Each worker begins with another server, so that no server gets all requests at once.
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
        of life. Raises PeerLostError if one does not.
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


def _is_marked(gradient: torch.Tensor) -> bool:
    """Whether its worker wants it dropped."""
    return bool((gradient[:1].view(torch.uint8) == MARK).all())


def _view_bytes(tensor: torch.Tensor) -> Array:
    """A tensor's memory: NumPy lacks some of torch's types."""
    return tensor.view(torch.uint8).numpy()


def _stage(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load momentum and the like from what ``state_dict`` returned.

    Decay, betas and the form of the implementation stay this optimizer's: the options that are
    given now decide on them, and FSDP's parameters have no fused SGD.
    """
    groups = [
        {**before, **{name: value for name, value in now.items() if name != "params"}}
        for before, now in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    load_uncast(optimizer, {**state, "param_groups": groups})
