"""Communicators of several ranks as threads of this process: everything but MPI and processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from in_process import InProcessMessenger, Office, run_threads
from mpiddp.collectives import BOTH, MPI, SHARED
from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.planner import Layout, Planner
from mpiddp.collectives.transport.node_memory import NodeMemory, block_size
from mpiddp.collectives.transport.shared_memory import SharedMemory
from mpiddp.collectives.transport.waiting import Policy, Waiter

SEGMENTS = 1_000_000
"""The most that a rank of a crew makes."""


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
            self.communicators.append(Communicator(planner, waiter))

    def play(self, part: Callable[[int, Communicator], Any]) -> list[Any]:
        """Every rank plays its part; what they return, or the exceptions that they raise."""
        results: list[Any] = [None] * len(self.nodes)

        def work(rank: int) -> None:
            try:
                results[rank] = part(rank, self.communicators[rank])
            except BaseException as error:
                results[rank] = error

        run_threads(work, range(len(results)))
        return results

    def run(self, part: Callable[[int, Communicator], Any]) -> list[Any]:
        """As ``play``; an exception of one is raised here."""
        results = self.play(part)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results
