"""Models with a parameter of some kind, trained and restored in every way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpiddp
import trainings
from mpiddp.errors import MpiddpError

LATE = 6
"""Passes, those before the first step included, in which `late` uses all of its parameters."""
LENGTH = 50
"""Of embeddings."""


class Model(nn.Module):
    def __init__(self, kind: str, features: int, classes: int) -> None:
        super().__init__()
        self.kind, self.passes = kind, 0
        self.first = nn.Linear(features, classes)
        odd: Any = nn.Linear(features, classes)
        if kind in ("sparse", "dense"):
            odd = nn.Embedding(LENGTH, classes, sparse=kind == "sparse")
        elif kind == "functional":
            odd = nn.Parameter(torch.randn(LENGTH, classes))
        elif kind == "complex":
            odd = nn.Parameter(torch.randn(features, classes, dtype=torch.complex64))
        elif kind == "empty":
            odd = nn.Parameter(torch.empty(0, 3))
        elif kind == "integer":
            odd = nn.Parameter(torch.arange(3), requires_grad=False)
        elif kind == "mixed":
            odd = odd.double()
            self.narrow = nn.Linear(features, classes).bfloat16()
        elif kind == "frozen":
            odd.requires_grad_(False)
        elif kind == "tied":
            odd.weight = self.first.weight
        elif kind == "meta":
            odd = odd.to("meta")
        self.odd = odd

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        outputs = self.first(inputs)
        places = (10 * inputs[:, :3].abs()).long() % LENGTH
        if self.kind in ("sparse", "dense"):
            return outputs + self.odd(places).mean(1)
        if self.kind == "functional":
            return outputs + nn.functional.embedding(places, self.odd, sparse=True).mean(1)
        if self.kind == "complex":
            return outputs + torch.view_as_real(inputs.to(torch.complex64) @ self.odd).sum(-1)
        if self.kind in ("empty", "integer"):
            return outputs + self.odd.sum()
        if self.kind == "mixed":
            return outputs + self.odd(inputs.double()).float() + self.narrow(inputs.bfloat16())
        if self.kind == "unused" or (self.kind == "late" and self.passes > LATE):
            return outputs
        return outputs + self.odd(inputs)


def build(kind: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    return Model(kind, shape[0], classes)


def train(session: mpiddp.Session, kind: str, ways: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """With the trainer's options of each way: what an error said, or the last row of metrics."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for way, words in ways.items():
        named = [*words, "--name", way, "--model", f"kinds:{kind}"]
        said = ""
        try:
            trainings.run(session, named)
        except MpiddpError as error:
            said = f"{error.exit_code}: {error}"
        session.agree(said, "what was said")
        found[way] = said or trainings.read_rows(Path("runs") / way)[-1]
    return found


def take_steps(
    session: mpiddp.Session | None, folder: Path, kind: str, wrap: str, steps: int
) -> Any:
    """Go on from the newest checkpoint, up to this step; the parameters then."""
    torch.manual_seed(5)
    model: nn.Module = Model(kind, 10, 4)
    if wrap in ("ddp", "synchronized"):
        model = DistributedDataParallel(model, bucket_cap_mb=1e-4)  # type: ignore[arg-type]
    if wrap == "synchronized":
        mpiddp.register_comm_hook(model)  # type: ignore[arg-type]
    elif wrap == "fsdp":
        fully_shard(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    # It takes sparse gradients, and checkpoints hold no sparse momentum.
    optimizer = torch.optim.SGD(trained, 0.1, momentum=0 if kind == "sparse" else 0.9)
    rank = 0 if session is None else session.world.rank
    with mpiddp.Checkpointer(folder, model, optimizer) as checkpointer:
        state = checkpointer.restore() or {"step": 0}
        for step in range(state["step"] + 1, steps + 1):
            samples = torch.Generator().manual_seed(100 * step + rank)
            loss = model(torch.randn(5, 10, generator=samples)).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            checkpointer.save(step)
    return [
        getattr(each, "to_local", each.detach)().detach().clone() for each in model.parameters()
    ]


def find_differences(
    session: mpiddp.Session | None, folder: Path, kinds: Sequence[str], wrap: str
) -> list[str]:
    """The kinds that do not end with the same bits if they go on after one step, and after two."""
    torch.set_num_threads(1)
    different = []
    for kind in kinds:
        whole = take_steps(session, folder / f"{kind}-whole", kind, wrap, 4)
        for steps in (1, 2, 4):
            found = take_steps(session, folder / f"{kind}-cut", kind, wrap, steps)
        if not all(map(torch.equal, whole, found)):
            different.append(kind)
    return different


def __getattr__(kind: str) -> Any:
    """A function that builds the model of a kind, as ``--model`` names it."""
    if kind.startswith("_"):
        raise AttributeError(kind)
    return partial(build, kind)
