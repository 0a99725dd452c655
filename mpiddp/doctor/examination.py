"""The order in which a launch is examined.

The ranks go through the same phases of start-up as training (`launch.phases`), each with a
deadline. Between its stages every rank looks at what it can see by itself; the first rank
of each node judges its node, and rank 0 merges what the nodes found. torch is imported meanwhile.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from mpiddp import environment
from mpiddp.doctor.examiner.doctor_options import DoctorOptions
from mpiddp.doctor.examiner.examiner import Examiner, Stages
from mpiddp.doctor.examiner.findings import failed, passed, skipped
from mpiddp.doctor.examiner.findings_report import FindingsReport
from mpiddp.doctor.gpu.gpu_stage import examine_gpus, examine_transport
from mpiddp.doctor.network import routes
from mpiddp.doctor.network.network_stage import examine_network
from mpiddp.doctor.node import launching, software
from mpiddp.doctor.node.node_stage import examine_nodes
from mpiddp.errors import LaunchError
from mpiddp.launch import phases
from mpiddp.launch.failure.deadline import CLOSING
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.hostnames import is_host
from mpiddp.launch.mpi.world import find_oddities
from mpiddp.launch.phases import Compute, JobRanks, StartUp
from mpiddp.launch.rendezvous.route import Route
from mpiddp.launch.resources import Resources
from mpiddp.launch.summary import find_slowest
from mpiddp.launch.torch_import import TorchImport
from mpiddp.process.streams.console import FORWARD_SECONDS
from mpiddp.wording import count_noun

ALL_REDUCE = "all-reduce"
THE_REST = "the rest"


@dataclass(frozen=True)
class Examined:
    """How far an examination came."""

    left_out: str = ""
    """Why the rest was left out; empty if nothing was."""
    compute: Compute | None = None
    store: Any = None
    """torch's; also once there is a group."""


def examine(settings: DoctorOptions, failure_handler: FailureHandler) -> int:
    """Examine, print, close. Returns the exit code, the same on every rank. Collective.

    A failure of the examination itself ends the job, as any failure does.
    """
    start_up = StartUp(settings, failure_handler)
    before = dict(os.environ)
    stages = Stages(settings, failure_handler)
    try:
        with stages.stage("MPI"):
            torch_import = start_up.settle(phases.begin_import)
            ranks = _start_mpi(start_up, stages)
            examiner = Examiner(settings, start_up, ranks, stages, before)
            _judge_launch(examiner, stages.report)
        examined = _examine(examiner, torch_import)
        with stages.stage("summary"):
            code = _conclude(stages, ranks, examined)
        resources = Resources(
            start_up,
            ranks,
            examined.compute,
            store=examined.store,
            has_group=examined.store is not None,
        )
        with stages.stage(CLOSING):
            resources.close(ranks.control)
    finally:
        stages.close()
    return code


def _examine(examiner: Examiner, torch_import: TorchImport) -> Examined:
    """All stages after MPI. Collective."""
    stage, ranks = examiner.stage, examiner.ranks
    with stage("code"):
        is_same = _compare_code(examiner)
    if not is_same:
        # Who closes a session must not meet a torch that is still being imported.
        with stage("import torch"):
            _wait_for_torch(examiner, torch_import)
        return Examined("ranks that run different code cannot be examined together")
    with stage("node"):
        examine_nodes(examiner)
    with stage("import torch"):
        seconds = _wait_for_torch(examiner, torch_import)
        if seconds is None:
            return Examined("nothing further works without torch")
        _compare_torch(examiner, seconds)
    with stage("address"):
        found = examiner.attempt(routes.INTERFACES, phases.find_address, ranks)
    with stage("network"):
        are_linked = found is not None and examine_network(examiner, found[0])
    with stage("GPUs"):
        gpus = examine_gpus(examiner)
    compute = gpus.compute if gpus is not None else None
    if found is None:
        return Examined("the ranks did not find each other", compute)
    if not are_linked:
        return Examined("nodes that do not reach each other make no group", compute)
    if gpus is None:
        return Examined("the ranks have no devices to work on")
    store, works = _try_group(examiner, gpus.compute, *found)
    if not works:
        return Examined("there is no group of all ranks", compute, store)
    if gpus.compute.backend == "nccl":
        examine_transport(examiner, gpus)
    return Examined(compute=compute, store=store)


# MPI, ranks, code, torch


def _start_mpi(start_up: StartUp, stages: Stages) -> JobRanks:
    handler = start_up.failure_handler
    try:
        ranks = phases.start_mpi(start_up)
    except LaunchError as error:
        _refuse(stages, error)
    except BaseException as error:  # It ends the job.
        handler.settle(error)
    handler.settle(None)
    return ranks


