"""Hangs in its third step, by the fault of one rank: arguments say how, and who makes the calls."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import mpiddp

CULPRIT, STEP, BATCH, WIDTH = 1, 2, 4, 8
LIMIT = 600.0
"""Seconds after which a rank would go on."""


def is_culprit(step: int) -> bool:
    return int(os.environ["RANK"]) == CULPRIT and step == STEP


def sleep() -> None:
    time.sleep(LIMIT)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def crash() -> None:
    print("gone", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def outlive() -> None:
    """Be killed after a forked child has crashed."""
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGSEGV)
    os.waitpid(child, 0)
    print("gone", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


BEFORE = {"sleeps": sleep, "stopped": stop, "crashes": crash, "outlives": outlive}
"""What the culprit does before it calls the step's collective, by the kind of its fault."""


class Samples(Dataset):
    """Of which one takes long in the culprit's data worker."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.read = 0

    def __len__(self) -> int:
        return 15 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kind == "worker" and is_culprit(self.read // BATCH):
            sleep()
        self.read += 1
        return torch.full((WIDTH,), float(index))


def follow(
    kind: str, call: Callable[[torch.Tensor], object], another: Callable[..., object]
) -> Iterator[None]:
    """Make steps, each of a call, with the fault in one of them; yields after each."""
    for step, batch in enumerate(DataLoader(Samples(kind), BATCH, num_workers=kind == "worker")):
        fault = kind if is_culprit(step) else ""
        BEFORE.get(fault, int)()
        if fault != "skips":
            call(batch)
        if fault == "other":
            another(torch.ones(7), src=CULPRIT)
        yield


def train_by_ddp(kind: str) -> None:
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, 100))
    for _ in follow(kind, lambda batch: model(batch).sum().backward(), distributed.broadcast):
        distributed.all_reduce(torch.ones(4096))


def call_own(kind: str) -> None:
    with mpiddp.init():
        for _ in follow(kind, lambda _: mpiddp.all_reduce(torch.ones(4096)), mpiddp.broadcast):
            mpiddp.all_reduce(torch.ones(1000))


if __name__ == "__main__":
    {"ddp": train_by_ddp, "own": call_own}[sys.argv[2]](sys.argv[1])
