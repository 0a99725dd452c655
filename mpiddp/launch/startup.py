"""Start a launch, phase by phase: MPI, torch, address, store, group, first all-reduce.

Each phase has a deadline, and at its end the ranks agree that none of them failed in it. torch is
imported in a thread from the first moment on, while MPI starts.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from mpiddp import environment
from mpiddp.errors import AloneError, ConfigurationError, LaunchError
from mpiddp.launch import device, nccl, summary
from mpiddp.launch.failure.deadline import PHASES, Watch
from mpiddp.launch.failure.failure import WayOut, in_notebook, write_console
from mpiddp.launch.failure.heartbeat import Heartbeat
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.launch.launcher.launcher import Launcher, find_launcher, has_manager_hint
from mpiddp.launch.mpi import mpi
from mpiddp.launch.network import interfaces
from mpiddp.launch.network.interface_rule import find_rule, names_nobody
from mpiddp.launch.rendezvous import store
from mpiddp.launch.rendezvous.address_agreement import Reception, agree, meet, tell_no_offer
from mpiddp.launch.session import Options, Session
from mpiddp.launch.torch_import import TorchImport
from mpiddp.launch.world import Neighbourhood, check_size, find_oddities, find_world, gather_roster

KEY_BYTES = 16
"""Of what the job's keys in the store begin with."""


def start(options: Options, way_out: WayOut, *, make_group: bool = True) -> Session:
    """Start a launch: returns once every rank has its World, device, store and process group.

    Collective over all processes of the launch. ``make_group=False`` leaves the group to a script
    that calls init_process_group() itself. Raises nothing but what `failure` lets rise in a
    notebook: a failure ends the job.
    """
    session = Starter(options, way_out, make_group).run()
    session.open()
    way_out.starting = False
    return session


def catch_uncaught(session: Session, way_out: WayOut) -> None:
    """Lead exceptions that nobody catches, and an exit without ``close``, to the way out."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        way_out.fail(error)
        previous(kind, error, trace)

    if not in_notebook():
        sys.excepthook = hook
        session._on_close.append(lambda: setattr(sys, "excepthook", previous))
    atexit.register(session.close)


def torchrun_variables(session: Session) -> dict[str, str]:
    """What torchrun gives its workers, for scripts and libraries that look for it."""
    world = session.world
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
        environment.MASTER_ADDR: session.meeting.address,
        environment.MASTER_PORT: str(session.meeting.port),
        environment.TORCHELASTIC_RUN_ID: environment.OUR_RUN_ID_PREFIX + session.meeting.job,
        environment.TORCHELASTIC_RESTART_COUNT: "0",
        environment.TORCHELASTIC_MAX_RESTARTS: "0",
        # The server runs already; init_process_group() must only connect to it.
        environment.TORCHELASTIC_USE_AGENT_STORE: "True",
    }


@dataclass(frozen=True)
class Route:
    """How one node reaches rank 0; found by its leader."""

    meeting: store.Meeting
    interface: str
    """Of this node; ``?`` where no interface holds the address."""
    local_address: str
    """This node's end of its connection to the agreed address."""
    variables: Mapping[str, str]
    """Interface variables that NCCL and Gloo are told on this node."""


