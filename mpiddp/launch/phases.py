"""The phases of a start-up: MPI, torch, device, address, lifeline, store, group, first all-reduce.

Each is a function, collective over all ranks, that takes what earlier phases have found, and
returns what it finds itself. `startup` calls them in order; the doctor calls them too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mpiddp import environment
from mpiddp.errors import AloneError, ConfigurationError, LaunchError
from mpiddp.launch import caches, debugging
from mpiddp.launch.device import device, nccl
from mpiddp.launch.device.binding import bind_threads
from mpiddp.launch.device.choice import AUTO
from mpiddp.launch.device.device import Assignment, Placement
from mpiddp.launch.device.vendors import TYPES
from mpiddp.launch.device.visibility import assume_vendor
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.exported_variables import ExportedVariables, forget_inherited
from mpiddp.launch.launcher.launcher import Launcher, has_manager_hint
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.control import ControlChannel, find_first
from mpiddp.launch.mpi.world import (
    Neighbourhood,
    Roster,
    World,
    check_size,
    find_world,
    gather_roster,
    solitary_world,
)
from mpiddp.launch.network import interfaces
from mpiddp.launch.options import COLLECTIVES, Options
from mpiddp.launch.packages import check_packages
from mpiddp.launch.rendezvous import companions, store
from mpiddp.launch.rendezvous.init_methods import ScriptGroups
from mpiddp.launch.rendezvous.route import Route, find_route
from mpiddp.launch.torch_import import TorchImport
from mpiddp.lifeline.lifeline import Lifeline, start_companion
from mpiddp.lifeline.membership import Entrance
from mpiddp.lifeline.stacks.hang_report import choose_records
from mpiddp.process.cpus import find_cpus
from mpiddp.process.sockets import ports
from mpiddp.torch_internals import wrap_rendezvous

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from mpiddp.launch.fabrics import SiteDefaults

T = TypeVar("T")
LOCAL_ADDRESS = "127.0.0.1"
KEY_BYTES = 16
"""Of the random prefix of the job's keys in the store."""


class StartUp:
    """What all phases of one start-up share: what it was told, and how to undo and close it."""

    def __init__(
        self,
        options: Options,
        failure_handler: FailureHandler,
        *,
        makes_group: bool = True,
        previous: FailureHandler | None = None,
    ) -> None:
        """``makes_group``: if false, a script makes torch's default group itself.

        ``previous``: of a session of this process, whose lifeline serves this one as well.
        """
        forget_inherited()
        failure_handler.begin_start(options.timeout)
        self.options = options
        self.failure_handler = failure_handler
        self.makes_group = makes_group
        self.previous = previous
        self.variables = ExportedVariables()
        self.site_defaults = _find_site_defaults(options.site_defaults)
        self.on_close: list[Callable[[], object]] = []
        """Called when the session is closed, the last added first, before the group goes."""
        self.undo = ExitStack()
        """Undoes a start-up that fails, as far as one process can: it may be tried again."""
        self.undo.callback(self.variables.restore)

    def settle(self, work: Callable[..., T], *found: Any) -> T:
        """Do this rank's part of a phase; returns if no rank failed in its own."""
        try:
            result = work(self, *found)
        except BaseException as error:  # All ranks hear of it.
            self.failure_handler.settle(error)
            raise
        self.failure_handler.settle(None)
        return result

    def at_close(self, work: Callable[[], object]) -> None:
        """Have ``work`` done when the session is closed, or start-up fails."""
        self.on_close.append(work)
        self.undo.callback(work)


def _find_site_defaults(option: str) -> SiteDefaults | None:
    if not (option or os.environ.get(environment.SITE)):
        return None
    from mpiddp.launch.fabrics import find_site_defaults  # Most launches do without.

    return find_site_defaults(option)


# MPI


@dataclass(frozen=True)
class JobRanks:
    """All ranks, as MPI has brought them together; or this process alone, without MPI."""

    control: ControlChannel
    launcher: Launcher | None
    roster: Roster | None = None
    """On rank 0, with MPI."""
    neighbourhood: Neighbourhood | None = None
    module: Any = None
    """mpi4py.MPI; this and what follows: None or empty without MPI."""
    comm: MPI.Intracomm | None = None
    """The user's."""
    kept_mpi: mpi.KeptMpi | None = None
    """None if another session of this process keeps it."""
    mpi_interfaces: tuple[str, ...] = ()
    """Those that MPI's TCP transports were confined to; none if they choose."""

    @property
    def world(self) -> World:
        return self.control.world

    @property
    def hostnames(self) -> tuple[str, ...]:
        """Of the nodes, by their rank, as far as this rank knows."""
        return self.roster.hostnames if self.roster is not None else (self.world.hostname,)

    @property
    def node(self) -> mpi.SleepingCommunicator | None:
        """The ranks of this node; None without MPI."""
        near = self.neighbourhood
        return mpi.SleepingCommunicator(near.node) if near is not None else None

    @property
    def leads_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.world.local_rank == 0

    @property
    def leaders(self) -> MPI.Intracomm | None:
        """The first ranks of all nodes; None for the others, and without MPI."""
        return self.neighbourhood.leaders if self.neighbourhood is not None else None


