"""Small collective calls among all ranks, over a separate process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Ranks:
    """All ranks of a job, in calls over a separate group, which a thread may make.

    Made without torch.distributed's default group, the process is alone.
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
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, on rank 0; an empty list elsewhere. Collective."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(value, found or None, group=self.group)
        return found

    def scatter(self, values: list[Any]) -> Any:
        """This rank's one of rank 0's values. Collective."""
        if self.group is None:
            return values[0]
        box = [None]
        dist.scatter_object_list(box, values if self.rank == 0 else None, group=self.group)
        return box[0]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value. Collective."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self.group)
        return box[0]

    def close(self) -> None:
        """Collective."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
