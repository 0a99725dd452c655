"""Batches are read in this process, or ahead of time by worker processes.

Workers come from a fork server: a process that has not started MPI and uses no GPU, since neither
survives every fork. They block the signals of a preemption, since ranks need batches until they
leave. They end with their rank.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from mpiddp.errors import MpiddpError
from mpiddp.lifeline.stacks.dump import write_for
from mpiddp.training.data.device_data import DeviceSplit, hold
from mpiddp.training.data.samples import Answer, Batch, Key, Samples, UnreadableSampleError, Work
from mpiddp.training.data.structure import map_leaves

GRACE = 1.0
"""Seconds to wait for the news that a worker has ended, after an error that may have another cause.
The fork server brings it, and may be late on a busy machine."""
LONGEST_GRACE = 30.0
"""The same after a lost connection, which has no other cause."""
BLOCKED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class BatchReading:
    """How batches are read."""

    workers: int = 0
    """Processes that read ahead; 0 for none. Samples on a device need none."""
    pins: bool = False
    """Whether batches are in pinned memory, from which a GPU can copy them meanwhile."""


HERE = BatchReading()


class BatchReader:
    """Reads batches of a split, in the order in which they are asked for."""

    def __init__(self, samples: Samples, reading: BatchReading = HERE) -> None:
        self._samples = samples.time_transforms()
        if not reading.workers:
            self._samples = replace(self._samples, split=hold(self._samples.split))
        self._reading = reading
        self._order = _Order()
        self._loader: DataLoader[Answer] | None = None
        self._workers: Any = None
        """An iterator of the loader, whose processes it holds."""
        self.left_out: list[UnreadableSampleError] = []
        """Of the batches so far, unless they have been reported."""
        self.work: Work = (0.0, 0.0)
        """Of the last batch."""

    def read(self, keys: Iterable[Key]) -> Iterator[Batch]:
        """Raises UnreadableSampleError, BatchError, MpiddpError for a worker that died."""
        samples, pins = self._samples, self._reading.pins
        answers: Iterator[Answer] = map(samples.__getitem__, keys)
        if self._reading.workers and not isinstance(samples.split, DeviceSplit):
            answers, pins = self._read_ahead(list(keys)), False  # The loader has pinned them.
        for batch, problem, work in answers:
            self.work = work
            if batch is None:
                assert problem is not None
                raise problem
            if isinstance(problem, UnreadableSampleError):
                self.left_out.append(problem)
            yield _pin(batch) if pins else batch

    def _read_ahead(self, keys: list[Key]) -> Iterator[Answer]:
        if not keys:
            return
        self._order.keys = keys
        if self._loader is None:
            self._loader = self._make_loader()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            # It unblocks some of them when it has started.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
            answers = iter(self._loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._workers = answers
        try:
            yield from answers
        except (RuntimeError, OSError, EOFError) as error:  # As torch notices it first.
            seconds = GRACE if isinstance(error, RuntimeError) else LONGEST_GRACE
            if death := _describe_death(answers, seconds):
                raise MpiddpError(death) from error
            raise

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers._shutdown_workers()
        self._loader = self._workers = None

    def _make_loader(self) -> DataLoader[Answer]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        return DataLoader(
            self._samples,
            batch_size=None,
            sampler=self._order,
            num_workers=self._reading.workers,
            collate_fn=_keep,
            pin_memory=self._reading.pins,
            worker_init_fn=_begin_worker,
            multiprocessing_context=context,
            # A loader draws a number whenever it begins; not from the generator that dropout uses,
            # whose state would depend on how often a run was interrupted.
            generator=torch.Generator(),
            persistent_workers=True,
        )


def _pin(batch: Batch) -> Batch:
    if batch.device.type != "cpu":
        return batch
    inputs, targets = (map_leaves(torch.Tensor.pin_memory, each) for each in batch[:2])
    return batch._replace(inputs=inputs, targets=targets)


class _Order(Sampler[Key]):
    def __init__(self) -> None:
        self.keys: list[Key] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys)


def _keep(answer: Any) -> Any:
    return answer


def _begin_worker(number: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    rank = multiprocessing.parent_process()
    assert rank is not None and rank.pid is not None
    write_for(rank.pid)
    for wait in (rank.join, partial(_wait_for_order, rank.pid)):
        threading.Thread(target=_end_after, args=(wait,), daemon=True).start()


def _wait_for_order(rank: int) -> None:
    """Return once the rank, and not a cluster that asks the whole job to leave, has sent TERM."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass


def _end_after(wait: Callable[[], object]) -> None:
    wait()
    os.kill(os.getpid(), signal.SIGKILL)


def _describe_death(answers: Any, seconds: float) -> str:
    """Which worker of a loader has died; empty if none has after so long."""
    multiprocessing.connection.wait([worker.sentinel for worker in answers._workers], seconds)
    for number, worker in enumerate(answers._workers):
        code = worker.exitcode
        if code is not None:
            name = f"data worker {number} of {len(answers._workers)} (process {worker.pid})"
            how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"code {code}"
            return (
                f"{name} ended with {how}; if memory runs out, the kernel kills processes: try "
                "fewer --workers"
            )
    return ""
