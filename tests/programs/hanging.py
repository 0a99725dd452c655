"""Hangs in its third step, by the fault of rank 1: arguments say how, and who makes the calls."""

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

CULPRIT, STEP, BATCH = 1, 2, 4
LIMIT = 600.0
"""Seconds after which a rank would go on."""


def plant(kind: str, step: int) -> bool:
    """Do what the culprit does; whether its step is left out."""
    if int(os.environ["RANK"]) != CULPRIT or step != STEP:
        return False
    if kind == "sleeps":
        load_slowly()
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    return kind == "skips"


def load_slowly() -> None:
    end = time.monotonic() + LIMIT
    # A signal may end a sleep.
    while time.monotonic() < end:
        time.sleep(1)


class Samples(Dataset):
    """Of which one takes long in the culprit's data worker."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 5 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        rank = int(os.environ["RANK"])
        if self.kind == "worker" and rank == CULPRIT and index == STEP * BATCH + 1:
            load_slowly()
        return torch.full((8,), float(index))


def train_by_ddp(kind: str) -> None:
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 100))
    for step, batch in enumerate(DataLoader(Samples(kind), BATCH, num_workers=kind == "worker")):
        skips = plant(kind, step)
        if not skips:
            model(batch).sum().backward()
        if kind == "other" and distributed.get_rank() == CULPRIT and step == STEP:
            distributed.broadcast(torch.ones(7), src=CULPRIT)
        distributed.all_reduce(torch.ones(4096))


def call_own(kind: str) -> None:
    with mpiddp.init() as session:
        # After this session's own part.
        for step, _ in enumerate(DataLoader(Samples(kind), BATCH, num_workers=kind == "worker")):
            is_culprit = session.world.rank == CULPRIT and step == STEP
            if not plant(kind, step):
                mpiddp.all_reduce(torch.ones(4096))
            if kind == "other" and is_culprit:
                mpiddp.broadcast(torch.ones(7), src=CULPRIT)
            mpiddp.all_reduce(torch.ones(1000))


if __name__ == "__main__":
    {"ddp": train_by_ddp, "own": call_own}[sys.argv[2]](sys.argv[1])
