"""Communicators of several ranks as threads of this process: everything but MPI and processes."""

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from in_process import InProcessMessenger, Office, run_threads
from mpiddp.collectives import BOTH, MPI, SHARED
from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.collectives.executor import BoundProgram, Description, Execution, Workspace, bind
from mpiddp.collectives.planner import Layout, Planner
from mpiddp.collectives.transport.node_memory import PRIVATE, Location, NodeMemory, block_size
from mpiddp.collectives.transport.operators import Arithmetic, Operator, make_span
from mpiddp.collectives.transport.shared_memory import SharedMemory
from mpiddp.collectives.transport.waiting import Policy, Waiter
from mpiddp.schedules.schedule import Schedule
from promises import compile_all, group_ranks

SEGMENTS = 1_000_000
"""The most that a rank of a crew makes."""
CALL = 7
"""What the ranks of a team take for the number of their call."""


class Crew:
    """Ranks on nodes, by the number of each rank's node."""

    def __init__(
        self,
        nodes: Sequence[int],
        *,
        can_copy: bool = True,
        longest: int = 1 << 30,
        flows: bool = True,
        seconds: float = 20.0,
        has_nccl: bool = True,
    ) -> None:
        """``longest``: bytes of a message. ``has_nccl``: as in Layout; a crew has none."""
        self.nodes = tuple(nodes)
        waiter, office = Waiter(Policy.YIELD, seconds), Office()
        possible = (BOTH, MPI) if len(set(nodes)) > 1 else (SHARED, MPI)
        absent = {SHARED: "the ranks are on several nodes"} if len(set(nodes)) > 1 else {}
        hosts = tuple(f"host{node}" for node in nodes)
        self.shared_memory = [SharedMemory() for _ in nodes]
        for rank, shared_memory in enumerate(self.shared_memory):
            # They are one process, in which no number is to stand for two segments.
            shared_memory._numbers = itertools.count(1 + SEGMENTS * rank)
        self.blocks = {
            node: self.shared_memory[0].allocate(block_size(nodes.count(node)))
            for node in set(nodes)
        }
        self.node_memories: list[NodeMemory] = []
        self.messengers: list[Callable[[], InProcessMessenger]] = []
        self.communicators: list[Communicator] = []
        for rank, node in enumerate(nodes):
            ranks = [each for each, other in enumerate(nodes) if other == node]
            block, shared_memory = self.blocks[node], self.shared_memory[rank]
            processes = dict.fromkeys(ranks, os.getpid())
            node_memory = NodeMemory(rank, processes, block, waiter, shared_memory, can_copy)
            messenger = partial(InProcessMessenger, office, rank, waiter, longest, flows)
            layout = Layout(rank, hosts, self.nodes, possible, absent, has_nccl=has_nccl)
            planner = Planner(layout, shared_memory, node_memory, {MPI: messenger})
            self.node_memories.append(node_memory)
            self.messengers.append(messenger)
            self.communicators.append(Communicator(planner, waiter))

    def run(self, part: Callable[[int, Communicator], Any]) -> list[Any]:
        """Every rank plays its part; what they return. An exception of one is raised here."""
        results: list[Any] = [None] * len(self.nodes)
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = part(rank, self.communicators[rank])
            except BaseException as error:
                errors.append(error)

        run_threads(work, range(len(results)))
        if errors:
            raise errors[0]
        return results


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
        nodes, dtype = nodes or [1] * schedule.ranks, buffers[0].dtype
        self.programs = compile_all(
            schedule, len(buffers[0]), nodes, BufferCut(cell, message, flows)
        )
        self._crew = Crew([group.start for group in group_ranks(nodes)], flows=flows)
        self._description = Description("test", len(schedule.steps), {})
        arithmetic = Arithmetic(operator, dtype, accumulation or dtype, len(schedule.members))
        self._spans = [make_span(buffer) for buffer in buffers]
        self.workspaces = [Workspace() for _ in buffers]
        self._bindings: list[BoundProgram] = []
        for program, node_memory, messenger, workspace, span in zip(
            self.programs, self._crew.node_memories, self._crew.messengers, self.workspaces,
            self._spans, strict=True,
        ):  # fmt: skip
            peers = {
                peer: node_memory.find_memory(
                    peer, Location(PRIVATE, buffers[peer].data_ptr()), program.count, dtype
                )
                for peer in program.partners
            }
            execution = Execution(
                program, arithmetic, CALL, self._description, messenger(), node_memory, workspace
            )
            self._bindings.append(bind(execution, span, peers))

    def play(self) -> None:
        """Run all ranks to their end; what one raised is raised here."""

        def part(rank: int, _: Communicator) -> None:
            node_memory = self._crew.node_memories[rank]
            node_memory.enter(CALL, None)
            describe = partial(self._description.describe_wait, 0)
            node_memory.meet(self.programs[rank].partners, CALL, describe)
            self._bindings[rank].run()

        self._crew.run(part)
