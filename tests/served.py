"""A program for the ranks of a job: parameter servers train a small model.

Arguments: steps, bound (or none), servers, colocated or dedicated, seconds that a step may be
delayed by at most. Every worker reports its weights, and what one process alone comes to that takes
all workers' samples in each step; every server, how stale gradients were.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

import mpiddp
from mpiddp.launch.failure import WayOut
from mpiddp.sync.serving import Serving, assign_roles
from ranks import write_report

RATE = 0.05


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
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main() -> None:
    steps, count, delay = int(sys.argv[1]), int(sys.argv[3]), float(sys.argv[5])
    bound = None if sys.argv[2] == "none" else int(sys.argv[2])
    with WayOut() as way_out, mpiddp.init(timeout=20) as session:
        torch.set_num_threads(1)
        rank = session.world.rank
        roles = assign_roles(session.world.size, count, dedicated=sys.argv[4] == "dedicated")
        model = make_model()
        serving = Serving(
            session, roles, model, make_optimizer, lambda step: RATE, bound, way_out.fail
        )
        if rank in roles.workers:
            samples = torch.Generator().manual_seed(roles.workers.index(rank))
            dice = random.Random(rank)
            for _ in range(steps):
                batch = draw(samples)
                serving.begin_step()
                find_loss(model, batch).backward()
                if delay:
                    time.sleep(delay * dice.random() ** 3)
                serving.finish_step()
        serving.settle()
        found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        digests = session.gather(found.numpy().tobytes())
        expected = train_alone(len(roles.workers), steps)
        report = {
            "same": len(set(digests)) == 1,
            "difference": float((found - expected).abs().max()),
            "staleness": {str(late): times for late, times in serving.staleness.items()},
            "workers": len(roles.workers),
        }
        serving.close()
        write_report(Path.cwd(), session, report)


if __name__ == "__main__":
    main()