def begin_import(start: StartUp) -> TorchImport:
    """Import torch in a thread from here on, in the environment that it and MPI are to read."""
    check_packages()
    if start.site_defaults is not None:
        start.variables.export(start.site_defaults.everywhere)
    mpi.add_own_variables()
    start.variables.export(caches.choose())
    if start.options.debug:
        start.variables.export(debugging.begin())
    torch_import = TorchImport()
    start.undo.callback(torch_import.restore)
    return torch_import


def start_mpi(start: StartUp) -> JobRanks:
    """Start MPI, if there is one, and find the World and, on rank 0, who is where."""
    handler = start.failure_handler
    launcher = handler.meet_launcher().launcher
    module = _load_mpi(launcher)
    if module is None:
        alone = ControlChannel(solitary_world(), None, start.options.timeout)
        handler.meet(world=alone.world)
        return JobRanks(alone, launcher)
    is_own = not module.Is_initialized()
    confined = mpi.initialize(module, launcher)
    version = module.Get_library_version()
    try:
        check_size(module.COMM_WORLD.Get_size(), version, launcher)
    except AloneError:
        if is_own:
            mpi.leave_alone(module)
        raise
    kept_mpi = None
    if start.previous is None:
        kept_mpi = mpi.KeptMpi(module, is_own=is_own)
        start.undo.callback(kept_mpi.release)
    handler.meet(communicator=module.COMM_WORLD.Dup())
    comm, own = module.COMM_WORLD.Dup(), module.COMM_WORLD.Dup()
    world, neighbourhood = find_world(own)
    handler.meet(world=world)
    start.options.check_world(world.size)
    roster = gather_roster(world, neighbourhood, own)
    handler.meet(roster=roster)
    control = ControlChannel(world, own, start.options.timeout)
    return JobRanks(control, launcher, roster, neighbourhood, module, comm, kept_mpi, confined)


def _load_mpi(launcher: Launcher | None) -> Any:
    """The module mpi4py.MPI, or None if this process is alone."""
    alone = launcher is not None and launcher.sizes == (1,)
    if launcher is None and not has_manager_hint():
        return None
    # Open MPI 4 aborts in a Slurm step without a process manager, even for one task.
    if alone and launcher is not None and not launcher.process_managers:
        return None
    try:
        return mpi.load(launcher)
    except LaunchError:
        if alone:
            return None
        raise


# torch


def join_import(start: StartUp, torch_import: TorchImport) -> float:
    """Wait for torch. Returns the seconds that the import took."""
    torch_import.join()
    module = COLLECTIVES[start.options.collectives]
    if module:
        start.at_close(importlib.import_module(module).replace_gloo())
    return torch_import.seconds


# Device


@dataclass(frozen=True)
class Compute:
    """What this rank computes on."""

    placements: Sequence[Placement]
    """Of the node's ranks, by local rank."""
    assignment: Assignment
    backend: str
    device: torch.device
    threads: int


def find_device(start: StartUp, ranks: JobRanks) -> Sequence[Placement]:
    """Find this rank's GPU or cores. Returns what the ranks of its node have, by local rank."""
    # Ends before the other nodes are asked anything: sharing is one node's own failure.
    world, node, options = ranks.world, ranks.node, start.options
    allow_sharing, devices = options.allow_shared_gpu, options.devices
    rules = {"may_initialize": start.makes_group, "allow_sharing": allow_sharing}
    placement = device.find_placement(world, devices, **rules)
    if not start.makes_group and devices not in (AUTO, *TYPES):
        # A script takes GPUs by the numbers that it sees.
        start.variables.export(device.name_visible(placement.gpus))
        placement = device.find_placement(world, AUTO, **rules)
    placements = device.compare(world, node, placement, allow_sharing=allow_sharing)
    # A script chooses its device itself; making a context for it would not be "unchanged".
    if start.makes_group and any(each.index is not None for each in placements):
        placement = device.select(placement)
        placements = device.compare(world, node, placement, allow_sharing=allow_sharing)
    return placements


