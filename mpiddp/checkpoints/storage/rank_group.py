"""Small collective calls among all ranks, over a separate process group.

Values go as pickles over Gloo, which authenticates nobody: only what `unpickling` allows is
unpickled.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpiddp.checkpoints.storage import unpickling
from mpiddp.torch_internals import add_prefix, find_default_store

LONGEST_CALL = timedelta(minutes=30)
"""A rank that has written its files may have to wait for one whose disk is slow."""


class RankGroup:
    """All ranks of a job, in calls over a separate group, which a thread may make.

    The calls have the names and meanings of `mpiddp.launch.mpi.control.ControlChannel`, which makes
    them over MPI. Values consist of None, bools, numbers, strings, tuples, lists and dicts, and of
    what `unpickling` lists. Made without torch.distributed's default group, the process is alone.

    The group is not one of torch.distributed's list: ``destroy_process_group()`` leaves it open, so
    that a save that has begun can end.
    """

    def __init__(self) -> None:
        """Collective."""
        self.group: Any = None
        self.rank, self.size = 0, 1
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if self.size > 1:
                self.group = _make_group(self.rank, self.size)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Collective."""
        if self.size == 1:
            return [value]
        own, lengths = self._prepare(value)
        found = self._gather_all(own)
        return [_unpack(*each) for each in zip(found, lengths, strict=True)]

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, on rank 0; an empty list on others. Collective."""
        if self.size == 1:
            return [value]
        own, lengths = self._prepare(value)
        found = [torch.empty_like(own) for _ in lengths] if self.rank == 0 else []
        self.group.gather([found] if found else [], [own], dist.GatherOptions()).wait()
        return [_unpack(*each) for each in zip(found, lengths, strict=False)]

    def scatter(self, values: list[Any]) -> Any:
        """This rank's one of rank 0's values. Collective."""
        if self.size == 1:
            return values[0]
        contents = [_pack(each) for each in values] if self.rank == 0 else []
        lengths = torch.tensor([len(each) for each in contents] or [0] * self.size)
        self._send_first(lengths)
        longest = int(lengths.max())
        own = torch.empty(longest, dtype=torch.uint8)
        padded = [_pad(each, longest) for each in contents]
        self.group.scatter([own], [padded] if padded else [], dist.ScatterOptions()).wait()
        return _unpack(own, int(lengths[self.rank]))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value. Collective."""
        if self.size == 1:
            return value
        content = _pack(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(content)])
        self._send_first(length)
        if self.rank != 0:
            content = torch.empty(int(length), dtype=torch.uint8)
        self._send_first(content)
        return value if self.rank == 0 else _unpack(content, len(content))

    def close(self) -> None:
        """Not collective: others can finish the last call. Later ones of several ranks fail."""
        self.group = None

    def _send_first(self, tensor: torch.Tensor) -> None:
        """Give all ranks rank 0's contents of ``tensor``."""
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def _gather_all(self, own: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(own) for _ in range(self.size)]
        self.group.allgather([found], [own]).wait()
        return found

    def _prepare(self, value: Any) -> tuple[torch.Tensor, list[int]]:
        """This rank's value, as long as the longest, and all ranks' lengths. Collective."""
        own = _pack(value)
        lengths = [int(each) for each in self._gather_all(torch.tensor([len(own)]))]
        return _pad(own, max(lengths)), lengths


def _make_group(rank: int, size: int) -> dist.ProcessGroupGloo:
    """Gloo between all ranks. Collective: all ranks make as many of them, in the same order."""
    store = find_default_store()
    number = store.add(f"mpiddp/ranks/{rank}", 1)
    prefixed = add_prefix(f"mpiddp/ranks/{number}", store)
    return dist.ProcessGroupGloo(prefixed, rank, size, LONGEST_CALL)


def _pack(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _pad(content: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(content, (0, length - len(content)))


def _unpack(content: torch.Tensor, length: int) -> Any:
    return unpickling.load(content[:length].numpy().tobytes())
