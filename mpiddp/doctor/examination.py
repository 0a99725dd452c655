"""The order in which a launch is examined.

The ranks go through the same start-up as training (`launch.startup.Starter`), stage by stage, each
with a deadline. Between its stages every rank looks at what it can see by itself; the first rank
of each node judges its node, and rank 0 merges what the nodes found. torch is imported meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpiddp import environment
from mpiddp.doctor import (
    cores,
    directories,
    gpus,
    launching,
    links,
    name_resolution,
    nccl,
    network,
    node,
    software,
    variables,
)
from mpiddp.doctor.findings import Finding, failed, merge, passed, skipped, timed
from mpiddp.doctor.gathering import Circle
from mpiddp.doctor.options import Settings
from mpiddp.doctor.report import Report, open_report
from mpiddp.errors import LaunchError, MpiddpError
from mpiddp.launch import device
from mpiddp.launch.failure.deadline import CLOSING, Watch
from mpiddp.launch.failure.error_report import exit_code
from mpiddp.launch.failure.failure import FORWARD_SECONDS, WayOut
from mpiddp.launch.launcher.hostnames import is_host
from mpiddp.launch.launcher.launcher import find_launcher, is_first
from mpiddp.launch.network.infiniband import find_infiniband
from mpiddp.launch.network.interface_rule import find_rule
from mpiddp.launch.network.interfaces import list_interfaces
from mpiddp.launch.startup import Starter
from mpiddp.launch.summary import find_slowest
from mpiddp.launch.world import find_oddities

if TYPE_CHECKING:
    from mpi4py import MPI

ALL_REDUCE = "all-reduce"
THE_REST = "the rest"

NodeRow = tuple[list[Finding], directories.Place | None, variables.Row]
"""What one node tells of itself: its findings, its data directory, its variables."""

GpuRow = tuple[list[Finding], list[tuple[int, str, str, float]]]
"""What one node tells of its GPUs: its findings; of each its rank, name, NCCL and speed."""


class Examination:
    """One examination of one launch. Every rank makes one; rank 0 holds the report."""

    def __init__(self, settings: Settings, way_out: WayOut) -> None:
        self.settings = settings
        self.way_out = way_out
        self.starter = Starter(settings.launch, way_out, make_group=True)
        self.report: Report | None = None
        if is_first():
            self.report = open_report(settings.json, find_launcher())
        self.circle = Circle(self.starter)
        self.before = dict(os.environ)
        """What start-up found; it sets variables itself."""
        self.variables = variables.find_variables(self.before)
        self.infiniband = find_infiniband()
        self.recording: nccl.Recording | None = None
        self.peers = False
        """Whether the GPUs of this node can read each other's memory."""
        self.found_route = False
        self.began = time.monotonic()

    def run(self) -> int:
        """Examine, print, close. Returns the exit code, the same on every rank. Collective.

        A failure of the examination itself ends the job by the way out.
        """
        self.watch = Watch(self.settings.launch.timeout, self.way_out.expire)
        try:
            reason = self._examine()
            with self._stage("summary"):
                code = self._conclude(reason)
            self.starter.close_offers()
            with self._stage(CLOSING):
                self.starter.resources.close(self.starter.control)
        finally:
            self.watch.close()
        return code

    def _examine(self) -> str | None:
        """All stages; returns why the rest was left out, None if nothing was. Collective."""
        with self._stage("MPI"):
            self._start_mpi()
        with self._stage("code"):
            is_same = self._compare_code()
        if not is_same:
            # Who closes a session must not meet a torch that is still being imported.
            with self._stage("import torch"):
                self._wait_for_torch()
            return "ranks that run different code cannot be examined together"
        with self._stage("node"):
            self._look_at_nodes()
        with self._stage("import torch"):
            has_torch = self._wait_for_torch()
            if has_torch:
                self._compare_torch()
        if not has_torch:
            return "nothing further works without torch"
        with self._stage("address"):
            self.found_route = self._attempt(self.starter.find_address, network.INTERFACES)
        with self._stage("network"):
            are_linked = self.found_route and self._look_at_network()
        with self._stage("GPUs"):
            has_devices = self._look_at_gpus()
        if not self.found_route:
            return "the ranks did not find each other"
        if not are_linked:
            return "nodes that do not reach each other make no group"
        if not has_devices:
            return "the ranks have no devices to work on"
        return self._try_group()

    # MPI, ranks, code

    def _start_mpi(self) -> None:
        self.starter.settle(self.starter.begin_import)
        try:
            self.starter.start_mpi()
        except LaunchError as error:
            self._refuse(error)
        except BaseException as error:
            self.way_out.settle(error)
        else:
            self.way_out.settle(None)
        launcher = self.starter.peers.launcher
        self._add(launching.judge_library(self._find_library(), launcher))
        world, roster = self.starter.control.world, self.starter.peers.roster
        others = self.circle.gather_on_node(world.hostname)
        others = [name for name in others or () if not is_host(name, world.hostname)]
        rows = self.circle.gather_nodes(sorted(set(others)))
        if rows is not None:
            hostnames = self.circle.hostnames()
            strangers = {name: row for name, row in zip(hostnames, rows, strict=True) if row}
            oddities = find_oddities(world, launcher, roster)
            self._add(launching.judge_ranks(world, roster, oddities, strangers))
            if self.report is not None:
                self.report.place = {"ranks": world.size, "nodes": list(hostnames)}
        if self.report is not None:
            slurm = launcher is not None and launcher.key == "slurm"
            setting = launching.find_slurm_setting() if slurm else None
            self._add(launching.judge_kill_on_bad_exit(launcher, setting))

    def _find_library(self) -> str | None:
        """What the MPI library says of itself; None for a process that does without."""
        if self.starter.resources.comm is None:
            return None
        from mpi4py import MPI

        return MPI.Get_library_version()

    def _refuse(self, error: LaunchError) -> None:
        """A launch that cannot become one: every process may be alone, and one reports."""
        if self.report is not None:
            self._add(failed(launching.MPI_LIBRARY, str(error), code=error.exit_code))
            self._add(skipped(THE_REST, "without MPI the ranks cannot be examined together"))
            self.report.conclude()
        self.way_out.fail(error, told=self.report is not None)
        raise error

    def _compare_code(self) -> bool:
        rows = self.circle.gather(software.find_versions())
        finding = None
        if rows is not None:
            finding = software.judge_versions(software.CODE, rows, self.circle.describe_rank)
            self._add(finding)
        return self.starter.control.broadcast(finding is None or finding.code == 0)

    # What each node sees by itself

    def _look_at_nodes(self) -> None:
        token: directories.Token | None = None
        content, problem = "", ""
        if self.starter.control.world.rank == 0:
            content = os.urandom(8).hex()
            token, problem = directories.put_token(self.settings.runs_dir, content)
        content, problem = self.starter.control.broadcast((content if token else "", problem))
        try:
            rows = self._judge_nodes(content, problem)
        finally:
            if token is not None:
                token.remove()
        if rows is None:
            return
        self._add_merged([row[0] for row in rows])
        data_dir, first = self.settings.data_dir, rows[0][1]
        self._add_merged([[directories.judge_data(data_dir, row[1], first)] for row in rows])
        every = [row[2] for row in rows]
        self._add(variables.judge_variables(self.circle.hostnames(), every, self.infiniband))

    def _judge_nodes(self, token: str, problem: str) -> list[NodeRow] | None:
        """Every node's part, gathered on rank 0.

        Args:
            token: what rank 0 has put into the run directory; empty if it could not, because of
                ``problem``.
        """
        world, settings = self.starter.control.world, self.settings
        resolution = name_resolution.begin_resolution(world.hostname)
        threads = self.before.get(environment.OMP_NUM_THREADS)
        bindings = self.circle.gather_on_node(
            cores.Binding(world.rank, device.find_cores(), threads)
        )
        mine: list[Finding] = []
        data: directories.Place | None = None
        if bindings is not None:
            runs = directories.Place(True, problem)
            if token:
                runs = directories.look_at_runs(settings.runs_dir, token)
            data = directories.look_at_data(settings.data_dir)
            found = name_resolution.finish_resolution(resolution, world.hostname)
            mine = [
                name_resolution.judge_host_name(found, world.node_count),
                cores.judge_cores(bindings),
                cores.judge_threads(bindings),
                *node.judge_limits(node.find_limits(), world.size),
                directories.judge_runs(settings.runs_dir, runs, world.node_count),
            ]
        return self.circle.gather_nodes((mine, data, self.variables))

    def _wait_for_torch(self) -> bool:
        return self._attempt(
            self.starter.join_import, software.IMPORT_TORCH, Exception, software.ADVICE
        )

    def _compare_torch(self) -> None:
        starter = self.starter
        import torch

        rows = self.circle.gather((f"torch {torch.__version__}",))
        if rows is not None:
            self._add(
                software.judge_versions(software.TORCH_VERSION, rows, self.circle.describe_rank)
            )
        assert starter.torch_import is not None
        seconds = {software.IMPORT_TORCH: starter.torch_import.seconds}
        longest, rank = find_slowest(seconds, starter.resources.comm)[software.IMPORT_TORCH]
        size = starter.control.world.size
        self._add(software.judge_import(longest, self.circle.describe_rank(rank), size))

    # Between the nodes

    def _look_at_network(self) -> bool:
        """Whether all nodes that were tried reach each other. Collective."""
        starter, world = self.starter, self.starter.control.world
        leaders = starter.neighbourhood.leaders if starter.neighbourhood is not None else None
        finding: Finding | None = None
        if starter.neighbourhood is None or leaders is not None:
            route = starter.route
            interfaces = list_interfaces()
            rule = find_rule(self.settings.launch.interface, world.hostname, self.before)
            way = network.find_way(
                route.interface,
                route.local_address,
                route.meeting.address,
                interfaces,
                route.variables,
                chosen_by_user=rule is not None,
            )
            unanswered, link = self._measure(leaders)
            mine = (way, name_resolution.judge_look_ups(unanswered), link)
            rows = self.circle.gather_nodes(mine)
            if rows is not None:
                ways = network.judge_ways([row[0] for row in rows])
                self._add_merged([[finding] for finding in ways])
                self._add_merged([[row[1]] for row in rows])
                measured = [row[2] for row in rows if row[2] is not None]
                finding = network.judge_links(measured)
                self._add(finding)
                self._add(network.judge_clocks(measured))
        return self.starter.control.broadcast(finding is None or finding.code == 0)

    def _measure(self, leaders: MPI.Intracomm | None) -> tuple[tuple[str, ...], links.Link | None]:
        """This node's look-ups and links: addresses that nobody answered for, and the link."""
        route, world = self.starter.route, self.starter.control.world
        peers = [route.meeting.address]
        if leaders is not None and leaders.Get_size() > 1:
            peers.append(links.find_neighbours(leaders, route.local_address))
            everyone = self.circle.gather_nodes(route.local_address)
            peers += name_resolution.choose_sample(everyone) if everyone is not None else []
        look_ups = name_resolution.LookUps(peers)
        link = None
        if leaders is not None and leaders.Get_size() > 1:
            token = bytes.fromhex(route.meeting.job)
            counter = links.Counter(route.local_address, token)
            try:
                link = links.measure(leaders, counter, world.hostname, token)
            finally:
                counter.close()
        return look_ups.finish(), link

    # GPUs

    def _look_at_gpus(self) -> bool:
        starter, world = self.starter, self.starter.control.world
        if not self._attempt(starter.find_device, gpus.GPUS):
            return False
        if starter.control.any(starter.assignment.index is not None):
            # Before NCCL is asked anything: it reads them once.
            self.recording = nccl.Recording()
            starter.resources.variables.export(self.recording.variables)
        if not self._attempt(starter.take_device, gpus.GPUS):
            return False
        own: list[gpus.Gpu] = []

        def examine() -> None:
            if starter.device.type == "cuda":
                own.append(gpus.examine_gpu(world.rank, starter.device))

        if not self._attempt(examine, gpus.GPUS, Exception):
            return False
        rows = self.circle.gather_on_node((starter.placement, own))
        mine: GpuRow = ([], [])
        if rows is not None:
            mine = self._judge_gpus([p for p, _ in rows], [gpu for _, row in rows for gpu in row])
        nodes = self.circle.gather_nodes(mine)
        if nodes is not None:
            cards = [card for _, row in nodes for card in row]
            self._add_merged([row for row, _ in nodes] if cards else [row[:1] for row, _ in nodes])
            if cards:
                hosts = {rank: self.circle.host_of(rank) for rank, *_ in cards}
                kinds = [(hosts[rank], name, version) for rank, name, version, _ in cards]
                self._add(gpus.judge_kinds(kinds))
                speeds = [(rank, name, speed) for rank, name, _, speed in cards]
                self._add(gpus.judge_speed(speeds, hosts))
        return True

    def _judge_gpus(
        self, placements: Sequence[device.Placement], found: Sequence[gpus.Gpu]
    ) -> GpuRow:
        """The first rank's part: its node's GPUs."""
        self.peers = bool(found) and all(gpu.peers for gpu in found)
        masks = {placement.rank: placement.cores for placement in placements}
        hidden = self.before.get(environment.CUDA_VISIBLE_DEVICES) == ""
        count = gpus.judge_count(
            self.starter.control.world.hostname,
            placements,
            found,
            0 if hidden else gpus.count_files(),
            are_allotted=environment.is_set((environment.SLURM_JOB_ID,), self.before),
        )
        cards = [(gpu.rank, gpu.name, gpu.nccl, gpu.speed) for gpu in found]
        return [count, gpus.judge_place(found, masks)], cards

    # Store and group

    def _try_group(self) -> str | None:
        starter = self.starter
        stages: tuple[tuple[str, Callable[[], None]], ...] = (
            ("store", starter.open_store),
            ("group", starter.open_group),
            ("first all-reduce", starter.try_group),
        )
        begin = time.monotonic()
        for phase, work in stages:
            with self._stage(phase):
                if not self._attempt(work, ALL_REDUCE, Exception):
                    return "there is no group of all ranks"
        seconds = time.monotonic() - begin
        meeting, backend = starter.route.meeting, starter.resources.backend
        self._add(
            passed(
                ALL_REDUCE,
                f"right on {_count(starter.control.world.size)} with {backend}; store at "
                f"{meeting.address}:{meeting.port}; {seconds:.2f} s for store, group and first "
                "all-reduce",
            )
        )
        if backend == "nccl":
            self._look_at_transport()
        return None

    def _look_at_transport(self) -> None:
        world = self.starter.control.world
        assert self.recording is not None
        rows = self.circle.gather_on_node(self.recording.finish())
        mine: list[Finding] = []
        if rows is not None:
            merged = nccl.merge_transports(rows)
            mine = [nccl.judge_transport(merged, self.infiniband, world.node_count, self.peers)]
        nodes = self.circle.gather_nodes(mine)
        if nodes is not None:
            self._add_merged(nodes)

    # The end

    def _conclude(self, reason: str | None) -> int:
        code = 0
        if self.report is not None:
            if reason is not None:
                self._add(skipped(THE_REST, f"not examined: {reason}"))
            code = self.report.conclude()
            if code != 0 and self.starter.control.world.size > 1:
                # A launcher may forget what it has not forwarded when a rank fails.
                time.sleep(FORWARD_SECONDS)
        return self.starter.control.broadcast(code)

    # Tools

    @contextmanager
    def _stage(self, phase: str) -> Iterator[None]:
        """A stage with its deadline; findings inside tell how long it took until them."""
        self.began = time.monotonic()
        with self.watch.phase(phase):
            yield

    def _add(self, finding: Finding) -> None:
        if self.report is not None:
            self.report.add(timed(finding, time.monotonic() - self.began))

    def _add_merged(self, rows: Sequence[Sequence[Finding]]) -> None:
        """Merge the nodes' findings, check by check; a row holds those of one node."""
        for findings in zip(*rows, strict=True):
            self._add(merge(self.circle.hostnames(), findings))

    def _attempt(
        self,
        work: Callable[[], None],
        check: str,
        expected: type[Exception] = MpiddpError,
        advice: str = "",
    ) -> bool:
        """Do a stage of start-up; an expected error is a finding. Whether none failed. Collective.

        What is not expected ends the job: it is the doctor's own failure.
        """
        error: Exception | None = None
        unexpected: BaseException | None = None
        try:
            work()
        except expected as caught:
            error = caught
        except BaseException as caught:
            unexpected = caught
        self.way_out.settle(unexpected)
        if not self.starter.control.any(error is not None):
            return True
        mine = (exit_code(error), _describe(error)) if error is not None else None
        rows = self.circle.gather((mine, isinstance(error, MpiddpError)))
        if rows is not None:
            rank, (first, ours) = next((i, row) for i, row in enumerate(rows) if row[0] is not None)
            assert first is not None
            code, text = first
            text = text if ours else f"{self.circle.describe_rank(rank)}: {text}"
            self._add(failed(check, text, advice, code))
        return False


def _count(ranks: int) -> str:
    return f"{ranks} rank" + ("s" if ranks > 1 else "")


def _describe(error: Exception) -> str:
    """One line for an error that is not ours; ours may hold a table."""
    if isinstance(error, MpiddpError):
        return str(error)
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
