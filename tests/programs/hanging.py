"""Hangs in its third step, by the fault of one rank: arguments say how, and who makes the calls."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import mpiddp
from mpiddp.training import DataSet, Task

CULPRIT, STEP, BATCH, WIDTH = 1, 2, 4, 8
KIND = "HANGING_KIND"
LIMIT = 600.0
"""Seconds after which a rank would go on."""


def is_culprit(step: int) -> bool:
    return int(os.environ["RANK"]) == CULPRIT and step == STEP


def plant(kind: str, step: int) -> None:
    """Do what the culprit does before it calls the step's collective."""
    if is_culprit(step):
        ways = {"sleeps": sleep, "stopped": stop, "crashes": crash, "outlives": outlive}
        ways.get(kind, int)()


def sleep() -> None:
    end = time.monotonic() + LIMIT
    # A signal may end a sleep.
    while time.monotonic() < end:
        time.sleep(1)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def outlive() -> None:
    """Be killed after a forked child has crashed."""
    child = os.fork()
    if not child:
        crash()
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGKILL)


class Samples(Dataset):
    """Of which one takes long in the culprit's data worker."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.read = 0

    def __len__(self) -> int:
        return 15 * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.kind == "worker" and is_culprit(self.read // BATCH):
            sleep()
        self.read += 1
        return torch.full((WIDTH,), float(index)), index % 2


def read(kind: str):
    """Batches with the numbers of their steps."""
    return enumerate(DataLoader(Samples(kind), BATCH, num_workers=kind == "worker"))


def train_by_ddp(kind: str) -> None:
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, 100))
    for step, (batch, _) in read(kind):
        plant(kind, step)
        if not (kind == "skips" and is_culprit(step)):
            model(batch).sum().backward()
        if kind == "other" and is_culprit(step):
            distributed.broadcast(torch.ones(7), src=CULPRIT)
        distributed.all_reduce(torch.ones(4096))


def call_own(kind: str) -> None:
    with mpiddp.init():
        for step, _ in read(kind):
            plant(kind, step)
            if not (kind == "skips" and is_culprit(step)):
                mpiddp.all_reduce(torch.ones(4096))
            if kind == "other" and is_culprit(step):
                mpiddp.broadcast(torch.ones(7), src=CULPRIT)
            mpiddp.all_reduce(torch.ones(1000))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 2)
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            kind = os.environ[KIND]
            plant(kind, self.step)
            if kind == "other" and is_culprit(self.step):
                distributed.broadcast(torch.ones(7), src=CULPRIT)
            elif not (kind == "skips" and is_culprit(self.step)):
                distributed.all_reduce(torch.ones(9))
            self.step += 1
        return self.layer(inputs)


def make_task() -> Task:
    """For ``--task hanging:make_task``."""
    samples = Samples(os.environ[KIND])
    return Task(model=Model, data=lambda: DataSet(samples, samples, 2))


if __name__ == "__main__":
    {"ddp": train_by_ddp, "own": call_own}[sys.argv[2]](sys.argv[1])
