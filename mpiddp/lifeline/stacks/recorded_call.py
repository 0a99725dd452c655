"""A collective that a rank has called, as it is told from the rank to whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

OWN_GROUP = "mpiddp"
"""In place of a group, for the collectives of `mpiddp.all_reduce` and the like."""
DEFAULT = "0"
"""The name of torch's default group."""


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One of a rank's last collectives."""

    backend: str
    group: str
    """The group's name, alike on all its ranks."""
    number: int
    """In its group, counted from 1 alike on all ranks."""
    name: str = ""
    """``all_reduce``; empty if it is not known."""
    shapes: Sequence[Sequence[int]] = ()
    """Of the tensors that the rank gives."""
    type: str = ""
    is_message: bool = False
    """Whether it is one between two ranks, which are counted for themselves."""
    is_complete: bool = False
    seconds: float | None = None
    """Since it was called."""
    members: Sequence[int] = ()
    """The ranks of the group; empty for all of the job."""

    @property
    def key(self) -> tuple[str, str]:
        """Of the group: two backends of one count for themselves."""
        return self.backend, self.group

    @property
    def title(self) -> str:
        """``all_reduce 57``, with the group if it is not the default one."""
        if self.group == OWN_GROUP:
            return f"mpiddp.{self.name or 'call'} {self.number}"
        where = "" if self.group == DEFAULT else f" of group {self.group}"
        return f"{self.name} {self.number}{where}"

    @property
    def content(self) -> str:
        """``4,096 float32``; empty if there is none, as in a barrier."""
        sizes = [prod(shape) for shape in self.shapes]
        tensors = f"{len(sizes)} tensors, " if len(sizes) > 1 else ""
        return f"{tensors}{sum(sizes):,} {self.type}".rstrip() if sizes else ""

    def pack(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    def describe(self) -> str:
        """One line, for a report."""
        parts = [f"{self.backend}: {self.title}", self.content]
        parts.append("complete" if self.is_complete else "not complete")
        if self.seconds is not None:
            parts.append(f"called {self.seconds:.1f} s ago")
        return ", ".join(filter(None, parts))
