"""Messages over torch.distributed's point-to-point calls: Gloo between CPUs, NCCL between GPUs.

On GPUs nothing here waits on the host: a finished receive means that the current stream waits
for it, and additions are queued behind it on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed

from mpiddp.collectives.compiler.instructions import ProgramMessage, RankProgram
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.collectives.transport import Describe
from mpiddp.collectives.transport.operators import Action, View
from mpiddp.errors import PeerLostError

LONGEST_MESSAGE = 1 << 30
"""Bytes; Gloo and NCCL take more, but not on every transport below them."""
TAGS = 1 << 30
"""Gloo has 32 bits for them; NCCL has none."""


class TorchMessages:
    def __init__(
        self, group: Any, tensors: Sequence[torch.Tensor], messages: Sequence[ProgramMessage],
        signature: int, describe: Describe,
    ) -> None:  # fmt: skip
        self._group = group
        self._tensors = tensors
        self._messages = messages
        self._signature = signature
        self._describe = describe
        self._works: list[Any] = [None] * len(messages)

    def start(self, numbers: Sequence[int]) -> Action:
        if numbers and not self._tensors[numbers[0]].is_cpu:
            return self._start_batch(numbers)
        calls = [(number, self._prepare(number)) for number in numbers]

        def start() -> None:
            for number, call in calls:
                self._works[number] = call()

        return start

    def _prepare(self, number: int) -> Callable[[], Any]:
        """Under Gloo, tags tell calls apart."""
        message = self._messages[number]
        call = self._group.send if message.sends else self._group.recv
        tag = (self._signature + message.tag) % TAGS
        return partial(call, [self._tensors[number]], message.peer, tag)

    def _start_batch(self, numbers: Sequence[int]) -> Action:
        """NCCL needs both directions in one batch, for which it has one work."""
        operations = [
            distributed.P2POp(
                distributed.isend if self._messages[number].sends else distributed.irecv,
                self._tensors[number],
                self._messages[number].peer,
                self._group,
            )
            for number in numbers
        ]

        def start() -> None:
            works = distributed.batch_isend_irecv(operations)
            for place, number in enumerate(numbers):
                self._works[number] = works[place] if len(works) == len(numbers) else works[0]

        return start

    def finish(self, number: int) -> Action:
        """Waits for this one; on a GPU, lets the current stream wait."""
        return partial(self._finish, number)

    def _finish(self, number: int) -> None:
        try:
            self._works[number].wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLostError(
                f"{self._describe(self._messages[number])}: it is gone, or it did not make the "
                f"same call; MPIDDP_DEBUG=1 compares the calls ({reason})"
            ) from error
        self._works[number] = None


class TorchMessenger:
    """Messages over a process group that is used for nothing else, and stays its owner's."""

    def __init__(self, group: Any) -> None:
        """``group``: a ProcessGroup, or for CPUs one of its backends."""
        self._group = group

    def cut(self, itemsize: int) -> BufferCut:
        """All messages of a step start at once."""
        most = LONGEST_MESSAGE // itemsize
        return BufferCut(cell=most, message=most, flows=False)

    def bind(
        self, program: RankProgram, views: Sequence[View], signature: int, describe: Describe
    ) -> TorchMessages:
        """Prepare the operations."""
        tensors = [_as_bytes(view) for view in views]
        return TorchMessages(self._group, tensors, program.messages, signature, describe)

    def progress(self) -> None:
        """Gloo and NCCL have threads and streams of their own."""

    def close(self) -> None:
        """Nothing is held but the group, which is its owner's."""


def _as_bytes(view: View) -> torch.Tensor:
    # As bytes, since not every type that is moved is one that torch sends.
    if isinstance(view, np.ndarray):
        return torch.from_numpy(view.view(np.uint8))
    tensor: torch.Tensor = view
    return tensor.view(torch.uint8)