def bind_cores(
    start: StartUp, ranks: JobRanks, placements: Sequence[Placement]
) -> Sequence[Placement]:
    """Bind this rank, if its launcher has not, before torch and Gloo start threads.

    Returns the placements with the cores that each rank has now.
    """
    masks = device.choose_cores(placements, start.options.bind)
    if masks is None:
        return placements
    start.at_close(partial(bind_threads, find_cpus()))
    bind_threads(masks[ranks.world.local_rank])
    return [replace(each, cores=mask) for each, mask in zip(placements, masks, strict=True)]


def take_device(start: StartUp, ranks: JobRanks, placements: Sequence[Placement]) -> Compute:
    """Choose the backend; take the threads."""
    import torch

    world, assignment = ranks.world, device.assign(ranks.world, placements)
    backend, remarks = _choose_backend(start, ranks, assignment)
    assignment = replace(assignment, remarks=(*remarks, *assignment.remarks))
    start.variables.export(debugging.lower_detail(backend, world.rank))
    if not os.environ.get(environment.OMP_NUM_THREADS):
        torch.set_num_threads(assignment.threads)
        threads = {environment.OMP_NUM_THREADS: str(assignment.threads)}
        start.variables.export(threads)
    return Compute(
        placements=placements,
        assignment=assignment,
        backend=backend,
        device=device.name_device(assignment),
        threads=torch.get_num_threads(),
    )


def _choose_backend(
    start: StartUp, ranks: JobRanks, assignment: Assignment
) -> tuple[str, Sequence[str]]:
    """The backend, and on rank 0, which prints the remarks, one if only some ranks have a GPU."""
    mine = (
        assignment.crowded,
        assignment.index is None,
        assignment.index is not None,
        device.refuses_sharing(),
    )
    crowded, lacking, having, refusing = find_first(ranks.control, mine)
    is_refused = crowded is not None and refusing is not None
    remarks, roster = [], ranks.roster
    if lacking is not None and having is not None and roster is not None:
        device.check_mixture(roster.describe(lacking), roster.describe(having))
        remarks.append(
            f"{roster.describe(lacking)} has no GPU, {roster.describe(having)} has one: Gloo "
            "connects them, and the CPUs set the pace; with --devices "
            f"{assume_vendor().type} each needs a GPU"
        )
    return device.choose_backend(start.options.backend, is_refused, lacking), remarks


# Address


def find_address(start: StartUp, ranks: JobRanks) -> tuple[Route, int | None]:
    """Agree on the address of the store, and tell every rank of its node's interfaces.

    Returns on rank 0, too, the descriptor of the socket that listens there, for `open_store`.
    """
    options = start.options
    route: Route | None = None
    descriptor: int | None = None
    error: Exception | None = None
    if ranks.leads_node:
        leaders = ranks.leaders
        communicator = mpi.SleepingCommunicator(leaders) if leaders is not None else None
        try:
            route, descriptor = find_route(
                ranks.world,
                communicator,
                ranks.hostnames,
                interface=options.interface,
                port_range=options.port_range,
                timeout=options.timeout,
            )
        except Exception as caught:  # The other ranks of the node wait for this one's word.
            error = caught
    if ranks.node is not None:
        route = ranks.node.bcast(route)
    if error is not None:
        raise error
    if route is None:
        # The node's first rank reports what it met.
        raise ConfigurationError(f"rank {ranks.world.rank}'s node found no address")
    start.variables.export(route.variables)
    if start.site_defaults is not None and ranks.world.node_count > 1:
        start.variables.export(start.site_defaults.between_nodes)
    if options.port_range != ports.AUTO:
        # A script under `python -m mpiddp` may call mpiddp.init(), which listens as well.
        start.variables.export({environment.PORT_RANGE: options.port_range})
    if options.tuning:
        # Read by the first collective call; a script may have changed the directory by then.
        start.variables.export({environment.TUNING: os.path.abspath(options.tuning)})
    return route, descriptor


# Lifeline


def begin_lifeline(start: StartUp, ranks: JobRanks) -> Lifeline | None:
    """Start the companion process of this node, if a launcher or the front started the rank.

    Returns the lifeline of the node's first rank, which the companion needs to start.
    """
    handler = start.failure_handler
    if start.previous is not None:
        handler.meet(lifeline=start.previous.peers.lifeline)
    if not _has_companion(start, ranks) or not ranks.leads_node:
        return None
    return start_companion(partial(_enter, start, ranks), handler.output.console)


def _has_companion(start: StartUp, ranks: JobRanks) -> bool:
    is_job = ranks.launcher is not None or environment.JOB_DIRECTORY in os.environ
    return start.previous is None and (is_job or ranks.world.size > 1)