def _refuse(stages: Stages, error: LaunchError) -> NoReturn:
    """A launch that cannot become one: every process may be alone, and one reports."""
    report = stages.report
    if report is not None:
        stages.add(failed(launching.MPI_LIBRARY, str(error), code=error.exit_code))
        stages.add(skipped(THE_REST, "without MPI the ranks cannot be examined together"))
        report.conclude()
    stages.failure_handler.fail(error, told=report is not None)
    raise error


def _judge_launch(examiner: Examiner, report: FindingsReport | None) -> None:
    ranks, world, launcher = examiner.ranks, examiner.world, examiner.ranks.launcher
    library, missing = None, ""
    if ranks.module is None:
        missing = launching.find_mpi(examiner.before)
    else:
        library = ranks.module.Get_library_version()
    examiner.add(launching.judge_library(library, launcher, missing))
    if asked := examiner.before.get(environment.ASKED_HOSTS):
        examiner.add(launching.judge_hosts(asked))
    others = examiner.gather_on_node(world.hostname)
    others = [name for name in others or () if not is_host(name, world.hostname)]
    rows = examiner.gather_nodes(sorted(set(others)))
    if rows is not None:
        hostnames = examiner.hostnames
        strangers = {name: row for name, row in zip(hostnames, rows, strict=True) if row}
        oddities = find_oddities(world, launcher, ranks.roster)
        examiner.add(launching.judge_ranks(world, ranks.roster, oddities, strangers))
        if report is not None:
            report.note_place(world.size, hostnames)
    if report is not None:
        slurm = launcher is not None and launcher.key == "slurm"
        setting = launching.find_slurm_setting() if slurm else None
        examiner.add(launching.judge_kill_on_bad_exit(launcher, setting))


def _compare_code(examiner: Examiner) -> bool:
    rows = examiner.gather(software.find_versions())
    finding = None
    if rows is not None:
        finding = software.judge_versions(software.CODE, rows, examiner.describe_rank)
        examiner.add(finding)
    return examiner.control.broadcast(finding is None or finding.code == 0)


def _wait_for_torch(examiner: Examiner, torch_import: TorchImport) -> float | None:
    return examiner.attempt(
        software.IMPORT_TORCH,
        phases.join_import,
        torch_import,
        expected=Exception,
        advice=software.ADVICE,
    )


def _compare_torch(examiner: Examiner, seconds: float) -> None:
    name = software.IMPORT_TORCH
    import torch

    rows = examiner.gather((f"torch {torch.__version__}",))
    if rows is not None:
        versions = software.judge_versions(software.TORCH_VERSION, rows, examiner.describe_rank)
        examiner.add(versions)
    longest, rank = find_slowest({name: seconds}, examiner.ranks.comm)[name]
    size = examiner.world.size
    examiner.add(software.judge_import(longest, examiner.describe_rank(rank), size))
    mine = [software.judge_torchvision(*software.find_torchvision())] if examiner.leads_node else []
    nodes = examiner.gather_nodes(mine)
    if nodes is not None:
        examiner.add_merged(nodes)


# Store and group


def _try_group(
    examiner: Examiner, compute: Compute, route: Route, descriptor: int | None
) -> tuple[Any, bool]:
    """The store, as far as there is one, and whether the group works."""
    ranks, begin = examiner.ranks, time.monotonic()
    with examiner.stage("store"):
        store = examiner.attempt(
            ALL_REDUCE, phases.open_store, ranks, compute, route, descriptor, expected=Exception
        )
    if store is None:
        return None, False

    def open_group(start_up: StartUp) -> bool:
        phases.open_group(start_up, ranks, compute, store)
        return True

    def try_group(start_up: StartUp) -> bool:
        phases.try_group(start_up, ranks, compute)
        return True

    for phase, work in (("group", open_group), ("first all-reduce", try_group)):
        with examiner.stage(phase):
            if not examiner.attempt(ALL_REDUCE, work, expected=Exception):
                return store, False
    seconds = time.monotonic() - begin
    meeting = route.meeting
    examiner.add(
        passed(
            ALL_REDUCE,
            f"right on {count_noun(ranks.world.size, 'rank')} with {compute.backend}; store at "
            f"{meeting.address}:{meeting.port}; {seconds:.2f} s for store, group and first "
            "all-reduce",
        )
    )
    return store, True


def _conclude(stages: Stages, ranks: JobRanks, examined: Examined) -> int:
    code = 0
    if stages.report is not None:
        if examined.left_out:
            stages.add(skipped(THE_REST, f"not examined: {examined.left_out}"))
        code = stages.report.conclude()
        if code != 0 and ranks.world.size > 1:
            # A launcher may forget what it has not forwarded when a rank fails.
            time.sleep(FORWARD_SECONDS)
    return ranks.control.broadcast(code)
