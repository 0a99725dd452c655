"""Start a launch, phase by phase: MPI, torch, address, store, group, first all-reduce.

Each phase has a deadline, and at its end the ranks agree that none of them failed in it. torch is
imported in a thread from the first moment on, while MPI starts.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpiddp import environment
from mpiddp.errors import AloneError, ConfigurationError, LaunchError
from mpiddp.launch import debugging, summary
from mpiddp.launch.device import device, nccl
from mpiddp.launch.device.binding import Cpus, bind_threads
from mpiddp.launch.device.choice import AUTO, CUDA
from mpiddp.launch.failure.deadline import PHASES, PhaseDeadlines
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.termination import is_interactive
from mpiddp.launch.launcher.exported_variables import ExportedVariables, forget_inherited
from mpiddp.launch.launcher.launcher import has_manager_hint
from mpiddp.launch.mpi import mpi
from mpiddp.launch.mpi.control import ControlChannel, find_first
from mpiddp.launch.mpi.world import (
    Neighbourhood,
    check_size,
    find_oddities,
    find_world,
    gather_roster,
    solitary_world,
)
from mpiddp.launch.network import interfaces
from mpiddp.launch.options import COLLECTIVES, LaunchOptions, Options
from mpiddp.launch.packages import check_packages
from mpiddp.launch.rendezvous import companions, store
from mpiddp.launch.rendezvous.init_methods import ScriptGroups
from mpiddp.launch.rendezvous.route import Route, RouteFinder
from mpiddp.launch.resources import Resources
from mpiddp.launch.session import Session, find_failure_handler, find_session, make_current
from mpiddp.launch.torch_import import TorchImport
from mpiddp.lifeline.lifeline import Lifeline, start_companion
from mpiddp.lifeline.membership import Entrance
from mpiddp.lifeline.movement import Movement
from mpiddp.process.cpus import find_cpus
from mpiddp.process.preemption_signals import PreemptionSignals
from mpiddp.process.sockets import ports
from mpiddp.process.streams.console import write_console
from mpiddp.torch_internals import wrap_rendezvous

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

KEY_BYTES = 16
"""Of the random prefix of the job's keys in the store."""


def start(
    options: Options,
    failure_handler: FailureHandler,
    *,
    make_group: bool = True,
    signals: PreemptionSignals | None = None,
) -> Session:
    """Start a launch: returns once every rank has its World, device, store and process group.

    Collective over all processes of the launch. ``make_group=False`` leaves the group to a script
    that calls init_process_group() itself. ``signals``: of a preemption, for
    `Session.signals`. Raises nothing but what `failure` lets rise in an
    interactive process: a failure ends the job.
    """
    previous = find_session()
    if previous is not None and previous.has_group:
        # Its handler knows the other ranks.
        failure_handler.end_start(find_failure_handler(previous))
        raise ConfigurationError(
            "mpiddp.init() was called in this process before, and that session is still open: use "
            "it, or call its close() first"
        )
    # Under `python -m mpiddp` a script may call mpiddp.init(): the launch has been described.
    starter = Starter(options, failure_handler, make_group, previous)
    session = starter.run(signals)
    make_current(session)
    failure_handler.end_start()
    return session


def open_session(**options: Any) -> Session:
    """Start a launch in a script, with `Options`: an uncaught exception ends the job from now on.

    Collective; a failure ends the job, but raises in an interactive process. Where functions share
    a session, this returns it. Raises ConfigurationError if it has been started with others.
    """
    previous = find_session()
    if previous is not None:
        asked = Options(**options)  # A mistake is the script's, and ends that session's job.
        if previous.kept is not None:
            _check_kept(previous.kept, asked)
            return previous
    failure_handler = FailureHandler()
    with failure_handler:
        session = start(Options(**options), failure_handler)
    catch_uncaught(session, failure_handler)
    return session


def _check_kept(kept: LaunchOptions, asked: LaunchOptions) -> None:
    """Raise ConfigurationError if a call asks for another session than the one that there is."""
    for field in fields(LaunchOptions):
        value, found = getattr(asked, field.name), getattr(kept, field.name)
        if value not in (field.default, found):
            raise ConfigurationError(
                f"mpiddp.init({field.name}={value!r}): these ranks were started with {found!r}; "
                "give it to mpiddp.ranks"
            )


