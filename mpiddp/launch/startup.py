"""Start a launch, phase by phase: MPI, torch, address, store, group, first all-reduce.

Each phase has a deadline, and at its end the ranks agree that none of them failed in it. torch is
imported in a thread from the first moment on, while MPI starts.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mpiddp import environment
from mpiddp.errors import ConfigurationError, LaunchError
from mpiddp.launch import device, mpi, network, rendezvous, summary
from mpiddp.launch.deadline import PHASES, Watch
from mpiddp.launch.failure import WayOut, in_notebook
from mpiddp.launch.interface_rule import find_rule
from mpiddp.launch.launcher import Launcher, find_launcher, has_manager_hint
from mpiddp.launch.reception import Reception, meet
from mpiddp.launch.session import Options, Session
from mpiddp.launch.torch_import import TorchImport
from mpiddp.launch.world import Neighbourhood, check_size, find_oddities, find_world, gather_roster


def start(options: Options, way_out: WayOut, *, make_group: bool = True) -> Session:
    """Start a launch: returns once every rank has its World, device, store and process group.

    Collective over all processes of the launch. ``make_group=False`` leaves the group to a script
    that calls init_process_group() itself. Raises nothing but what `failure` lets rise in a
    notebook: a failure ends the job.
    """
    session = _Starter(options, way_out, make_group).run()
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


class _Starter:
    """One start-up. Each method is a phase, or a part of one."""

    def __init__(self, options: Options, way_out: WayOut, make_group: bool) -> None:
        self.options = options
        self.way_out = way_out
        self.make_group = make_group
        self.session = Session(way_out, options.timeout)
        self.launcher: Launcher | None = None
        self.neighbourhood: Neighbourhood | None = None
        self.torch_import: TorchImport | None = None
        self.reception: Reception | None = None
        self.descriptor: int | None = None
        self.assignment: device.Assignment
        way_out.seconds = options.timeout

    def run(self) -> Session:
        self.watch = Watch(self.options.timeout, self.way_out.expire)
        try:
            with self.watch.phase("MPI"):
                self._settle(self._begin_import)
                self._settle(self._start_mpi)
            with self.watch.phase("import torch"):
                self._settle(self._join_import)
            with self.watch.phase("address"):
                self._settle(self._find_device)
                self._settle(self._take_device)
                self._settle(self._find_address)
            with self.watch.phase("store"):
                self._settle(self._open_store)
            if self.make_group:
                with self.watch.phase("group"):
                    self._settle(self._open_group)
                with self.watch.phase("first all-reduce"):
                    self._settle(self._try_group)
            with self.watch.phase("summary"):
                self._conclude()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.watch.close()
        return self.session

    def _abandon(self) -> None:
        if self.torch_import is not None:
            self.torch_import.wake_collector()
        if self.reception is not None:
            self.reception.hand_over(None)
        self.session.abandon()

    def _settle(self, work: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:
            error = caught
        self.way_out.settle(error)

    def _begin_import(self) -> None:
        self.torch_import = TorchImport()

    def _start_mpi(self) -> None:
        session, way_out = self.session, self.way_out
        self.launcher = way_out.launcher = find_launcher()
        module = self._load_mpi()
        if module is None:
            way_out.world = session.world
            return
        session._module = module
        if way_out.communicator is None:
            session._finalize = mpi.initialize(module)
        version = module.Get_library_version()
        check_size(module.COMM_WORLD.Get_size(), version, self.launcher)
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

    def _join_import(self) -> None:
        assert self.torch_import is not None
        self.torch_import.join()

    def _find_device(self) -> None:
        # Ends before the other nodes are asked anything: sharing is one node's own failure.
        world = self.session.world
        node = self.neighbourhood.node if self.neighbourhood is not None else None
        placement = device.find_placement(world)
        self.assignment = device.assign(world, node, placement, self.options.allow_shared_gpu)

    def _take_device(self) -> None:
        import torch

        session = self.session
        session.backend = self._choose_backend()
        # A script chooses its device itself; making a context for it would not be "unchanged".
        session.device = device.take_device(self.assignment, select=self.make_group)
        if not os.environ.get(environment.OMP_NUM_THREADS):
            torch.set_num_threads(self.assignment.threads)
            session.export({environment.OMP_NUM_THREADS: str(self.assignment.threads)})
        session.threads = torch.get_num_threads()

    def _choose_backend(self) -> str:
        session = self.session
        shares = session.any(self.assignment.shared)
        lacks = self.assignment.index is None
        lacking = None
        if session.any(lacks):
            ranks = session._own.allgather(lacks) if session._own is not None else [lacks]
            lacking = ranks.index(True)
        return device.choose_backend(self.options.backend, shares, lacking)

    def _find_address(self) -> None:
        """Agree on the address of the store, and tell every rank of its node's interfaces."""
        session = self.session
        found: tuple[rendezvous.Meeting, str, dict[str, str]] | None = None
        error: BaseException | None = None
        if self.neighbourhood is None or self.neighbourhood.leaders is not None:
            try:
                found = self._meet()
            except Exception as caught:
                error = caught
        if self.neighbourhood is not None:
            failed = self.neighbourhood.node.bcast(error is not None)
            if failed and error is None:
                # The leader of this node reports it.
                error = ConfigurationError(f"rank {session.world.rank}'s node found no address")
        if error is not None:
            raise error
        if self.neighbourhood is not None:
            found = self.neighbourhood.node.bcast(found)
        assert found is not None
        session.meeting, self.interface, variables = found
        session.export(variables)

    def _meet(self) -> tuple[rendezvous.Meeting, str, dict[str, str]]:
        """The leaders' part: candidates, attempts, agreement."""
        world = self.session.world
        interfaces = network.list_interfaces()
        rule = find_rule(self.options.interface, world.hostname)
        problem: Exception | None = None
        if world.rank == 0:
            try:
                self.reception = Reception(
                    network.list_candidates(interfaces, rule, world.node_count, world.hostname)
                )
            except Exception as error:
                problem = error
        leaders = self.neighbourhood.leaders if self.neighbourhood is not None else None
        if leaders is not None and leaders.bcast(problem is not None):
            raise problem or ConfigurationError("rank 0 has no address to offer")
        if leaders is not None:
            agreement = meet(self.reception, leaders, world.hostname, self.options.timeout)
        elif self.reception is not None:
            agreement = self.reception.agree_alone()
        else:
            raise problem or ConfigurationError("this process has no address to offer")
        winner = agreement.common[0]
        if self.reception is not None:
            self.descriptor = self.reception.hand_over(winner)
            self.reception = None
        offer = agreement.offers[winner]
        meeting = rendezvous.Meeting(
            offer.candidate.address, offer.port, offer.candidate.interface, agreement.token.hex()
        )
        names = (network.find_interface(interfaces, a) for a in agreement.local_addresses)
        used = list(dict.fromkeys(name for name in names if name is not None))
        variables = network.choose_variables(interfaces, used, rule, world.node_count)
        return meeting, used[0] if used else "?", variables

    def _open_store(self) -> None:
        session = self.session
        session._store = rendezvous.make_store(
            session.meeting, session.world, self.descriptor, self.options.timeout
        )
        session.export(torchrun_variables(session))

    def _open_group(self) -> None:
        session = self.session
        rendezvous.make_group(
            session._store, session.world, session.backend, session.device, self.options.timeout
        )
        session._group = True

    def _try_group(self) -> None:
        rendezvous.first_all_reduce(self.session.world, self.session.device)

    def _conclude(self) -> None:
        """Say what was started, and let go of what only start-up needed."""
        session = self.session
        assert self.torch_import is not None
        durations = self.watch.durations | {"import torch": self.torch_import.seconds}
        seconds = {phase: durations[phase] for phase in PHASES if phase in durations}
        slowest = summary.find_slowest(seconds, session._own)
        report = summary.NodeReport(
            interface=self.interface,
            device=summary.describe_device(session.device, session.threads),
            remarks=self.assignment.remarks,
        )
        leaders = self.neighbourhood.leaders if self.neighbourhood is not None else None
        reports = leaders.gather(report) if leaders is not None else [report]
        if session.world.rank == 0 and reports is not None:
            oddities = find_oddities(session.world, self.launcher, self.way_out.roster)
            block = summary.describe_start(session, self.way_out.roster, reports, slowest, oddities)
            sys.stderr.write(block)
            sys.stderr.flush()
        if self.neighbourhood is not None:
            self.neighbourhood.close()
        self.way_out.store = session._store
