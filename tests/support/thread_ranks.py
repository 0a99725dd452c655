"""Runs programs with ranks as threads of this process: over messages, in memory, or both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch

from in_process import InProcessMessenger, Office, run_threads
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.collectives.executor import BoundProgram, Description, Execution, Workspace, bind
from mpiddp.collectives.transport.node_memory import (
    PRIVATE,
    Location,
    MappedMemory,
    NodeMemory,
    PeerMemory,
    block_size,
)
from mpiddp.collectives.transport.operators import (
    Arithmetic,
    MemorySpan,
    Operator,
    make_span,
    map_memory,
)
from mpiddp.collectives.transport.shared_memory import SharedMemory
from mpiddp.collectives.transport.waiting import Policy, Waiter
from mpiddp.schedules.schedule import Schedule
from promises import compile_all, group_ranks

SECONDS = 20.0


class ThreadMemory(NodeMemory):
    """Its peers are threads of this process."""

    def find_memory(
        self, rank: int, location: Location, count: int, dtype: torch.dtype
    ) -> PeerMemory:
        return MappedMemory(MemorySpan(map_memory(location.first, count, dtype), dtype))


class Team:
    """The ranks of a schedule, on nodes that share memory inside; one rank each, if none is named.

    The buffers stay the caller's; ``play`` changes them.
    """

    def __init__(
        self,
        schedule: Schedule,
        buffers: Sequence[torch.Tensor],
        nodes: Sequence[int] | None = None,
        *,
        operator: Operator = Operator.SUM,
        accumulation: torch.dtype | None = None,
        cell: int = 1 << 20,
        message: int = 1 << 20,
        flows: bool = True,
    ) -> None:
        self.schedule = schedule
        self.buffers = buffers
        ranks = schedule.ranks
        dtype = buffers[0].dtype
        arithmetic = Arithmetic(operator, dtype, accumulation or dtype, len(schedule.members))
        self.description = Description("test", len(schedule.steps), {})
        waiter = Waiter(Policy.YIELD, SECONDS)
        office = Office()
        nodes = nodes or [1] * ranks
        self.programs = compile_all(
            schedule, len(buffers[0]), nodes, BufferCut(cell, message, flows)
        )
        self.node_memories: list[NodeMemory] = []
        blocks = {}
        for rank, group in enumerate(group_ranks(nodes)):
            if group not in blocks:
                blocks[group] = SharedMemory().allocate(block_size(len(group)))
            block = blocks[group]
            self.node_memories.append(
                ThreadMemory(
                    rank, dict.fromkeys(group, os.getpid()), block, waiter, SharedMemory(), True
                )
            )
        self.spans = [make_span(buffer) for buffer in buffers]
        self.bindings: list[BoundProgram] = []
        self.workspaces = [Workspace() for _ in range(ranks)]
        for rank, program in enumerate(self.programs):
            peers = {
                peer: self.node_memories[rank].find_memory(
                    peer, Location(PRIVATE, buffers[peer].data_ptr()), len(buffers[peer]), dtype
                )
                for peer in program.partners
            }
            messenger = InProcessMessenger(office, rank, waiter, message, flows)
            self.bindings.append(
                bind(
                    Execution(
                        program, arithmetic, 7, self.description, messenger,
                        self.node_memories[rank], self.workspaces[rank],
                    ),
                    self.spans[rank],
                    peers,
                )
            )  # fmt: skip

    def play(self) -> None:
        """Run all ranks to their end; what one raised is raised here."""
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                node_memory = self.node_memories[rank]
                node_memory.enter(7, None)
                node_memory.meet(
                    self.programs[rank].partners, 7, partial(self.description.describe_wait, 0)
                )
                self.bindings[rank].run()
            except BaseException as error:
                errors.append(error)

        run_threads(work, range(self.schedule.ranks))
        if errors:
            raise errors[0]
