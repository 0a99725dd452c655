"""Makes a session ready for collective calls: where ranks are, and which memory they can reach."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mpiddp import environment
from mpiddp.collectives import BOTH, MPI, SHARED, TORCH, TRANSPORTS
from mpiddp.collectives.communicator import Communicator
from mpiddp.collectives.planner import NCCL, Layout, Planner
from mpiddp.collectives.transport import Messenger
from mpiddp.collectives.transport.mpi import (
    LONGEST_MESSAGE,
    NETWORK_MESSAGE,
    MpiMessenger,
    check_thread,
)
from mpiddp.collectives.transport.node_memory import NodeMemory, block_size, is_ordered
from mpiddp.collectives.transport.shared_memory import SharedMemory, address_of, map_descriptor
from mpiddp.collectives.transport.single_copy import can_copy
from mpiddp.collectives.transport.waiting import Waiter, choose_policy
from mpiddp.collectives.tuning import Reading, Table, check_readings, fit_table, read_own
from mpiddp.errors import ConfigurationError, PeerLostError
from mpiddp.launch.mpi.mpi import find_thread_limit
from mpiddp.launch.rendezvous.store import find_group_timeout
from mpiddp.launch.session import Session, current_session
from mpiddp.process.cpus import count_shared_cores, find_cpus, find_quota
from mpiddp.wording import print_message

TOKEN_BYTES = 16
NCCL_BACKEND = "nccl"


@dataclass(frozen=True)
class _Facts:
    """What each rank tells all others about itself."""

    hostname: str
    process: int
    cores: tuple[int, ...]
    quota: float
    wish: str
    message_bytes: str
    tuning: Reading
    is_checked: bool
    has_order: bool
    namespace: str
    """The namespace of its process number."""
    thread_limit: str
    """MPI's level of thread support; empty for MPI_THREAD_MULTIPLE."""
    block: int
    """File descriptor of the node's block, at the first rank of each node."""
    token: bytes
    token_address: int


@dataclass(frozen=True)
class _Reach:
    """What a rank has found out about the other ranks of its node."""

    memory: str = ""
    """Why it cannot map their memory; empty if it can."""
    copies: str = ""
    """Why it cannot copy from their private memory; empty if it can."""


@dataclass(frozen=True)
class Members:
    """The ranks that make calls together, and how they talk before they have a communicator."""

    rank: int
    nodes: tuple[int, ...]
    """The node of each rank, by number."""
    hostname: str
    timeout: float
    """Seconds of a wait."""
    gather: Callable[[Any], list[Any]]
    """Every rank's value, by rank; collective."""
    make_messengers: Callable[[Waiter, int], Mapping[str, Callable[[], Messenger]]]
    """For a waiter and the longest message in bytes: what makes the messenger of each transport."""
    agree: Callable[[Any, str], Any]
    """Compares a value on all of these ranks."""
    device: torch.device | None = None
    """The GPU that calls may use, if it matters."""
    thread_limit: str = ""
    """MPI's level of thread support, if it is used and less than MPI_THREAD_MULTIPLE."""

    @property
    def neighbours(self) -> list[int]:
        """The ranks of this rank's node, itself among them."""
        own = self.nodes[self.rank]
        return [rank for rank, node in enumerate(self.nodes) if node == own]


def ensure_communicator() -> Communicator:
    """The current session's; made, collectively, by the first call of all.

    Threads that come meanwhile wait for it. Raises ConfigurationError.
    """
    session = current_session()
    found: Communicator | None = session.collectives
    if found is None:
        make = _make_alone if session.world.size == 1 else _make_for_session
        found = session.ensure_collectives(partial(make, session))
    return found


def _make_for_session(session: Session) -> Communicator:
    world = session.world
    members = Members(
        world.rank,
        tuple(session.gather(world.node_rank)),
        world.hostname,
        session.timeout,
        session.gather,
        partial(_list_messengers, session),
        session.agree,
        session.device,
        find_thread_limit(),
    )
    communicator = make_communicator(members)
    # The user's own work may still call it.
    session.at_close(communicator.close, last=True)
    return communicator


