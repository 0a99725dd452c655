"""Ways from one rank's memory to another's.

A transport carries messages (`Messenger`), lets ranks of a node work in each other's memory
(`node_memory.NodeMemory`), or does both: one inside nodes, the other between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mpiddp.collectives.compiler.instructions import ProgramMessage, RankProgram
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.collectives.transport.operators import Action, View

Describe = Callable[[ProgramMessage], str]
"""Says for which rank and in which step a rank waits, for errors."""


class BoundMessages(Protocol):
    """The messages of one program, bound to memory: sending them allocates nothing.

    Their resources are released with the last reference to them.
    """

    def start(self, numbers: Sequence[int]) -> Action:
        """Starts these, all at once."""

    def finish(self, number: int) -> Action:
        """Waits for this one. Raises PeerLostError if it never ends."""


class Messenger(Protocol):
    def cut(self, itemsize: int) -> BufferCut:
        """How long messages may be, for elements of ``itemsize`` bytes."""

    def bind(
        self, program: RankProgram, views: Sequence[View], signature: int, describe: Describe
    ) -> BoundMessages:
        """Prepare the messages of a program, from and into these views.

        Messages of calls with another signature do not match these, if the transport can
        tell them apart.
        """

    def progress(self) -> None:
        """Let messages under way go on, while this rank waits for something else."""

    def close(self) -> None:
        """Give back what all messages hold; none of them is used any more."""