def catch_uncaught(session: Session, failure_handler: FailureHandler) -> None:
    """Let uncaught exceptions end the job, and an exit without ``close`` close."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failure_handler.fail(error)
        previous(kind, error, trace)

    if failure_handler.peers.is_shared or not is_interactive():
        sys.excepthook = hook
        session.at_close(lambda: setattr(sys, "excepthook", previous))
    atexit.register(session.close)


class Starter:
    """One start-up. Each public method is a phase, or a part of one; `run` calls them in order.

    All are collective. What they find and open they collect here; `run` makes the Session of it
    at the end. The doctor calls them too, to find what each of them finds.
    """

    placement: device.Placement
    """This and what follows: once `find_device` is done."""
    placements: list[device.Placement]
    """Of all ranks of this node."""
    assignment: device.Assignment
    device: torch.device
    """This and ``threads``: once `take_device` is done."""
    threads: int
    route: Route
    """Once `find_address` is done."""

    def __init__(
        self,
        options: Options,
        failure_handler: FailureHandler,
        make_group: bool,
        previous: Session | None = None,
    ) -> None:
        """``previous``: a session of this process, whose lifeline serves this one as well."""
        forget_inherited()
        self.options = options
        self.failure_handler = failure_handler
        self.peers = failure_handler.peers
        self.make_group = make_group
        self.previous = previous
        self.control = ControlChannel(solitary_world(), None, options.timeout)
        """Of this process alone until MPI is up."""
        self.variables = ExportedVariables()
        self.module: Any = None
        """mpi4py.MPI, None without MPI."""
        self.comm: MPI.Intracomm | None = None
        self.store: Any = None
        self.backend = ""
        self._kept_mpi: mpi.KeptMpi | None = None
        self._has_group = False
        self._on_close: list[Callable[[], None]] = []
        self._lifeline: Lifeline | None = None
        self._unbound: Cpus = frozenset()
        self.neighbourhood: Neighbourhood | None = None
        self.torch_import: TorchImport | None = None
        self.mpi_interfaces: tuple[str, ...] = ()
        self.route_finder: RouteFinder | None = None
        """On the first rank of each node."""
        self._has_lifeline = False
        self._entrance: Entrance | None = None
        """On the first rank of each node, once its companion has been started."""
        failure_handler.begin_start(options.timeout)

    def run(self, signals: PreemptionSignals | None = None) -> Session:
        self.deadlines = PhaseDeadlines(self.options.timeout, self.failure_handler.expire)
        try:
            with self.deadlines.phase("MPI"):
                self.settle(self.begin_import)
                self.settle(self.start_mpi)
            with self.deadlines.phase("import torch"):
                self.settle(self.join_import)
            with self.deadlines.phase("address"):
                # After the import, which needs all cores.
                self.settle(self.begin_lifeline)
                self.settle(self.find_device)
                self.settle(self.bind_cores)
                self.settle(self.take_device)
                self.settle(self.find_address)
            with self.deadlines.phase("store"):
                self.settle(self.open_store)
                self.settle(self.join_lifeline)
            if self.make_group:
                with self.deadlines.phase("group"):
                    self.settle(self.open_group)
                with self.deadlines.phase("first all-reduce"):
                    self.settle(self.try_group)
            with self.deadlines.phase("summary"):
                seconds = self._describe()
            return self._make_session(seconds, signals)
        except BaseException:
            self.deadlines.close()
            if self.torch_import is not None:
                self.torch_import.restore()
            self.close_offers()
            self.collect().abandon()
            raise

    def close_offers(self) -> None:
        """Stop listening if no address was agreed."""
        if self.route_finder is not None:
            self.route_finder.close()

    def collect(self, deadlines: PhaseDeadlines | None = None) -> Resources:
        """What was opened so far. ``deadlines``: of the close."""
        return Resources(
            failure_handler=self.failure_handler,
            variables=self.variables,
            on_close=self._on_close,
            module=self.module,
            kept_mpi=self._kept_mpi,
            comm=self.comm,
            store=self.store,
            backend=self.backend,
            has_group=self._has_group,
            lifeline=self._lifeline,
            unbound=self._unbound,
            deadlines=deadlines,
        )

    def settle(self, work: Callable[[], None]) -> None:
        """Do this rank's part of a phase; returns if no rank failed in its own."""
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:  # All ranks hear of it.
            error = caught
        self.failure_handler.settle(error)

    def begin_lifeline(self) -> None:
        """Start the companion process of this node, if a launcher or the front started the rank."""
        is_job = self.peers.launcher is not None or environment.JOB_DIRECTORY in os.environ
        self._has_lifeline = is_job or self.control.world.size > 1
        if self.previous is not None:
            self._has_lifeline = False
            self.peers.join_lifeline(find_failure_handler(self.previous).peers.lifeline)
        elif self._has_lifeline and self.control.world.local_rank == 0:
            console = self.failure_handler.output.console
            self._entrance, self._lifeline = start_companion(self._enter, console)

    def _enter(self, entrance: Entrance) -> Lifeline:
        handler, rank = self.failure_handler, self.control.world.rank
        return Lifeline(entrance, rank, handler.leave_job, handler.lose_lifeline, handler.output)

    def begin_import(self) -> None:
        """Import torch in a thread from here on."""
        check_packages()
        mpi.add_own_variables()
        if self.options.debug:
            self.variables.export(debugging.begin())
        self.torch_import = TorchImport()

    def start_mpi(self) -> None:
        """Start MPI, if there is one, and find the World."""
        peers = self.peers
        peers.meet_launcher()
        self.module = module = self._load_mpi()
        if module is None:
            peers.meet_world(self.control.world)
            return
        is_joined = peers.communicator is not None
        is_own = not is_joined and not module.Is_initialized()
        if not is_joined:
            self.mpi_interfaces = mpi.initialize(module, peers.launcher)
        version = module.Get_library_version()
        try:
            check_size(module.COMM_WORLD.Get_size(), version, peers.launcher)
        except AloneError:
            if is_own:
                mpi.leave_alone(module)
            raise
        if self.previous is None:
            self._kept_mpi = mpi.KeptMpi(module, is_own=is_own)
        if not is_joined:
            peers.join_mpi(module.COMM_WORLD)
        self.meet_ranks(module)

    def meet_ranks(self, module: Any) -> None:
        """Find the World and, on rank 0, who is where. ``module``: mpi4py.MPI, initialised."""
        peers = self.peers
        self.comm, own = module.COMM_WORLD.Dup(), module.COMM_WORLD.Dup()
        world, self.neighbourhood = find_world(own)
        self.control = ControlChannel(world, own, self.options.timeout)
        peers.meet_world(world)
        self.options.check_world(world.size)
        peers.meet_world(world, gather_roster(world, self.neighbourhood, own))

    def _load_mpi(self) -> Any:
        """The module mpi4py.MPI, or None if this process is alone."""
        launcher = self.peers.launcher
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

    def join_import(self) -> None:
        """Wait for torch."""
        assert self.torch_import is not None
        self.torch_import.join()
        module = COLLECTIVES[self.options.collectives]
        if module:
            self._on_close.append(importlib.import_module(module).replace_gloo())

    def find_device(self) -> None:
        """Find this rank's GPU or cores."""
        # Ends before the other nodes are asked anything: sharing is one node's own failure.
        world = self.control.world
        node = None
        if self.neighbourhood is not None:
            node = mpi.SleepingCommunicator(self.neighbourhood.node)
        allow_sharing, devices = self.options.allow_shared_gpu, self.options.devices
        rules = {"may_initialize": self.make_group, "allow_sharing": allow_sharing}
        placement = device.find_placement(world, devices, **rules)
        if not self.make_group and devices not in (AUTO, CUDA):
            # A script takes GPUs by the numbers that it sees.
            self.variables.export(device.name_visible(placement.gpus))
            placement = device.find_placement(world, AUTO, **rules)
        placements = device.compare(world, node, placement, allow_sharing=allow_sharing)
        # A script chooses its device itself; making a context for it would not be "unchanged".
        if self.make_group and any(each.index is not None for each in placements):
            placement = device.select(placement)
            placements = device.compare(world, node, placement, allow_sharing=allow_sharing)
        self.placement, self.placements = placement, placements
        self.assignment = device.assign(world, placements)

    def bind_cores(self) -> None:
        """Bind this rank, if its launcher has not, before torch and Gloo start threads."""
        masks = device.choose_cores(self.placements, self.options.bind)
        if masks is None:
            return
        world, placements = self.control.world, self.placements
        self._unbound = find_cpus()
        bind_threads(masks[world.local_rank])
        self.placements = [replace(p, cores=m) for p, m in zip(placements, masks, strict=True)]
        self.assignment = device.assign(world, self.placements)

    def take_device(self) -> None:
        """Choose the backend; take the threads."""
        import torch

        self.backend = self._choose_backend()
        self.variables.export(debugging.lower_detail(self.backend, self.control.world.rank))
        self.device = device.name_device(self.assignment)
        if not os.environ.get(environment.OMP_NUM_THREADS):
            torch.set_num_threads(self.assignment.threads)
            threads = {environment.OMP_NUM_THREADS: str(self.assignment.threads)}
            self.variables.export(threads)
        self.threads = torch.get_num_threads()

    def _choose_backend(self) -> str:
        mine = (
            self.assignment.crowded,
            self.assignment.index is None,
            self.assignment.index is not None,
            not nccl.takes_shared_gpus(),
        )
        crowded, lacking, having, refusing = find_first(self.control, mine)
        is_refused = crowded is not None and refusing is not None
        roster = self.peers.roster
        if lacking is not None and having is not None and roster is not None:
            # On rank 0, which prints the remarks.
            note = (
                f"{roster.describe(lacking)} has no GPU, {roster.describe(having)} has one: Gloo "
                "connects them, and the CPUs set the pace; with --devices cuda each needs a GPU"
            )
            self.assignment = replace(self.assignment, remarks=(note, *self.assignment.remarks))
        return device.choose_backend(self.options.backend, is_refused, lacking)

    def find_address(self) -> None:
        """Agree on the address of the store, and tell every rank of its node's interfaces."""
        found: Route | None = None
        error: BaseException | None = None
        if self.neighbourhood is None or self.neighbourhood.leaders is not None:
            try:
                found = self._find_route()
            except Exception as caught:  # All ranks hear of it.
                error = caught
        if self.neighbourhood is not None:
            found = mpi.SleepingCommunicator(self.neighbourhood.node).bcast(found)
        if found is None:
            # On the other ranks of a node; its leader reports what it met.
            lack = ConfigurationError(f"rank {self.control.world.rank}'s node found no address")
            raise error or lack
        self.route = found
        self.variables.export(found.variables)
        if self.options.port_range != ports.AUTO:
            # A script under `python -m mpiddp` may call mpiddp.init(), which listens as well.
            self.variables.export({environment.PORT_RANGE: self.options.port_range})
        if self.options.tuning:
            # Read by the first collective call; a script may have changed the directory by then.
            self.variables.export({environment.TUNING: os.path.abspath(self.options.tuning)})

    def _find_route(self) -> Route:
        """A leader's part."""
        world, leaders = self.control.world, None
        if self.neighbourhood is not None and self.neighbourhood.leaders is not None:
            leaders = mpi.SleepingCommunicator(self.neighbourhood.leaders)
        self.route_finder = RouteFinder(
            self.options.interface, self.options.port_range, world, leaders
        )
        roster = self.peers.roster
        hostnames = roster.hostnames if roster is not None else (world.hostname,)
        return self.route_finder.find(hostnames, self.options.timeout)

    def open_store(self) -> None:
        """Connect to the store, or open it, at the agreed address."""
        world, meeting = self.control.world, self.route.meeting
        free = self._reserve_port()
        secret, free = self.control.broadcast((secrets.token_hex(KEY_BYTES), free))
        descriptor = self.route_finder.descriptor if self.route_finder is not None else None
        timeout = self.options.timeout
        self.store = store.make_store(meeting, world, descriptor, timeout, secret)
        self.variables.export(store.torchrun_variables(world, meeting) | free)
        self.variables.export(store.rank_variables(world, meeting), own=True)
        groups = ScriptGroups(
            world, meeting, lambda: store.make_store(meeting, world, None, timeout, secret), timeout
        )
        self._on_close.append(wrap_rendezvous(groups.wrap))
        if self.make_group:
            # Here, where no rank waits for another yet.
            interfaces.check_variables(self.backend, world.hostname)

    def _reserve_port(self) -> dict[str, str]:
        """On rank 0: MASTER_PORT for processes that ranks start, if another port is free."""
        if self.control.world.rank == 0:
            allowed = self.route_finder.ports if self.route_finder is not None else None
            with contextlib.suppress(OSError):
                holder = ports.reserve(self.route.meeting.address, allowed)
                self._on_close.append(holder.close)
                return {environment.MASTER_PORT: str(holder.getsockname()[1])}
        return {}

    def join_lifeline(self) -> None:
        """Connect this rank with its node's companion, and that one with the other nodes'."""
        if not self._has_lifeline:
            return
        entrance = self._entrance
        if self.neighbourhood is not None:
            entrance = mpi.SleepingCommunicator(self.neighbourhood.node).bcast(entrance)
        assert entrance is not None, "the node's first rank has failed otherwise"
        self._lifeline = lifeline = self._lifeline or self._enter(entrance)
        address, seconds = self.route.meeting.address, self.options.lifeline_timeout
        allowed = self.route_finder.ports if self.route_finder is not None else None
        roster = self.peers.roster
        companions.join(lifeline, self.control, roster, address, seconds, allowed)
        self.peers.join_lifeline(lifeline)

    def open_group(self) -> None:
        """Make torch.distributed's default group."""
        world, timeout = self.control.world, self.options.timeout
        store.make_group(self.store, world, self.backend, self.device, timeout)
        self._has_group = True
        if self.backend == "nccl":
            self._on_close.append(nccl.GroupWatch(self.failure_handler.fail).close)

    def try_group(self) -> None:
        """One checked all-reduce."""
        store.first_all_reduce(self.control.world, self.device)

    def _describe(self) -> dict[str, float]:
        """Say what was started. Returns, on rank 0, each phase's seconds on its slowest rank."""
        assert self.torch_import is not None
        durations = self.deadlines.durations | {"import torch": self.torch_import.seconds}
        seconds = {phase: durations[phase] for phase in PHASES if phase in durations}
        slowest = summary.find_slowest(seconds, self.comm)
        report = summary.NodeReport(
            interface=self.route.interface,
            mpi_interfaces=", ".join(self.mpi_interfaces),
            device=summary.describe_device(self.device, self.threads),
            cores=summary.describe_cores(
                [placement.cores for placement in self.placements],
                [placement.quota for placement in self.placements],
            ),
            remarks=self.assignment.remarks,
        )
        leaders = self.neighbourhood.leaders if self.neighbourhood is not None else None
        reports = leaders.gather(report) if leaders is not None else [report]
        if self.neighbourhood is not None:
            self.neighbourhood.close()
        world, roster, module = self.control.world, self.peers.roster, self.module
        if world.rank != 0 or reports is None:
            return {}
        start = summary.StartedLaunch(
            world=world,
            roster=roster,
            address=f"{self.route.meeting.address}:{self.route.meeting.port}",
            backend=summary.describe_backend(self.backend, self.options.collectives),
            has_group=self._has_group,
            library=module.Get_library_version() if module is not None else None,
            reports=reports,
            slowest=slowest,
            oddities=find_oddities(world, self.peers.launcher, roster),
        )
        if self.previous is None and not self.options.quiet:
            write_console(summary.describe_start(start))
        return {phase: longest for phase, (longest, _) in slowest.items()}

    def _watch_movement(self) -> None:
        """Have the job end when no rank moves any more."""
        lifeline, seconds = self._lifeline, self.options.stall_timeout
        if lifeline is not None and seconds > 0:
            lifeline.progress.note_move()
            handler = self.failure_handler
            movement = Movement(lifeline.progress, seconds, lambda: handler.step_under_way)
            self._on_close.insert(0, movement.close)
            if self.control.world.rank == 0:
                lifeline.watch_stall(seconds)

    def _make_session(
        self, seconds: Mapping[str, float], signals: PreemptionSignals | None
    ) -> Session:
        deadlines = self.deadlines if self.control.world.size > 1 else None
        if deadlines is None:
            self.deadlines.close()
        self._watch_movement()
        if self._lifeline is not None:
            self._lifeline.note_started()
        resources, meeting = self.collect(deadlines), self.route.meeting
        session = Session(
            self.control, resources, self.device, self.placement.gpus, self.threads,
            meeting, seconds, signals,
        )  # fmt: skip
        if self.peers.lifeline is not None:
            self.peers.lifeline.watch_calls(session.count_calls)
        return session