def make_communicator(members: Members) -> Communicator:
    """Collective over the members, who close it together.

    Raises ConfigurationError for environment variables that make no sense or differ.
    """
    shared_memory = SharedMemory()
    token = mmap.mmap(-1, TOKEN_BYTES)
    token[:] = secrets.token_bytes(TOKEN_BYTES)
    block = None
    ranks = members.neighbours
    if members.rank == ranks[0]:
        # A quick rank leaves while others still read its last call's words.
        block = shared_memory.allocate(block_size(len(ranks)) + TOKEN_BYTES, is_common=True)
        block[-TOKEN_BYTES:] = token[:]
    table, reading = read_own()
    facts = members.gather(_find_facts(members, shared_memory, block, token, reading))
    check_readings([each.tuning for each in facts])
    block, found = _reach(facts, ranks, members.rank, block)
    reaches = members.gather(found)
    groups = [
        [facts[rank] for rank, node in enumerate(members.nodes) if node == number]
        for number in set(members.nodes)
    ]
    nodes = [
        (
            len(group),
            count_shared_cores([each.cores for each in group], [each.quota for each in group]),
        )
        for group in groups
    ]
    waiter = Waiter(choose_policy([each.wish for each in facts], nodes), members.timeout)
    longest = find_longest_message([each.message_bytes for each in facts], len(groups) > 1)
    messengers = members.make_messengers(waiter, longest)
    layout, notes = _lay_out(members, facts, reaches, has_mpi=MPI in messengers)
    layout = tune(replace(layout, has_nccl=NCCL in messengers), table)
    node_memory = None
    if block is not None and (SHARED in layout.transports or BOTH in layout.transports):
        processes = {rank: facts[rank].process for rank in ranks}
        copies = not any(reaches[rank].copies for rank in ranks)
        node_memory = NodeMemory(members.rank, processes, block, waiter, shared_memory, copies)
    if len({each.is_checked for each in facts}) > 1:
        raise ConfigurationError(f"{environment.DEBUG} must be the same on all ranks")
    return Communicator(
        Planner(layout, shared_memory, node_memory, messengers, members.agree),
        waiter,
        notes,
        members.agree if facts[0].is_checked else None,
        members.device,
        is_concurrent=not any(each.thread_limit for each in facts),
    )


def _find_facts(
    members: Members,
    shared_memory: SharedMemory,
    block: mmap.mmap | None,
    token: mmap.mmap,
    tuning: Reading,
) -> _Facts:
    place = shared_memory.find(address_of(block), len(block)) if block is not None else None
    return _Facts(
        members.hostname,
        os.getpid(),
        tuple(sorted(find_cpus())),
        find_quota(),
        os.environ.get(environment.WAIT, ""),
        os.environ.get(environment.MESSAGE_BYTES, ""),
        tuning,
        os.environ.get(environment.DEBUG) not in (None, "", "0"),
        is_ordered(),
        os.readlink("/proc/self/ns/pid"),
        members.thread_limit,
        place.descriptor if place is not None else -1,
        token[:],
        address_of(token),
    )


def _reach(
    facts: list[_Facts], ranks: list[int], rank: int, block: mmap.mmap | None
) -> tuple[mmap.mmap | None, _Reach]:
    """Map the node's block; try to copy from each rank of the node."""
    first = facts[ranks[0]]
    if not first.has_order:
        reason = "this processor does not keep stores in order, x86-64 does"
        return None, _Reach(memory=reason, copies=reason)
    if block is None:
        size = block_size(len(ranks)) + TOKEN_BYTES
        try:
            if facts[rank].namespace != first.namespace:
                raise ValueError("their process numbers are not the same")
            block = map_descriptor(first.process, first.block, size, first.token)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            reason = f"rank {rank} cannot map rank {ranks[0]}'s memory ({why})"
            return None, _Reach(memory=reason, copies=reason)
    for other in ranks:
        each = facts[other]
        if other != rank and not can_copy(each.process, each.token_address, each.token):
            reason = (
                f"rank {rank} may not read or write rank {other}'s memory (process_vm_readv; see "
                "kernel.yama.ptrace_scope, or the container's seccomp profile)"
            )
            return block, _Reach(copies=reason)
    return block, _Reach()


