"""A small decoder that generates tokens, batch 1, its weights split over the ranks of a group.

Each rank has some of the attention's heads and a part of the inner width, and the ranks add what
they found twice in each block (Shoeybi et al., "Megatron-LM", arXiv:1909.08053). Keys and values
of earlier tokens are kept. Nothing in it knows of mpiddp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from mpiddp.errors import ConfigurationError

BLOCKS, WIDTH, INNER, HEADS = 6, 256, 1024, 8
WORDS, LENGTH = 512, 64
"""In the vocabulary; of a text, behind which the next one begins."""
SPLIT = {"query": 0, "key": 0, "value": 0, "out": 1, "up": 0, "down": 1}
"""Of each weight of a block, what is split: 0 for its outputs, 1 for its inputs."""

Add = Callable[[torch.Tensor], torch.Tensor]
"""The sum of the ranks' tensors."""


class Block(nn.Module):
    """Attention, and a perceptron of one inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_inner = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.add: Add = lambda partial: partial  # Of one rank.

    def split(self, part: int, parts: int, add: Add) -> None:
        """Keep this rank's part of each weight."""
        self.add = add
        for name, dim in SPLIT.items():
            layer = self.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            layer.weight = nn.Parameter(layer.weight.detach().chunk(parts, dim)[part].clone())

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Of the token at ``place``: ``x`` is (1, WIDTH). ``cache``: keys and values, (2, this
        rank's heads, LENGTH, WIDTH / HEADS)."""
        normal = self.before_attention(x)
        query, key, value = (
            each(normal).view(-1, 1, WIDTH // HEADS) for each in (self.query, self.key, self.value)
        )
        cache.index_copy_(2, place, torch.stack((key, value)))
        found = nn.functional.scaled_dot_product_attention(query, cache[0], cache[1], mask)
        x = x + self.add(self.out(found.view(1, -1)))
        inner = nn.functional.gelu(self.up(self.before_inner(x)))
        return x + self.add(self.down(inner))


class Decoder(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(
        self, word: torch.Tensor, place: torch.Tensor, mask: torch.Tensor, caches: torch.Tensor
    ) -> torch.Tensor:
        x = self.words(word) + self.places(place)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, place, mask)
        logits: torch.Tensor = self.head(self.last(x))
        return logits


def make_mesh(group: distributed.ProcessGroup) -> DeviceMesh:
    # Its name tells it from other groups' meshes of the same ranks, whose layouts torch would take.
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))


def split_by_hand(model: Decoder, group: distributed.ProcessGroup) -> None:
    """As inference servers do it."""

    def add(partial: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(partial, group=group)
        return partial

    _split_blocks(model, group, add)


def split_compiled(model: Decoder, group: distributed.ProcessGroup) -> None:
    """With functional collectives, which torch.compile follows: the model is one graph."""
    _split_blocks(model, group, lambda partial: functional.all_reduce(partial, "sum", group))
    model.compile()


def split_by_tensors(model: Decoder, group: distributed.ProcessGroup) -> None:
    """With weights that are DTensors."""
    plan: dict[str, ParallelStyle] = {
        f"blocks.*.{name}": RowwiseParallel() if dim else ColwiseParallel()
        for name, dim in SPLIT.items()
    }
    parallelize_module(model, make_mesh(group), plan)


def _split_blocks(model: Decoder, group: distributed.ProcessGroup, add: Add) -> None:
    for block in model.blocks:
        assert isinstance(block, Block)
        block.split(group.rank(), group.size(), add)


Split = Callable[[Decoder, distributed.ProcessGroup], None]


class Generation:
    """A token in each step; see `worker.SteppedProgram`."""

    def __init__(
        self, group: distributed.ProcessGroup | None, ranks: int, seed: int, split: Split
    ) -> None:
        """Raises ConfigurationError if the heads cannot be split."""
        if HEADS % ranks:
            raise ConfigurationError(f"{HEADS} heads cannot be split over {ranks} ranks")
        self._model, parts = Decoder(seed), 1
        if group is not None:
            split(self._model, group)
            parts = group.size()
        self._caches = torch.zeros(BLOCKS, 2, HEADS // parts, LENGTH, WIDTH // HEADS)
        self._places = torch.arange(LENGTH)
        self._masks = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self._word = torch.zeros(1, dtype=torch.int64)
        self._logits = torch.zeros(1, WORDS)
        self._steps = 0

    def step(self) -> None:
        place = self._steps % LENGTH
        here = slice(place, place + 1)
        word = self._word if place else torch.zeros_like(self._word)
        with torch.inference_mode():
            self._logits = self._model(word, self._places[here], self._masks[here], self._caches)
            self._word = self._logits.argmax(dim=1)
        self._steps += 1

    def look(self) -> torch.Tensor:
        """The last token's logits, which all tokens before it decide."""
        return self._logits.flatten()
