"""Small collective calls among all ranks, over a separate process group.

Values go as pickles over Gloo, which authenticates nobody: only what `unpickling` allows is
unpickled.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from mpiddp.training import unpickling


class Ranks:
    """All ranks of a job, in calls over a separate group, which a thread may make.

    Values consist of None, bools, numbers, strings, tuples, lists and dicts, and of what
    `unpickling` lists. Made without torch.distributed's default group, the process is alone.
    """

    def __init__(self) -> None:
        """Collective."""
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if self.size > 1:
                self.group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        if self.group is None:
            return [value]
        own, lengths = self._prepare(value)
        found = [torch.empty_like(own) for _ in lengths]
        dist.all_gather(found, own, group=self.group)
        return [_unpack(*each) for each in zip(found, lengths, strict=True)]

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, on rank 0; an empty list elsewhere. Collective."""
        if self.group is None:
            return [value]
        own, lengths = self._prepare(value)
        found = [torch.empty_like(own) for _ in lengths] if self.rank == 0 else None
        dist.gather(own, found, group=self.group)
        return [_unpack(*each) for each in zip(found or (), lengths, strict=False)]

    def scatter(self, values: list[Any]) -> Any:
        """This rank's one of rank 0's values. Collective."""
        if self.group is None:
            return values[0]
        contents = [_pack(each) for each in values] if self.rank == 0 else []
        lengths = torch.tensor([len(each) for each in contents] or [0] * self.size)
        dist.broadcast(lengths, 0, group=self.group)
        longest = int(lengths.max())
        own = torch.empty(longest, dtype=torch.uint8)
        padded = [_pad(each, longest) for each in contents] if self.rank == 0 else None
        dist.scatter(own, padded, group=self.group)
        return _unpack(own, int(lengths[self.rank]))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value. Collective."""
        if self.group is None:
            return value
        content = _pack(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(content)])
        dist.broadcast(length, 0, group=self.group)
        if self.rank != 0:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, 0, group=self.group)
        return value if self.rank == 0 else _unpack(content, len(content))

    def close(self) -> None:
        """Collective."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _prepare(self, value: Any) -> tuple[torch.Tensor, list[int]]:
        """This rank's value, as long as the longest, and all ranks' lengths. Collective."""
        own = _pack(value)
        found = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([len(own)]), group=self.group)
        lengths = [int(each) for each in found]
        return _pad(own, max(lengths)), lengths


def _pack(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _pad(content: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(content, (0, length - len(content)))


def _unpack(content: torch.Tensor, length: int) -> Any:
    return unpickling.load(content[:length].numpy().tobytes())