def _lay_out(
    members: Members, facts: list[_Facts], reaches: list[_Reach], *, has_mpi: bool
) -> tuple[Layout, tuple[str, ...]]:
    nodes = members.nodes
    absent: dict[str, str] = {}
    lack = next((reach.memory for reach in reaches if reach.memory), "")
    several = len(set(nodes)) > 1
    notes = []
    if lack:
        absent[SHARED] = absent[BOTH] = lack
        notes.append(f"no shared memory: {lack}; messages are used")
    elif several:
        absent[SHARED] = f"the ranks are on {len(set(nodes))} nodes"
    copies = next((reach.copies for reach in reaches if reach.copies), "")
    if copies and not lack:
        notes.append(f"no single copies: {copies}; private buffers are copied to shared memory")
    limited = next((rank for rank, each in enumerate(facts) if each.thread_limit), None)
    if not has_mpi:
        absent[MPI] = absent[BOTH] = "these ranks have no communicator of MPI"
    if limited is not None:
        notes.append(
            f"asynchronous calls are made at once: MPI has {facts[limited].thread_limit} on rank "
            f"{limited}, and a thread for them needs MPI_THREAD_MULTIPLE"
        )
    possible = [SHARED, BOTH, MPI, TORCH]
    if several and len(set(nodes)) == len(nodes):
        # One rank on each node: messages alone are the same, and simpler.
        possible = [MPI, BOTH, TORCH]
    transports = tuple(name for name in possible if name not in absent)
    hosts = tuple(each.hostname for each in facts)
    layout = Layout(members.rank, hosts, nodes, transports, absent)
    return layout, tuple(notes)


def tune(layout: Layout, table: Table | None) -> Layout:
    """The layout with what a tuning table says for it; rank 0 prints if it says nothing."""
    tuning = fit_table(table, layout.sizes, layout.transports)
    if table is not None and not tuning.ranges and layout.rank == 0:
        print_message(tuning.text)
    return replace(layout, tuning=tuning)


def _list_messengers(
    session: Session, waiter: Waiter, longest: int
) -> Mapping[str, Callable[[], Messenger]]:
    """What makes each messenger; collective."""

    def make_mpi() -> Messenger:
        check_thread()
        communicator = session.duplicate()
        assert communicator is not None
        return MpiMessenger(communicator, waiter, longest)

    def make_torch(on_gpu: bool) -> Messenger:
        from mpiddp.collectives.transport.torch_messages import TorchMessenger

        return TorchMessenger(_make_group(session, on_gpu))

    makers: dict[str, Callable[[], Messenger]] = {MPI: make_mpi, TORCH: partial(make_torch, False)}
    if session.backend == NCCL_BACKEND:
        makers[NCCL] = partial(make_torch, True)
    return makers


def _make_group(session: Session, on_gpu: bool) -> Any:
    """A process group over all ranks that is used for nothing else: NCCL's or Gloo's.

    Collective. Raises ConfigurationError if there can be none.
    """
    backend = NCCL_BACKEND if on_gpu else "gloo"
    if not torch.distributed.is_initialized():
        raise ConfigurationError(
            "transport torch needs torch.distributed's group: call init_process_group() first"
        )
    wait = find_group_timeout(backend, session.timeout)
    try:
        group = torch.distributed.new_group(backend=backend, timeout=wait)
    except torch.distributed.DistStoreError as error:
        raise PeerLostError(
            f"transport torch waited {session.timeout:g} s for the other ranks: every rank must "
            "make the same collective calls"
        ) from error
    if on_gpu:
        # NCCL wants all ranks in a group's first call.
        torch.distributed.all_reduce(torch.zeros(1, device=session.device), group=group)
    return group


def find_longest_message(wishes: Sequence[str], has_network: bool) -> int:
    """Bytes of an MPI message: from the environment, or what suits the network.

    ``wishes``: every rank's variable. Raises ConfigurationError.
    """
    if len(set(wishes)) > 1:
        raise ConfigurationError(
            f"{environment.MESSAGE_BYTES} must be the same on all ranks, "
            f"found {sorted(set(wishes))}"
        )
    if not wishes[0]:
        return NETWORK_MESSAGE if has_network else LONGEST_MESSAGE
    if not wishes[0].isdecimal() or int(wishes[0]) < 8:
        raise ConfigurationError(
            f"{environment.MESSAGE_BYTES}: expected bytes >= 8, found {wishes[0]!r}"
        )
    return int(wishes[0])


def _make_alone(session: Session) -> Communicator:
    """For a session of one rank."""
    table, reading = read_own()
    check_readings([reading])
    layout = tune(Layout(0, (session.world.hostname,), (0,), TRANSPORTS), table)
    policy = choose_policy([os.environ.get(environment.WAIT, "")], [(1, 1)])
    planner = Planner(layout, SharedMemory(), None, {})
    return Communicator(planner, Waiter(policy, 0.0), device=session.device)
