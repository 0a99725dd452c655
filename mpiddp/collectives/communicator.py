"""The ranks of a launch, ready for collective calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import torch

from mpiddp.collectives.layout import Layout
from mpiddp.collectives.operators import name_type
from mpiddp.collectives.planner import Planner, Request
from mpiddp.collectives.plans import Plan
from mpiddp.collectives.schedule import Collective
from mpiddp.collectives.selection import Call
from mpiddp.collectives.transport.memory import Neighbourhood
from mpiddp.collectives.transport.segments import Segments
from mpiddp.collectives.waiting import Waiter
from mpiddp.errors import ConfigurationError

MOST_PLANS = 256
"""Plans that are kept; then the oldest goes, to be made anew when it is needed again."""


class Communicator:
    """Collective calls of one rank. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        planner: Planner,
        waiter: Waiter,
        notes: tuple[str, ...] = (),
        agree: Callable[[Any, str], Any] | None = None,
    ) -> None:
        """Made by ``setup.make_communicator``.

        Args:
            notes: what a user should know of the transports.
            agree: compares a value between all ranks before each call, if calls are to be checked.
        """
        self._planner = planner
        self.waiter = waiter
        self.notes = notes
        self._agree = agree
        self._calls = 0
        self._plans: dict[Hashable, Plan] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._pending = 0
        self.letters: dict[Hashable, Callable[[], object]] = {}
        """Calls that were made before and depend on nothing but the own buffer, by all that tells
        them from others: they are found in one look. Empty as long as calls are compared, or others
        are under way."""
        self._lock = threading.Lock()
        self._flag = torch.zeros(1, dtype=torch.int32)

    @property
    def layout(self) -> Layout:
        """Which ranks share a node."""
        return self._planner.layout

    @property
    def neighbourhood(self) -> Neighbourhood | None:
        """The ranks of this node, if they can work in each other's memory."""
        return self._planner.neighbourhood

    @property
    def segments(self) -> Segments:
        """Where memory comes from that the node's ranks share."""
        return self._planner.segments

    # ---- calls ----------------------------------------------------------------------------

    def run(self, request: Request, tensor: torch.Tensor) -> torch.Tensor:
        """Make a call, in place. Raises ConfigurationError, PeerLostError."""
        key = _key(request, tensor)
        plan = self._plans.get(key)
        if plan is None or self._looks_twice() or not tensor.is_contiguous():
            if self._pending:
                # Behind those that were begun before.
                return self.start(request, tensor).wait()
            plan = self._prepare(key, request, tensor)
        plan.run(tensor)
        return tensor

    def _looks_twice(self) -> bool:
        return self._agree is not None or self._pending > 0

    def remember(self, request: Request, tensor: torch.Tensor, key: Hashable) -> None:
        """Have a call that was just made found under ``key`` in ``letters``."""
        plan = self._plans.get(_key(request, tensor))
        if plan is not None and plan.is_letter and not self._looks_twice():
            if len(self.letters) >= MOST_PLANS:
                self.letters.clear()
            self.letters[key] = plan.prepare(tensor)

    def prepare(self, request: Request, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """What makes a call on this tensor, as often as it is called."""
        plan = self._prepare(_key(request, tensor), request, tensor)
        call = plan.prepare(tensor)

        def make_call() -> torch.Tensor:
            if self._looks_twice():
                return self.run(request, tensor)
            call()
            return tensor

        return make_call

    def start(self, request: Request, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin a call; its future has the tensor once it is done.

        On a GPU the call is queued on the current stream, as every other; on the CPU a thread
        makes such calls in the order in which they were begun.
        """
        if tensor.device.type != "cpu":
            queued: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                devices=[tensor.device]
            )
            queued.set_result(self.run(request, tensor))
            return queued
        plan = self._prepare(_key(request, tensor), request, tensor)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "mpiddp-collectives")
            self._pending += 1
            self.letters = {}
        self._worker.submit(self._work, plan, tensor, future)
        return future

    def _work(
        self, plan: Plan, tensor: torch.Tensor, future: torch.futures.Future[torch.Tensor]
    ) -> None:
        try:
            plan.run(tensor)
        except BaseException as error:
            self._count_down()
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            self._count_down()
            future.set_result(tensor)

    def _count_down(self) -> None:
        with self._lock:
            self._pending -= 1

    def barrier(self) -> None:
        """Return once every rank has come. Raises PeerLostError."""
        self.run(_BARRIER, self._flag)

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank owns in a reduce-scatter or an all-gather: a view of the flat tensor.

        Rank r of n owns elements ⌊r·count/n⌋ to ⌊(r+1)·count/n⌋.
        """
        rank, size, count = self.layout.rank, self.layout.size, tensor.numel()
        return tensor.view(-1)[count * rank // size : count * (rank + 1) // size]

    def close(self) -> None:
        """Wait for calls that were begun; give back requests and memory. Collective."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self.letters.clear()
        self._plans.clear()
        self._planner.close()

    # ---- preparation ----------------------------------------------------------------------

    def _prepare(self, key: Hashable, request: Request, tensor: torch.Tensor) -> Plan:
        check_tensor(tensor)
        if self._agree is not None:
            self._calls += 1
            self._agree(
                (
                    self._calls,
                    astuple(request),
                    tensor.numel(),
                    name_type(tensor.dtype),
                    tensor.device.type,
                ),
                "the collective call",
            )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._planner.make(request, tensor)
            if len(self._plans) >= MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
        return plan


_BARRIER = Request(Call(Collective.ALL_REDUCE))


def _key(request: Request, tensor: torch.Tensor) -> Hashable:
    try:
        # The number of a device without one is the CPU's.
        return (request, tensor.numel(), tensor.dtype, tensor.get_device(), tensor.is_cpu)
    except (AttributeError, RuntimeError):
        check_tensor(tensor)
        raise


def check_tensor(tensor: torch.Tensor) -> None:
    """Raise ConfigurationError for a tensor whose memory cannot be worked in."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigurationError(f"expected a torch tensor, found {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ConfigurationError(f"expected a dense tensor, found one of layout {tensor.layout}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"expected a CPU or CUDA tensor, found one on {tensor.device}")
    if not tensor.is_contiguous():
        raise ConfigurationError(
            f"expected a contiguous tensor, found one of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}: call .contiguous() first"
        )
