"""Makes the collective calls of one rank: plans, order, asynchronous calls, errors."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeAlias

import torch

from mpiddp.collectives.executor import CallPlan, Shortcut
from mpiddp.collectives.planner import CallRequest, Planner
from mpiddp.collectives.present_call import describe_present_call
from mpiddp.collectives.transport.operators import name_type
from mpiddp.collectives.transport.waiting import Waiter
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.schedule import Collective
from mpiddp.torch_internals import bind_comparison, find_increment_version

MOST_PLANS = 256
"""Plans that are kept; beyond that the oldest is dropped."""
MOST_ALIKE = 4
"""Calls that are remembered for one address of a buffer."""
Future: TypeAlias = "torch.futures.Future[torch.Tensor]"
Known = tuple[Callable[[torch.Tensor], bool], tuple[Any, ...], Shortcut]
"""An earlier call: whether a tensor is like its buffer, its other arguments, and what makes it."""


_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _disown_all() -> None:
    for communicator in list(_communicators):
        communicator.disown()


os.register_at_fork(after_in_child=_disown_all)


class Communicator:
    """Collective calls of one rank. Every rank makes the same calls in the same order.

    So calls of two threads must not overlap: which comes first would be chance. Beside a call,
    other threads may prepare or start calls.
    """

    def __init__(
        self,
        planner: Planner,
        waiter: Waiter,
        notes: tuple[str, ...] = (),
        agree: Callable[[Any, str], Any] | None = None,
        device: torch.device | None = None,
        is_concurrent: bool = True,
    ) -> None:
        """Made by ``bootstrap.ensure_communicator``.

        Args:
            device: the session's; a tensor on another GPU is refused.
            notes: what a user should know about the transports.
            agree: with MPIDDP_DEBUG, compares a value between all ranks before each call.
            is_concurrent: whether a second thread may make calls.
        """
        self.planner = planner
        self.layout = planner.layout
        self.node_memory = planner.node_memory
        """None if the node's ranks cannot work in each other's memory."""
        self.shared_memory = planner.shared_memory
        """Allocates memory that the node's ranks share."""
        self.waiter = waiter
        self.notes = notes
        self.is_concurrent = is_concurrent
        """Whether asynchronous calls run beside the program."""
        self._agree = agree
        self._device = device
        self._calls = 0
        """Those that were compared."""
        self._begun = self._complete = 0
        """How many calls were begun, and how many are complete."""
        self._plans: dict[Hashable, CallPlan] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._worker_thread = 0
        self._pending = 0
        self._lock = threading.Lock()
        self._planning = threading.Lock()
        """Held by the thread that makes a plan, for which ranks may exchange messages."""
        self._turn = [0]
        """Holds the number of complete calls. A thread takes it out to make a call, then puts it
        back: that takes a sixth of a lock's time."""
        self._stream: torch.cuda.Stream | None = None
        """The GPU stream of asynchronous calls; None before the first one."""
        self.shortcuts: dict[int, tuple[Known, ...]] = {}
        """Earlier calls by the address of their buffers. Empty while calls are compared, or
        asynchronous ones are running."""
        self._remembered = 0
        """Calls that were stored in ``shortcuts`` since it was cleared: it keeps their memory."""
        self.has_failed = False
        """Whether a call has failed, so that the ranks' next ones do not match."""
        self._failed_call: dict[str, Any] = {}
        self._refusal = ""
        """Why calls are refused from now on; empty while they are not."""
        self._make_barrier: Callable[[], object] | None = None
        _communicators.add(self)

    def run(self, request: CallRequest, tensor: torch.Tensor) -> torch.Tensor:
        """Make a call, in place. Raises ConfigurationError, PeerLostError."""
        key = _make_key(request, tensor)
        plan = self._plans.get(key)
        if self._stream is not None and not tensor.is_cpu:
            torch.cuda.current_stream(tensor.device).wait_stream(self._stream)
        if plan is None or self._needs_checks(tensor) or not tensor.is_contiguous():
            if self._pending and not self._is_worker():
                # After the asynchronous calls that were started before.
                if tensor.is_cpu:
                    return self.start(request, tensor).wait()
                self.finish()
            plan = self._ensure_plan(key, request, tensor)
        self.make(plan.run, tensor)
        return tensor

    def make(self, call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
        """Make a prepared call on this tensor. Raises ConfigurationError, PeerLostError."""
        if self._refusal:
            raise ConfigurationError(self._refusal)
        try:
            number = self._turn.pop()
        except IndexError:
            self._refuse_overlap(tensor)
        try:
            self._begun = number + 1
            call(tensor)
            self._complete = number = number + 1
        except BaseException as error:
            self._begun = number
            self._give_up(error, tensor)
            raise
        finally:
            self._turn.append(number)
        _increment_version((tensor,))

    def count_calls(self) -> tuple[int, int]:
        """The number of this rank's last call, counted from 1, and of its last complete one."""
        complete = self._complete
        # Read last: this thread may come between any two lines of a call.
        return self._begun, complete

    def describe_call(self) -> dict[str, Any]:
        """What is known of the call that this rank is in, or in which it has failed."""
        if self._failed_call:
            return self._failed_call
        return describe_present_call(self) if self._complete < self._begun else {}

    def _needs_checks(self, tensor: torch.Tensor) -> bool:
        """Whether the call needs checks that a plain tensor does not need."""
        return (
            self._agree is not None
            or self._pending > 0
            or tensor.requires_grad
            or type(tensor) is not torch.Tensor
            or tensor.is_neg()
            or tensor.is_conj()
        )

    @property
    def is_checked(self) -> bool:
        """Whether calls are compared between the ranks first, because of MPIDDP_DEBUG."""
        return self._agree is not None

    def compare(self, call: str) -> None:
        """Raise ConfigurationError unless all ranks make the same call; if calls are compared."""
        if self._agree is not None:
            self._calls += 1
            self._agree(f"call {self._calls}: {call}", "the collective call")

    def _is_worker(self) -> bool:
        return threading.get_ident() == self._worker_thread

    def find_shortcut(self, tensor: torch.Tensor, options: tuple[Any, ...]) -> Shortcut | None:
        """What makes the call that `remember` has stored for this tensor with these options.

        Raises AttributeError, RuntimeError, TypeError or ValueError for what is no tensor with
        memory.
        """
        for is_like, known, shortcut in self.shortcuts.get(tensor.data_ptr(), ()):
            if known == options and is_like(tensor):
                return shortcut
        return None

    def remember(
        self, request: CallRequest, tensor: torch.Tensor, options: tuple[Any, ...]
    ) -> None:
        """Store a call that was just made in ``shortcuts``; ``options``: the other arguments."""
        plan = self._plans.get(_make_key(request, tensor))
        if plan is None or not tensor.is_cpu or self._needs_checks(tensor):
            return
        self._remembered += 1
        if self._remembered > MOST_PLANS:
            self.shortcuts.clear()
            self._remembered = 1
        address = tensor.data_ptr()
        known = (bind_comparison(tensor), options, plan.find_shortcut(tensor))
        before = self.shortcuts.get(address, ())
        self.shortcuts[address] = (known, *before[: MOST_ALIKE - 1])

    def prepare(self, request: CallRequest, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that makes the call on this tensor each time it is called."""
        plan = self._ensure_plan(_make_key(request, tensor), request, tensor)
        call = plan.prepare(tensor)
        held = _hold_memory(tensor)
        turn, on_gpu, is_checked = self._turn, not tensor.is_cpu, self.is_checked

        def make_call() -> torch.Tensor:
            if (
                self._refusal
                or self._pending
                or is_checked
                or (on_gpu and self._stream is not None)
            ):
                return self.run(request, tensor)
            try:
                number = turn.pop()
            except IndexError:
                self._refuse_overlap(tensor)
            try:
                self._begun = number + 1
                call()
                self._complete = number = number + 1
            except BaseException as error:
                self._begun = number
                # The tensor may have other memory by now.
                _kept.append(held)
                self._give_up(error, tensor)
                raise
            finally:
                turn.append(number)
            return tensor

        return make_call

    def start(self, request: CallRequest, tensor: torch.Tensor) -> Future:
        """Start a call; its future's value is the tensor.

        Such calls are made in order: on a GPU on a stream of their own, after what is queued on the
        current stream; on the CPU in a thread. Callbacks of a future run in that thread, and calls
        that they make are complete when they return. The same holds for all calls on the CPU if
        there can be no such thread.
        """
        self._check_open()
        key = _make_key(request, tensor)
        if not tensor.is_cpu:
            return self._queue(request, tensor)
        future: Future = torch.futures.Future()
        if self._is_worker() or not self.is_concurrent:
            future.set_result(self.run(request, tensor))
            return future
        plan = self._ensure_plan(key, request, tensor)
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "mpiddp-collectives")
            self._pending += 1
            self.shortcuts = {}
        self._worker.submit(self._work, plan, tensor, future)
        return future

    def _queue(self, request: CallRequest, tensor: torch.Tensor) -> Future:
        """Start a call on a GPU, on a stream of its own."""
        future: Future = torch.futures.Future(devices=[tensor.device])
        current = torch.cuda.current_stream(tensor.device)
        # A tensor on another GPU is refused before it is worked on.
        stream = self._stream
        if stream is None:
            # torch has no types for it.
            stream = torch.cuda.Stream(tensor.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.run(request, tensor)
            # The allocator gives memory that is freed to its own stream's next user at once.
            tensor.record_stream(stream)
            # Records an event on this stream; a wait for the future waits for the event.
            future.set_result(tensor)
        self._stream = stream
        return future

    def _work(self, plan: CallPlan, tensor: torch.Tensor, future: Future) -> None:
        self._worker_thread = threading.get_ident()
        try:
            self.make(plan.run, tensor)
        except BaseException as error:
            # torch's stub asks for a result here; its code and its documentation, for an exception.
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(tensor)
        finally:
            # Only now, since the future's callbacks may make calls, in this thread: a call of
            # another thread would run at the same time.
            with self._lock:
                self._pending -= 1

    def _check_open(self) -> None:
        if self._refusal:
            raise ConfigurationError(self._refusal)

    def _refuse_overlap(self, tensor: torch.Tensor) -> NoReturn:
        rank = self.layout.rank
        error = ConfigurationError(
            f"rank {rank} on {self.layout.hosts[rank]} began a collective call in thread "
            f"{threading.current_thread().name!r} while another thread makes one: make calls one "
            "after the other, in the same order on all ranks, or use async_op=True"
        )
        self._give_up(error, tensor)
        raise error

    def _give_up(self, error: BaseException, tensor: torch.Tensor) -> None:
        """Refuse all calls after one that failed, since its state is unknown.

        Ranks of this node that wait for this one are told at once; the others wait until their
        timeout. The tensor is kept alive, since a peer may still work in it.
        """
        _kept.append(tensor)
        if self._refusal:
            return
        self.has_failed = True
        self._refusal = f"an earlier collective call failed ({error}): start the program again"
        self.shortcuts = {}
        if self.node_memory is not None:
            self.node_memory.give_up(error)
        with contextlib.suppress(Exception):  # The others know; a report does without.
            found = describe_present_call(self)
            self._failed_call = {"number": self._complete + 1, "is_complete": False, **found}

    def finish(self) -> None:
        """Return once the asynchronous calls that were started have ended."""
        if self._worker is not None:
            self._worker.submit(int).result()

    def disown(self) -> None:
        """Refuse all calls in a forked child."""
        self._refusal = "a forked child takes no part in collective calls: its parent does"
        self.shortcuts = {}

    def barrier(self) -> None:
        """Return once every rank has come. Raises PeerLostError."""
        if self._make_barrier is None:
            self._make_barrier = self.prepare(_BARRIER, torch.zeros(1, dtype=torch.int32))
        self._make_barrier()

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part in a reduce-scatter or an all-gather: a view of the flat tensor."""
        rank, size, count = self.layout.rank, self.layout.size, tensor.numel()
        return tensor.view(-1)[count * rank // size : count * (rank + 1) // size]

    def close(self) -> None:
        """Wait for asynchronous calls; free requests and memory. Collective."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self.shortcuts = {}
        if self._refusal:
            # After a failed call messages may still arrive: requests and buffers are kept.
            _kept.append(self._plans)
            return
        self._refusal = "the session of this call is closed"
        self._plans.clear()
        self.planner.close()

    def _ensure_plan(self, key: Hashable, request: CallRequest, tensor: torch.Tensor) -> CallPlan:
        self._check_open()
        problem = find_problem(tensor, self._device)
        with self._planning:
            if self.is_checked:
                self.compare(f"{_describe(request, tensor)}{problem and ', ' + problem}")
            if problem:
                raise ConfigurationError(problem)
            plan = self._plans.get(key)
            if plan is None:
                plan = self.planner.make(request, tensor)
                if len(self._plans) >= MOST_PLANS:
                    self._plans.pop(next(iter(self._plans)))
                self._plans[key] = plan
            return plan


_kept: list[object] = []
"""Kept alive until the process ends."""
_BARRIER = CallRequest(Collective.ALL_REDUCE)


def _describe(request: CallRequest, tensor: torch.Tensor) -> str:
    if request is _BARRIER:
        return "barrier"
    kind, dtype = request.kind, name_type(tensor.dtype)
    parts = [
        f"{kind.value} of {tensor.numel()} {dtype} on {tensor.device.type}",
        f"algorithm {request.algorithm}",
        f"transport {request.transport}",
    ]
    if kind in (Collective.BROADCAST, Collective.REDUCE):
        parts.append(f"root {request.root}")
    if kind not in (Collective.BROADCAST, Collective.ALL_GATHER):
        parts.append(f"op {request.operator}")
        if request.reduction_dtype is not None:
            parts.append(f"in {name_type(request.reduction_dtype)}")
    return ", ".join(parts) + (", fixed order" if request.fixed_order else "")


def _hold_memory(tensor: torch.Tensor) -> object:
    """Keeps the tensor's memory at its address: torch does not resize memory that NumPy uses."""
    if not tensor.is_cpu or tensor.numel() == 0:
        return tensor.untyped_storage()
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _make_key(request: CallRequest, tensor: torch.Tensor) -> Hashable:
    try:
        # The number of a device without one is the CPU's.
        return (request, tensor.numel(), tensor.dtype, tensor.get_device(), tensor.is_cpu)
    except (AttributeError, RuntimeError):
        check_tensor(tensor)
        raise


_increment_version = find_increment_version()


def tell_autograd(tensor: torch.Tensor) -> None:
    """Have autograd notice that the tensor has changed, if a backward pass needs the old value."""
    _increment_version((tensor,))


def check_tensor(tensor: Any) -> None:
    """Raise ConfigurationError for a tensor that calls cannot work in."""
    if problem := find_problem(tensor):
        raise ConfigurationError(problem)


def find_problem(tensor: Any, device: torch.device | None = None) -> str:
    """Why calls cannot work in this tensor; empty if they can.

    ``device``: the session's, if it matters.
    """
    if not isinstance(tensor, torch.Tensor):
        return f"expected a torch tensor, found {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"expected a dense tensor, found one of layout {tensor.layout}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"expected a CPU or CUDA tensor, found one on {tensor.device}"
    if tensor.is_cuda and device is not None and device.type == "cuda" and tensor.device != device:
        return (
            f"expected a tensor on {device}, the GPU of this session, found one on "
            f"{tensor.device}: move it there first"
        )
    if not tensor.is_contiguous():
        return (
            f"expected a contiguous tensor, found one of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}: call .contiguous() first"
        )
    if tensor.is_conj() or tensor.is_neg():
        return "expected a tensor whose memory holds its values: call .resolve_conj().resolve_neg()"
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        name = type(tensor).__name__
        return f"expected a tensor with memory of its own, found a {name}: pass its local tensor"
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        return (
            "a leaf that requires grad cannot be changed in place: pass tensor.detach(), or call "
            "under torch.no_grad()"
        )
    return ""
