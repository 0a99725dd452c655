"""From an agreed address to a store, and from the store to a process group."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.launch.device.nccl import QUEUE_SECONDS
from mpiddp.launch.device.vendors import BACKENDS
from mpiddp.launch.launcher.exported_variables import set_meanwhile
from mpiddp.torch_internals import add_prefix, make_tcp_store

if TYPE_CHECKING:
    import torch

    from mpiddp.launch.mpi.world import World


SLACK_SECONDS = 5.0
"""How much longer torch waits than the phase may take: the phase's own deadline comes first, and
knows who is missing."""
SPARE_FILES = 8192
"""The store never closes a stranger's connection: this many must not take the process's files."""


@dataclass(frozen=True)
class Meeting:
    """The agreed address of the store."""

    address: str
    port: int
    interface: str
    """On rank 0's node."""
    job: str
    """Hexadecimal token, the same on all ranks and different in every job."""


def torchrun_variables(world: World, meeting: Meeting) -> dict[str, str]:
    """What torchrun gives its workers, for scripts and libraries that look for it.

    ``rank_variables`` has the rest, which is for the rank alone.
    """
    return {
        environment.RANK: str(world.rank),
        environment.LOCAL_RANK: str(world.local_rank),
        environment.WORLD_SIZE: str(world.size),
        environment.LOCAL_WORLD_SIZE: str(world.local_size),
        environment.GROUP_RANK: str(world.node_rank),
        environment.GROUP_WORLD_SIZE: str(world.node_count),
        environment.ROLE_RANK: str(world.rank),
        environment.ROLE_NAME: "default",
        environment.ROLE_WORLD_SIZE: str(world.size),
        environment.MASTER_ADDR: meeting.address,
        environment.TORCHCOMM_RANK: str(world.rank),
        environment.TORCHCOMM_SIZE: str(world.size),
        environment.TORCHELASTIC_RUN_ID: environment.OUR_RUN_ID_PREFIX + meeting.job,
        # From the front, if it has started this rank.
        **{name: os.environ.get(name) or "0" for name in environment.RESTARTS},
    }


def rank_variables(world: World, meeting: Meeting) -> dict[str, str]:
    """What holds in a rank and not in its children, which may make groups of their own.

    The job's store, which runs already, so that init_process_group() only connects to it; and a
    rank's numbers by the names that other launchers give them.
    """
    return {
        environment.MASTER_PORT: str(meeting.port),
        environment.TORCHELASTIC_USE_AGENT_STORE: str(True),
        **{
            name: str(getattr(world, number))
            for number, names in environment.RANK_VARIABLES.items()
            for name in names
        },
    }


def make_store(
    meeting: Meeting, world: World, descriptor: int | None, timeout: float, secret: str
) -> Any:
    """The job's TCPStore: rank 0 serves on the socket it already holds, the others connect.

    Anybody who reaches the server may use it. So that nobody meets our keys by chance or guesses
    them, they begin with ``secret``, which is the same on all ranks.

    Owns ``descriptor`` from here on. The server lives until rank 0 drops the returned object.
    """
    if descriptor is not None:
        _raise_file_limit(world.size + SPARE_FILES)
    store = make_tcp_store(
        meeting.address,
        meeting.port,
        world.size,
        descriptor is not None,
        timedelta(seconds=timeout + SLACK_SECONDS),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    return add_prefix(f"mpiddp/{secret}", store)


def _raise_file_limit(more: int) -> None:
    """Let this process open ``more`` files than so far, or as many as it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = soft + more if hard == resource.RLIM_INFINITY else min(soft + more, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make_group(
    store: Any, world: World, backend: str, device: torch.device, timeout: float
) -> None:
    """Make torch.distributed's default group on the store.

    With NCCL the group is bound to ``device``, so that NCCL connects and fails here and not in
    the first collective. Passing a store skips torch's own prefix and time-out: both are done
    here. MPI's own group needs no store, and has the ranks of MPI's world.
    """
    import torch.distributed as distributed

    if distributed.is_initialized():
        raise ConfigurationError(
            "torch.distributed's default group exists already: call mpiddp.init() instead of "
            "init_process_group(), or run the script with python -m mpiddp"
        )
    if backend == "mpi":
        distributed.init_process_group(backend, timeout=find_group_timeout(backend, timeout))
        return
    prefixed = add_prefix("default_pg", store)
    prefixed.set_timeout(timedelta(seconds=timeout + SLACK_SECONDS))
    # Gloo asks the store for all ranks' addresses at once, unless the user has set the variable.
    # One by one they would be a question for each pair of ranks, for one thread of rank 0.
    with set_meanwhile({environment.GLOO_STORE_V2: os.environ.get(environment.GLOO_STORE_V2, "1")}):
        distributed.init_process_group(
            backend,
            store=prefixed,
            rank=world.rank,
            world_size=world.size,
            timeout=find_group_timeout(backend, timeout),
            device_id=device if backend in BACKENDS else None,
        )


def find_group_timeout(backend: str, timeout: float) -> timedelta:
    """How long torch waits for a collective of a group, for a session's ``timeout`` in seconds.

    Gloo raises an error in the call. NCCL ends the process: it waits longer, so that the deadlines
    of start-up come first, and a collective behind much queued work does not expire.
    """
    return timedelta(seconds=timeout + (QUEUE_SECONDS if backend in BACKENDS else 0.0))


def first_all_reduce(world: World, device: torch.device) -> None:
    """One all-reduce of one float per rank, checked. Raises MpiddpError on a wrong sum."""
    import torch
    import torch.distributed as distributed

    ones = torch.ones(1, device=device if distributed.get_backend() in BACKENDS else "cpu")
    distributed.all_reduce(ones)
    if ones.item() != world.size:
        raise MpiddpError(
            f"the first all-reduce over {world.size} ranks must give {world.size}, "
            f"it gave {ones.item()}"
        )
