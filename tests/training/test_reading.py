"""Batches from worker processes."""

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import launchers
import reading
from mpiddp.errors import MpiddpError
from mpiddp.training.data import reading as readers
from mpiddp.training.data.data_sets import Split
from mpiddp.training.data.reading import BatchReader, BatchReading
from mpiddp.training.data.samples import BatchError, Samples, UnreadableSampleError


def read(workers: int, epoch: int) -> list[torch.Tensor]:
    reader = BatchReader(Samples(reading.Slow(), seed=5), BatchReading(workers))
    return [batch.targets for batch in reader.read(reading.list_keys(epoch))]


def test_workers_read_what_this_process_would(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    state = torch.get_rng_state()
    reader = BatchReader(Samples(reading.Slow(), seed=5), BatchReading(workers=2))
    for epoch in (1, 2):
        batches = list(reader.read(reading.list_keys(epoch)))
        positions = [batch.inputs[:, 0].tolist() for batch in batches]
        assert positions == [key.positions for key in reading.list_keys()]
        # What is drawn for a sample is the same in any process.
        for batch, expected in zip(batches, read(0, epoch), strict=True):
            assert torch.equal(batch.targets, expected)
        workers = {int(each) for batch in batches for each in batch.inputs[:, 1]}
        assert len(workers) == 2 and os.getpid() not in workers
    assert not torch.equal(read(0, 1)[0], read(0, 2)[0])
    assert torch.equal(torch.get_rng_state(), state)
    # Signals that ask a job to leave do not end them, but for one from their rank.
    for name in ("TERM", "USR1", "USR2", "INT"):
        subprocess.run(["kill", f"-{name}", *map(str, workers)], check=True, timeout=100)
    again = list(reader.read(reading.list_keys(3)))
    assert {int(each) for batch in again for each in batch.inputs[:, 1]} == workers
    reader.close()
    assert not any(map(launchers.is_alive, workers))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_are_timed_apart(workers: int) -> None:
    features, labels = np.zeros((40, 1), np.float32), np.zeros(40, np.int64)
    for split, calls in (
        (Split(features, labels, convert=reading.sleep), 1),
        (Split(features, labels, convert=reading.sleep, augment=reading.sleep), 5),
    ):
        reader = BatchReader(Samples(split), BatchReading(workers))
        for _ in reader.read(reading.list_keys(batches=2)):
            read, transform = reader.work
            assert transform >= 0.02 * calls and read > 0
        reader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_told_when_its_batch_is_due(workers: int) -> None:
    reader = BatchReader(Samples(reading.Slow(broken=13)), BatchReading(workers))
    batches = reader.read(reading.list_keys())
    assert [next(batches).inputs[0, 0] for _ in range(3)] == [0, 4, 8]
    with pytest.raises(UnreadableSampleError, match=r"sample 13 cannot be read: OSError") as found:
        next(batches)
    reader.close()
    # Where it came from, also if that was another process.
    assert "reading.py" in "".join(found.value.__notes__)
    reader = BatchReader(
        Samples(reading.Slow(broken=13, longer=38), skips=True), BatchReading(workers)
    )
    batches = reader.read(reading.list_keys())
    assert [len(next(batches).inputs) for _ in range(9)] == [4, 4, 4, 3, 4, 4, 4, 4, 4]
    # One line, also if another process has found it.
    with pytest.raises(BatchError, match=r"^training samples 36, .* make a batch: Run[^\n]*$"):
        next(batches)
    reader.close()
    assert [str(each)[:19] for each in reader.left_out] == ["training sample 13 "]


def test_a_worker_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = BatchReader(Samples(reading.Slow(deadly=22)), BatchReading(workers=2))
    batches, describe_death = reader.read(reading.list_keys()), readers._describe_death
    next(batches)
    server = psutil.Process(_forkserver._forkserver_pid)  # type: ignore[attr-defined]
    server.suspend()
    # If all that the worker had sent has come, nothing but the news tells of its end.
    later = threading.Timer(4 * readers.GRACE, server.resume)
    later.start()

    def describe_soon(*arguments: Any) -> str:
        # The fork server is late with its news.
        threading.Timer(1.2 * readers.GRACE, server.resume).start()
        return describe_death(*arguments)

    monkeypatch.setattr(readers, "_describe_death", describe_soon)
    try:
        said = r"data worker [01] of 2 \(process \d+\) ended with signal 9"
        with pytest.raises(MpiddpError, match=said):
            list(batches)
    finally:
        later.cancel()
        server.resume()
        reader.close()


def test_workers_end_with_their_rank(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "reading"]
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        workers = [int(each) for each in process.stdout.readline().split()]
        are_there = [psutil.pid_exists(each) for each in workers]
        process.kill()
        assert are_there == [True, True]
        launchers.until(lambda: not any(map(launchers.is_alive, workers)), "workers to end")