def join_lifeline(
    start: StartUp, ranks: JobRanks, route: Route, first: Lifeline | None
) -> Lifeline | None:
    """Connect this rank with its node's companion, and that one with the other nodes'.

    ``first``: that of the node's first rank, there.
    """
    if not _has_companion(start, ranks):
        return None
    entrance = first.entrance if first is not None else None
    if ranks.node is not None:
        entrance = ranks.node.bcast(entrance)
    assert entrance is not None, "the node's first rank has failed otherwise"
    lifeline = first or _enter(start, ranks, entrance)
    address, options = route.meeting.address, start.options
    seconds, port_range = options.lifeline_timeout, options.port_range
    companions.join(lifeline, ranks.control, ranks.roster, address, seconds, port_range)
    start.failure_handler.meet(lifeline=lifeline)
    return lifeline


def _enter(start: StartUp, ranks: JobRanks, entrance: Entrance) -> Lifeline:
    handler = start.failure_handler
    lifeline = Lifeline(
        entrance, ranks.world.rank, handler.leave_job, handler.lose_lifeline, handler.output
    )

    def leave() -> None:
        handler.meet(lifeline=None)
        lifeline.close()
        lifeline.wait()

    start.undo.callback(leave)
    return lifeline


# Store and group


def place_nccl_records(start: StartUp, ranks: JobRanks, compute: Compute) -> None:
    """Have NCCL's RAS listen, and torch write records of NCCL's collectives, where no other job
    does. What the user has set stays."""
    if compute.backend != "nccl":
        return
    prefix = ""
    with contextlib.suppress(OSError):
        prefix = choose_records(start.failure_handler.directory)
    # A job without a directory has another name on each rank.
    prefix = ranks.control.broadcast(prefix)
    variables = dict.fromkeys(environment.FLIGHT_RECORDS if prefix else (), prefix)
    address = ""
    if ranks.leads_node and os.environ.get(environment.NCCL_RAS) != "0":
        address = _reserve_ras(start)
    if ranks.node is not None:
        address = ranks.node.bcast(address)
    if address:
        variables[environment.NCCL_RAS_ADDRESS] = address
    given = {environment.NCCL_RAS_ADDRESS} & os.environ.keys()
    if environment.is_set(environment.FLIGHT_RECORDS):
        given |= set(environment.FLIGHT_RECORDS)
    start.variables.export({name: variables[name] for name in variables.keys() - given})


def _reserve_ras(start: StartUp) -> str:
    """HOST:PORT, alike for the ranks of this node: they share the port. Empty if none is free."""
    with contextlib.suppress(OSError):
        holder = ports.reserve(LOCAL_ADDRESS)
        start.at_close(holder.close)
        return f"{LOCAL_ADDRESS}:{holder.getsockname()[1]}"
    return ""


def open_store(
    start: StartUp, ranks: JobRanks, compute: Compute, route: Route, descriptor: int | None
) -> Any:
    """Connect to the store, or open it, at the agreed address."""
    world, meeting, timeout = ranks.world, route.meeting, start.options.timeout
    free = _reserve_port(start, meeting.address) if world.rank == 0 else {}
    secret, free = ranks.control.broadcast((secrets.token_hex(KEY_BYTES), free))

    def connect(descriptor: int | None = None) -> Any:
        return store.make_store(meeting, world, descriptor, timeout, secret)

    own = connect(descriptor)
    start.variables.export(store.torchrun_variables(world, meeting) | free)
    start.variables.export(store.rank_variables(world, meeting), own=True)
    groups = ScriptGroups(world, meeting, connect, timeout)
    start.at_close(wrap_rendezvous(groups.wrap))
    if start.makes_group:
        # Here, where no rank waits for another yet.
        interfaces.check_variables(compute.backend, world.hostname)
    return own


def _reserve_port(start: StartUp, address: str) -> dict[str, str]:
    """MASTER_PORT for processes that ranks start, if another port is free."""
    with contextlib.suppress(OSError):
        holder = ports.reserve(address, ports.find_range(start.options.port_range))
        start.at_close(holder.close)
        return {environment.MASTER_PORT: str(holder.getsockname()[1])}
    return {}


def open_group(start: StartUp, ranks: JobRanks, compute: Compute, own_store: Any) -> None:
    """Make torch.distributed's default group."""
    import torch.distributed as distributed

    timeout = start.options.timeout
    store.make_group(own_store, ranks.world, compute.backend, compute.device, timeout)
    start.undo.callback(distributed.destroy_process_group)
    # XCCL has nothing that tells of a failed group.
    if compute.backend == "nccl":
        start.at_close(nccl.GroupWatch(start.failure_handler.fail).close)


def try_group(start: StartUp, ranks: JobRanks, compute: Compute) -> None:
    """One checked all-reduce."""
    store.first_all_reduce(ranks.world, compute.device)
