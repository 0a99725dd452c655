"""Models with a parameter of some kind, trained in every way."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

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

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(5, self.first.in_features, generator=generator)


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


def __getattr__(kind: str) -> Any:
    """A function that builds the model of a kind, as ``--model`` names it."""
    if kind.startswith("_"):
        raise AttributeError(kind)
    return partial(build, kind)
