"""The examples in the docstrings of the public names, run on ranks of a pool, or alone."""

import inspect
import math
import textwrap
import time
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import mpiddp
import wrong_algorithms
from mpiddp.launch.session import find_session
from mpiddp.schedules.registry import register

STARTS = ("run", "errors.LaunchError", "Session", "errors.UnreachableError", "init")
"""Names whose examples start a launch."""
CALLS = ("ranks", "errors.RankFailedError", "Ranks", "errors.RemoteError")
"""Names whose examples call ranks, which may be those of a pool."""


def list_names() -> list[str]:
    """The public names: those on top, and those of its modules with a dot."""
    modules = ("errors", "training")
    top = [name for name in mpiddp.__all__ if name not in modules]
    inner = [(each, name) for each in modules for name in getattr(mpiddp, each).__all__]
    return [*top, *(f"{each}.{name}" for each, name in inner if name not in top), "models"]


def find_examples(name: str) -> list[str]:
    """The indented paragraphs of a docstring."""
    paragraphs = inspect.getdoc(attrgetter(name)(mpiddp)).split("\n\n")
    return [textwrap.dedent(each) for each in paragraphs if each.startswith("    ")]


def run(session: mpiddp.Session | None, *names: str, ranks: mpiddp.Ranks | None = None) -> None:
    """Run the examples of these names, each with what it takes for granted."""
    with wrong_algorithms.registered():
        register("my-own")(wrong_algorithms.double)
        for name in names:
            for example in find_examples(name):
                exec(example, {**make_variables(session), "ranks": ranks})


def make_variables(session: mpiddp.Session | None) -> dict[str, Any]:
    """What examples name without saying where it comes from."""
    net = torch.nn.Linear(3, 2)
    tensors = ("gradients", "loss", "parameters", "tensor")
    return {
        **{name: torch.ones(4) for name in tensors},
        "DistributedDataParallel": DistributedDataParallel,
        "Net": build,
        "Path": Path,
        "algorithm": "rong",
        "batches": range(3),
        "checkpointer": SimpleNamespace(restore=lambda: None),
        "compute": lambda batch, gradients: gradients.fill_(batch),
        "model": net,
        "mpiddp": mpiddp,
        "net": net,
        "optimizer": torch.optim.SGD(net.parameters()),
        "session": session,
        "steps": 500,
        "time": time,
        "torch": torch,
        "train": lambda *step, **options: None,
        "trainer": SimpleNamespace(
            steps=list,
            model=net,
            predict=net.__class__(10, 2),
            fit=lambda: SimpleNamespace(
                epoch=1, loss=0.1, accuracy=1.0, test_loss=0.2, test_accuracy=1.0
            ),
        ),
        "weights": mpiddp.models.convnet().state_dict(),
    }


def build(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), classes))


if __name__ == "__main__":
    for name in STARTS:
        run(None, name)
        if (left := find_session()) is not None:
            left.close()
