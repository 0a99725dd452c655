"""Parameter servers on the ranks of a pool, or of a job that loses one, train a small model.

Every rank reports how far its weights are from those of one process alone that takes all workers'
samples in each step; every server reports how stale gradients were. As a program its argument is
JSON, a list of ways to train, each a `Way`.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import mpiddp
from mistakes import hear
from mpiddp.launch.mpi.pauses import wait_until
from mpiddp.launch.session import Session, find_failure_handler
from mpiddp.sync.parameter_server.mpi_messages import Wire
from mpiddp.sync.parameter_server.server import Server, UpdateRule
from mpiddp.sync.parameter_server.serving import Serving, assign_roles

RATE = 0.05
SOON = 0.2
SOON_STEPS = 20
"""Seconds, a good number of steps; and steps."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 7))


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, nesterov=True, fused=True)


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


def flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def measure_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one of any parameter, by the largest parameter."""
    return float((found - expected).abs().max() / expected.abs().max())


@dataclass(frozen=True)
class Way:
    """How to train, and who is lost meanwhile."""

    steps: int
    servers: int
    placement: str
    bound: int | None
    delay: float = 0.0
    """Seconds by which a worker's step may be longer."""
    sleeper: int | None = None
    """A rank whose steps are longer, after its first five."""
    sleep: float = 0.0
    sleeps: int = 1
    """How many steps, and by how many seconds each."""
    awaits: bool = False
    """Whether it sleeps in them until another worker has made all of its steps."""
    dtype: str = "float32"
    longest: int | None = None
    """Bytes of an MPI message."""
    victim: int | None = None
    is_stopped: bool = False
    """Whether that rank is stopped soon; else it is late at the end of the epoch."""
    deadline: float = 60.0
    """Seconds after which the others give it up."""
    is_busy: bool = False
    """Whether a server's update takes so long that what comes meanwhile is overdue."""

    def lose(self) -> None:
        Path("failed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)


def work(way: Way, rank: int, place: int, model: nn.Module, serving: Serving) -> None:
    samples = torch.Generator().manual_seed(place)
    dice = random.Random(rank)
    for step in range(way.steps):
        if rank == way.victim and step == SOON_STEPS and way.is_stopped:
            way.lose()
        if rank == way.sleeper and 5 <= step < 5 + way.sleeps:
            time.sleep(way.sleep)
            assert not way.awaits or wait_until(Path("done").exists, 60)
        batch = draw(samples)
        serving.begin_step()
        find_loss(model, batch).backward()
        # Most are small, and some are not.
        time.sleep(way.delay * dice.random() ** 3)
        serving.finish_step()
    if way.awaits:
        Path("done").touch()


def miss(victim: int, session: Session, serving: Serving) -> str:
    """What a rank says of the victim at the end of the epoch; the victim comes after that."""
    rank, wire, said = session.world.rank, serving._wire, ""
    if rank == victim:
        if serving._worker is not None:
            serving._worker.finish_epoch()
        count = session.world.size - 1
        assert wait_until(lambda: len(list(Path().glob("missed-*"))) == count, 60, 0.01)
        serving._meet("", lambda: True)
    else:
        serving._wire = replace(wire, timeout=SOON)
        said = hear(serving.finish_epoch)
        serving._wire = wire
        Path(f"missed-{rank}").touch()
    # Within it MPI goes on with the barrier that the others have given up.
    session.comm.Barrier()
    return said


def keep_busy(server: Server, seconds: float) -> None:
    """Have one of the first updates last until all others' gradients have come, and ``seconds``."""
    update, skipped = server.update, 0.0
    server._deadlines._now = lambda: time.monotonic() + skipped

    def update_slowly(*arguments: Any) -> None:
        nonlocal skipped
        missing = [each for each in server._receives.values() if not each.test()]
        if missing and not skipped and server.clock.updates < SOON_STEPS:
            assert wait_until(lambda: all(each.test() for each in missing), 30)
            skipped = seconds
        update(*arguments)

    server.update = update_slowly


def train(way: Way, session: Session) -> dict[str, object]:
    rank = session.world.rank
    roles = assign_roles(session.world.size, way.servers, dedicated=way.placement == "dedicated")
    torch.set_default_dtype(getattr(torch, way.dtype))
    model = make_model()
    os.environ.pop("MPIDDP_MESSAGE_BYTES", None)
    if way.longest is not None:
        os.environ["MPIDDP_MESSAGE_BYTES"] = str(way.longest)
    make_wire = Serving._make_wire

    def make_own_wire(serving: Serving, session: Session) -> Wire:
        # Other calls keep their time-out: ranks begin, and check results, when they can.
        return replace(make_wire(serving, session), timeout=way.deadline)

    with mock.patch.object(Serving, "_make_wire", make_own_wire):
        serving = Serving(
            session, roles, model, UpdateRule(make_optimizer, lambda step: RATE, way.bound),
            find_failure_handler(session).fail,
        )  # fmt: skip
    if way.is_busy and serving._server is not None:
        keep_busy(serving._server, way.deadline)
    session.comm.Barrier()
    if rank in roles.workers:
        work(way, rank, roles.workers.index(rank), model, serving)
    elif rank == way.victim and way.is_stopped:
        time.sleep(SOON)
        way.lose()
    is_late = way.victim is not None and not way.is_stopped
    said = miss(way.victim, session, serving) if is_late else serving.finish_epoch()
    serving.settle()
    serving.close()
    found = flatten(model)
    digests = session.gather(found.view(torch.uint8).numpy().tobytes())
    return {
        "same": len(set(digests)) == 1,
        "difference": measure_difference(found, train_alone(len(roles.workers), way.steps)),
        "staleness": {str(late): times for late, times in serving.staleness.items()}, "said": said,
    }  # fmt: skip


def run(session: Session, ways: list[dict[str, Any]]) -> list[dict[str, object]]:
    torch.set_num_threads(1)
    return [train(Way(**each), session) for each in ways]


def main() -> None:
    with mpiddp.init(timeout=60) as session:
        run(session, json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