class Starter:
    """One start-up. Each public method is a phase, or a part of one; `run` calls them in order.

    All are collective. The doctor calls them too, to find what each of them finds.
    """

    def __init__(self, options: Options, way_out: WayOut, make_group: bool) -> None:
        self.options = options
        self.way_out = way_out
        self.make_group = make_group
        self.session = Session(way_out, options.timeout)
        self.launcher: Launcher | None = None
        self.neighbourhood: Neighbourhood | None = None
        self.torch_import: TorchImport | None = None
        self.mpi_interfaces: tuple[str, ...] = ()
        self.reception: Reception | None = None
        self.descriptor: int | None = None
        self.placement: device.Placement
        self.assignment: device.Assignment
        """Both once `find_device` is done."""
        self.route: Route
        """Once `find_address` is done."""
        way_out.seconds = options.timeout

    def run(self) -> Session:
        self.watch = Watch(self.options.timeout, self.way_out.expire)
        try:
            with self.watch.phase("MPI"):
                self.settle(self.begin_import)
                self.settle(self.start_mpi)
            with self.watch.phase("import torch"):
                self.settle(self.join_import)
            with self.watch.phase("address"):
                self.settle(self.find_device)
                self.settle(self.take_device)
                self.settle(self.find_address)
            with self.watch.phase("store"):
                self.settle(self.open_store)
            if self.make_group:
                with self.watch.phase("group"):
                    self.settle(self.open_group)
                with self.watch.phase("first all-reduce"):
                    self.settle(self.try_group)
            with self.watch.phase("summary"):
                self._conclude()
        except BaseException:
            self.watch.close()
            self._abandon()
            raise
        return self.session

    def _abandon(self) -> None:
        if self.torch_import is not None:
            self.torch_import.restore()
        self.close_reception()
        self.session.abandon()

    def close_reception(self) -> None:
        """Stop listening where no address was agreed."""
        if self.reception is not None:
            self.reception.hand_over(None)
            self.reception = None

    def settle(self, work: Callable[[], None]) -> None:
        """Do this rank's part of a phase; returns if no rank failed in its own."""
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:
            error = caught
        self.way_out.settle(error)

    def begin_import(self) -> None:
        """Import torch in a thread from here on."""
        self.torch_import = TorchImport()

    def start_mpi(self) -> None:
        """Bring MPI up where there is one, and find the World."""
        session, way_out = self.session, self.way_out
        self.launcher = way_out.launcher = find_launcher()
        module = self._load_mpi()
        if module is None:
            way_out.world = session.world
            return
        session._module = module
        if way_out.communicator is None:
            initialization = mpi.initialize(module, self.launcher)
            session._finalize = initialization.here
            self.mpi_interfaces = initialization.interfaces
        version = module.Get_library_version()
        try:
            check_size(module.COMM_WORLD.Get_size(), version, self.launcher)
        except AloneError:
            if session._finalize:
                mpi.leave_alone(module)
            raise
        if way_out.communicator is None:
            way_out.join(module.COMM_WORLD)
        session.comm, session._own = module.COMM_WORLD.Dup(), module.COMM_WORLD.Dup()
        session.world, self.neighbourhood = find_world(session._own)
        way_out.world = session.world
        way_out.roster = gather_roster(session.world, self.neighbourhood, session._own)

    def _load_mpi(self) -> Any:
        """The module mpi4py.MPI, or None where this process is alone and needs nobody."""
        launcher = self.launcher
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

    def find_device(self) -> None:
        """Find this rank's GPU or cores."""
        # Ends before the other nodes are asked anything: sharing is one node's own failure.
        world = self.session.world
        node = None
        if self.neighbourhood is not None:
            node = mpi.SleepingCommunicator(self.neighbourhood.node)
        allow_sharing = self.options.allow_shared_gpu
        placement = device.find_placement(world, may_initialize=self.make_group)
        placements = device.compare(world, node, placement, allow_sharing=allow_sharing)
        # A script chooses its device itself; making a context for it would not be "unchanged".
        if self.make_group and any(each.index is not None for each in placements):
            placement = device.select(placement)
            placements = device.compare(world, node, placement, allow_sharing=allow_sharing)
        self.placement = placement
        self.assignment = device.assign(world, placements)

    def take_device(self) -> None:
        """Choose the backend; take the threads."""
        import torch

        session = self.session
        session.backend = self._choose_backend()
        session.device = device.name_device(self.assignment)
        if not os.environ.get(environment.OMP_NUM_THREADS):
            torch.set_num_threads(self.assignment.threads)
            session.export({environment.OMP_NUM_THREADS: str(self.assignment.threads)})
        session.threads = torch.get_num_threads()

    def _choose_backend(self) -> str:
        mine = (
            self.assignment.crowded,
            self.assignment.index is None,
            not nccl.takes_shared_gpus(),
        )
        crowded, lacking, refusing = self.session._find_first(mine)
        is_refused = crowded is not None and refusing is not None
        return device.choose_backend(self.options.backend, is_refused, lacking)

    def find_address(self) -> None:
        """Agree on the address of the store, and tell every rank of its node's interfaces."""
        session = self.session
        found: Route | None = None
        error: BaseException | None = None
        if self.neighbourhood is None or self.neighbourhood.leaders is not None:
            try:
                found = self._meet()
            except Exception as caught:
                error = caught
        if self.neighbourhood is not None:
            found = mpi.SleepingCommunicator(self.neighbourhood.node).bcast(found)
        if found is None:
            # On the other ranks of a node; its leader reports what it met.
            lack = ConfigurationError(f"rank {session.world.rank}'s node found no address")
            raise error or lack
        self.route = found
        session.meeting = found.meeting
        session.export(found.variables)

    def _meet(self) -> Route:
        """The leaders' part: candidates, attempts, agreement."""
        world = self.session.world
        own = interfaces.list_interfaces()
        rule = find_rule(self.options.interface, world.hostname)
        leaders = None
        if self.neighbourhood is not None and self.neighbourhood.leaders is not None:
            leaders = mpi.SleepingCommunicator(self.neighbourhood.leaders)
        self._check_option(leaders)
        if world.rank == 0:
            try:
                self.reception = Reception(
                    interfaces.list_candidates(own, rule, world.node_count, world.hostname)
                )
            except Exception:  # Whatever it is: the other leaders wait for rank 0's word.
                if leaders is not None:
                    tell_no_offer(leaders)
                raise
        if leaders is not None:
            agreement = meet(self.reception, leaders, world.hostname, self.options.timeout)
        else:
            assert self.reception is not None
            agreement = self.reception.agree_alone()
        winner = agreement.common[0]
        if self.reception is not None:
            self.descriptor = self.reception.hand_over(winner)
            self.reception = None
        offer = agreement.offers[winner]
        meeting = store.Meeting(
            offer.candidate.address, offer.port, offer.candidate.interface, agreement.token.hex()
        )
        found = (interfaces.find_interface(own, a) for a in agreement.local_addresses)
        used = list(dict.fromkeys(each.name for each in found if each is not None))
        variables = interfaces.choose_variables(own, used, rule, world.node_count)
        return Route(meeting, used[0] if used else "?", agreement.local_addresses[0], variables)

    def _check_option(self, leaders: mpi.SleepingCommunicator | None) -> None:
        """Refuse ``--interface HOST=NAME`` where no node is a HOST: a name was mistyped.

        Some may be: one command line may serve jobs on changing nodes.
        """
        option, world = self.options.interface, self.session.world
        missed = names_nobody(option, world.hostname)
        if leaders is not None:
            (missed,) = agree(leaders, [missed])
        if missed:
            roster = self.way_out.roster
            hostnames = roster.hostnames if roster is not None else (world.hostname,)
            raise ConfigurationError(
                f"--interface {option!r} names none of the job's hosts, which are "
                f"{fold_hostnames(hostnames)}: expected HOST=NAME,… for one of them at least"
            )

    def open_store(self) -> None:
        """Connect to the store, or open it, at the agreed address."""
        session = self.session
        session._store = store.make_store(
            session.meeting,
            session.world,
            self.descriptor,
            self.options.timeout,
            session.broadcast(secrets.token_hex(KEY_BYTES)),
        )
        session.export(torchrun_variables(session))
        if self.make_group:
            # Here, where no rank waits for another one yet.
            interfaces.check_variables(session.backend, session.world.hostname)

    def open_group(self) -> None:
        """Make torch.distributed's default group."""
        session = self.session
        store.make_group(
            session._store, session.world, session.backend, session.device, self.options.timeout
        )
        session._group = True
        if session.backend == "nccl":
            watch = nccl.GroupWatch(self.way_out.fail)
            session.at_close(watch.close)

    def try_group(self) -> None:
        """One checked all-reduce."""
        store.first_all_reduce(self.session.world, self.session.device)

    def _conclude(self) -> None:
        """Say what was started, and let go of what only start-up needed."""
        session = self.session
        assert self.torch_import is not None
        durations = self.watch.durations | {"import torch": self.torch_import.seconds}
        seconds = {phase: durations[phase] for phase in PHASES if phase in durations}
        slowest = summary.find_slowest(seconds, session._own)
        report = summary.NodeReport(
            interface=self.route.interface,
            mpi_interfaces=", ".join(self.mpi_interfaces),
            device=summary.describe_device(session.device, session.threads),
            remarks=self.assignment.remarks,
        )
        leaders = self.neighbourhood.leaders if self.neighbourhood is not None else None
        reports = leaders.gather(report) if leaders is not None else [report]
        if session.world.rank == 0 and reports is not None:
            session.seconds = {phase: longest for phase, (longest, _) in slowest.items()}
            oddities = find_oddities(session.world, self.launcher, self.way_out.roster)
            block = summary.describe_start(session, self.way_out.roster, reports, slowest, oddities)
            write_console(block)
        if self.neighbourhood is not None:
            self.neighbourhood.close()
        self.way_out.store = session._store
        if session.world.size == 1:
            self.watch.close()
            return
        session._watch = self.watch
        session._heartbeat = Heartbeat(
            session._store, session.world.rank, session.world.size, self.options.timeout
        )
