"""What the ranks of a pool do on their GPUs; on CPUs, over Gloo, they do the same."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as distributed

import mpiddp
import mpiddp.torch_backend
from mpiddp.launch.session import find_failure_handler
from mpiddp.training.options.config import parse
from mpiddp.training.records.metrics import Row
from mpiddp.training.trainer import train

SLOW_CYCLES = 20_000_000
"""Of a GPU's clock: some 10 ms."""
TRAINING = ("--data", "toy", "--epochs", "1", "--batch-size", "8", "--samples", "256")


def find_backend(session: mpiddp.Session) -> tuple[str, str]:
    return session.backend, session.device.type


def reuse_buffers(session: mpiddp.Session) -> int:
    """Calls on a side stream, each behind a long kernel, on memory that was just given back.

    The host is far ahead of the GPU: a call that touched its buffer on another stream, or let go
    of it too early, would find another turn's numbers. Returns how many results were wrong.
    """
    rank, size = session.world.rank, session.world.size
    on_gpu = session.device.type == "cuda"
    stream = torch.cuda.Stream(session.device) if on_gpu else None
    verdicts = []
    with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
        for turn in range(20):
            for algorithm in ("auto", "ring", "direct"):
                if on_gpu:
                    torch.cuda._sleep(SLOW_CYCLES)
                tensor = torch.full((100_003,), float(rank + turn), device=session.device)
                mpiddp.all_reduce(tensor, algorithm)
                wanted = size * turn + size * (size - 1) // 2
                verdicts.append((tensor != wanted).any())
                del tensor
    return int(torch.stack(verdicts).sum().item())


def come_late(session: mpiddp.Session, seconds: float) -> list[float]:
    """Rank 1 comes later than the others, who wait for it."""
    tensor = torch.full((1000,), 1.0 + session.world.rank, device=session.device)
    if session.world.rank == 1:
        time.sleep(seconds)
    tensor = mpiddp.all_reduce(tensor, "ring", async_op=True).wait()
    group = distributed.new_group()
    distributed.all_reduce(tensor, group=group)
    distributed.destroy_process_group(group)
    return tensor.unique().tolist()


def train_each(session: mpiddp.Session, *options: Sequence[str]) -> list[Row]:
    """Train the same model once with each of these options of the trainer."""
    torch.set_num_threads(1)
    results = []
    for number, words in enumerate(options):
        results.append(_train([*TRAINING, "--name", f"run-{number}", *words], session))
    return results


def resume(session: mpiddp.Session) -> tuple[str | None, str | None]:
    """Digests of the weights: of a whole training, and from its first checkpoint on."""
    words = ["--data", "toy", "--samples", "64", "--deterministic", "--epochs", "3", "--keep", "9"]
    whole = _train([*words, "--name", "whole", "--save-every", "1epoch"], session)
    files = Path("runs/whole/checkpoints").glob("step-*")
    first = min(files, key=lambda each: int(each.name.removeprefix("step-")))
    resumed = _train([*words, "--name", "parts", "--resume", str(first)], session)
    return whole.parameters, resumed.parameters


def _train(words: Sequence[str], session: mpiddp.Session) -> Row:
    return train(parse(words), session, find_failure_handler(session))


def use_backend(session: mpiddp.Session) -> tuple[float, str | None]:
    """The sum of ones of all ranks, on CPUs; and what is said of a tensor on a GPU."""
    group, said = distributed.new_group(backend="mpiddp"), None
    ones = torch.ones(1)
    distributed.all_reduce(ones, group=group)
    if session.device.type == "cuda":
        try:
            distributed.all_reduce(ones.to(session.device), group=group)
        except RuntimeError as error:
            said = str(error)
        assert said is not None, "a tensor on a GPU was taken"
    distributed.destroy_process_group(group)
    return ones.item(), said
