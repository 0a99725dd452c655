"""A small decoder-only transformer.

As GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019): normalisation
before attention and before the perceptron, learned positions, GELU.
"""

from __future__ import annotations

import torch
from torch import nn

WIDTH, LAYERS, HEADS = 128, 4, 4
DEVIATION = 0.02
"""Of initial weights."""


class Transformer(nn.Module):
    """Scores each value that may follow each place of a sequence, from what stands before it."""

    def __init__(self, values: int, length: int) -> None:
        """
        Args:
            values: how many different ones there are.
            length: the longest sequence.
        """
        super().__init__()
        self.embedding = nn.Embedding(values, WIDTH)
        self.positions = nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, values, bias=False)
        self.apply(_initialise)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """From (samples, length), int64, to (samples, values, length)."""
        places = torch.arange(sequences.shape[1], device=sequences.device)
        hidden = self.embedding(sequences) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.scores(self.norm(hidden))
        return scores.transpose(1, 2)


class Block(nn.Module):
    """Attention to the places before, then a perceptron; both add to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shape (samples, length, width), as is the result."""
        samples, length, _ = hidden.shape
        parts = self.queries_keys_values(self.attention_norm(hidden))
        heads = parts.view(samples, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads.unbind()
        found = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.projection(found.transpose(1, 2).reshape(samples, length, WIDTH))
        result: torch.Tensor = hidden + self.perceptron(hidden)
        return result


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
