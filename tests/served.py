"""A program for the ranks of a job: parameter servers train a small model.

Arguments: steps, bound (or none), servers, colocated or dedicated, seconds that a step may be
delayed by at most; and, for a job that is to be lost, a rank, what happens to it, and the seconds
after which the others give up. Every rank reports how far its weights are from those of one process
alone that takes all workers' samples in each step, and from those of DDP where all ranks are
workers; every server, how stale gradients were.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from mpiddp.launch.failure import WayOut
from mpiddp.launch.session import Options
from mpiddp.launch.startup import start
from mpiddp.sync.serving import Serving, assign_roles
from ranks import write_report

RATE = 0.05
SOON = 0.2
"""Seconds; a good number of steps."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 7))


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def draw(samples: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(9, 40, generator=samples), torch.randint(0, 7, (9,), generator=samples)


def find_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_alone(workers: int, steps: int) -> torch.Tensor:
    """What synchronous servers must come to."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    sources = [torch.Generator().manual_seed(place) for place in range(workers)]
    for _ in range(steps):
        optimizer.zero_grad()
        for samples in sources:
            find_loss(model, draw(samples)).backward()
        for parameter in model.parameters():
            parameter.grad /= workers
        optimizer.step()
    return flatten(model)


def train_framework(rank: int, steps: int) -> torch.Tensor:
    """What DDP comes to, without any hook."""
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = make_optimizer(model.parameters())
    samples = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        find_loss(model, draw(samples)).backward()
        optimizer.step()
    return flatten(model)


def flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def measure_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one of any parameter, by the largest parameter."""
    return float((found - expected).abs().max() / expected.abs().max())


def lose(how: str) -> None:
    """This rank is killed, or stops."""
    Path("failed").write_text(str(time.time()))
    os.kill(os.getpid(), {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}[how])


def main() -> None:
    steps, count, delay = int(sys.argv[1]), int(sys.argv[3]), float(sys.argv[5])
    bound = None if sys.argv[2] == "none" else int(sys.argv[2])
    victim = int(sys.argv[6]) if len(sys.argv) > 6 else None
    with WayOut() as way_out, start(Options(timeout=20), way_out) as session:
        torch.set_num_threads(1)
        rank = session.world.rank
        roles = assign_roles(session.world.size, count, dedicated=sys.argv[4] == "dedicated")
        model = make_model()
        if victim is not None:
            session._timeout = float(sys.argv[8])
        serving = Serving(
            session, roles, model, make_optimizer, lambda step: RATE, bound, way_out.fail
        )
        session.comm.Barrier()
        if rank in roles.workers:
            samples = torch.Generator().manual_seed(roles.workers.index(rank))
            dice = random.Random(rank)
            for step in range(steps):
                if rank == victim and step == 20:
                    lose(sys.argv[7])
                batch = draw(samples)
                serving.begin_step()
                find_loss(model, batch).backward()
                if delay:
                    time.sleep(delay * dice.random() ** 3)
                serving.finish_step()
        elif rank == victim:
            time.sleep(SOON)
            lose(sys.argv[7])
        serving.settle()
        found = flatten(model)
        digests = session.gather(found.numpy().tobytes())
        expected = train_alone(len(roles.workers), steps)
        report = {
            "same": len(set(digests)) == 1,
            "difference": measure_difference(found, expected),
            "staleness": {str(late): times for late, times in serving.staleness.items()},
            "workers": len(roles.workers),
        }
        if len(roles.workers) == session.world.size:
            framework = train_framework(rank, steps)
            report["from_framework"] = measure_difference(found, framework)
        serving.close()
        write_report(Path.cwd(), session, report)


if __name__ == "__main__":
    main()
