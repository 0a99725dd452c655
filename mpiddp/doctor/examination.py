"""The order in which a launch is examined.

The ranks go through the same start-up as training (`launch.startup.Starter`), stage by stage, each
with a deadline. Between its stages every rank looks at what it can see by itself; the first rank
of each node judges its node, and rank 0 merges what the nodes found. torch is imported meanwhile.
"""

from __future__ import annotations

import time

from mpiddp.doctor.examiner.doctor_options import DoctorOptions
from mpiddp.doctor.examiner.examiner import Examiner
from mpiddp.doctor.examiner.findings import failed, passed, skipped
from mpiddp.doctor.gpu.gpu_stage import GpuStage
from mpiddp.doctor.network import routes
from mpiddp.doctor.network.network_stage import examine_network
from mpiddp.doctor.node import launching, software
from mpiddp.doctor.node.node_stage import examine_nodes
from mpiddp.errors import LaunchError
from mpiddp.launch.failure.deadline import CLOSING
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.hostnames import is_host
from mpiddp.launch.mpi.world import find_oddities
from mpiddp.launch.summary import find_slowest
from mpiddp.process.streams.console import FORWARD_SECONDS
from mpiddp.wording import count_noun

ALL_REDUCE = "all-reduce"
THE_REST = "the rest"


def examine(settings: DoctorOptions, failure_handler: FailureHandler) -> int:
    """Examine, print, close. Returns the exit code, the same on every rank. Collective.

    A failure of the examination itself ends the job, as any failure does.
    """
    examiner = Examiner(settings, failure_handler)
    starter = examiner.starter
    try:
        reason = _examine(examiner)
        with examiner.stage("summary"):
            code = _conclude(examiner, reason)
        starter.close_offers()
        with examiner.stage(CLOSING):
            starter.collect().close(starter.control)
    finally:
        examiner.close()
    return code


def _examine(examiner: Examiner) -> str | None:
    """All stages; returns why the rest was left out, None if nothing was. Collective."""
    stage, starter = examiner.stage, examiner.starter
    with stage("MPI"):
        _start_mpi(examiner)
    with stage("code"):
        is_same = _compare_code(examiner)
    if not is_same:
        # Who closes a session must not meet a torch that is still being imported.
        with stage("import torch"):
            _wait_for_torch(examiner)
        return "ranks that run different code cannot be examined together"
    with stage("node"):
        examine_nodes(examiner)
    with stage("import torch"):
        has_torch = _wait_for_torch(examiner)
        if has_torch:
            _compare_torch(examiner)
    if not has_torch:
        return "nothing further works without torch"
    with stage("address"):
        found_route = examiner.attempt(starter.find_address, routes.INTERFACES)
    with stage("network"):
        are_linked = found_route and examine_network(examiner)
    gpu_stage = GpuStage(examiner)
    with stage("GPUs"):
        has_devices = gpu_stage.examine_gpus()
    if not found_route:
        return "the ranks did not find each other"
    if not are_linked:
        return "nodes that do not reach each other make no group"
    if not has_devices:
        return "the ranks have no devices to work on"
    if not _try_group(examiner):
        return "there is no group of all ranks"
    if starter.backend == "nccl":
        gpu_stage.examine_transport()
    return None


# MPI, ranks, code, torch


def _start_mpi(examiner: Examiner) -> None:
    starter, report = examiner.starter, examiner.report
    starter.settle(starter.begin_import)
    try:
        starter.start_mpi()
    except LaunchError as error:
        _refuse(examiner, error)
    except BaseException as error:  # `settle` ends the job with it.
        examiner.failure_handler.settle(error)
    else:
        examiner.failure_handler.settle(None)
    launcher = starter.peers.launcher
    module = starter.module
    library = module.Get_library_version() if module is not None else None
    missing = launching.find_mpi(examiner.before) if module is None else ""
    examiner.add(launching.judge_library(library, launcher, missing))
    world, roster = starter.control.world, starter.peers.roster
    others = examiner.gather_on_node(world.hostname)
    others = [name for name in others or () if not is_host(name, world.hostname)]
    rows = examiner.gather_nodes(sorted(set(others)))
    if rows is not None:
        hostnames = examiner.hostnames()
        strangers = {name: row for name, row in zip(hostnames, rows, strict=True) if row}
        oddities = find_oddities(world, launcher, roster)
        examiner.add(launching.judge_ranks(world, roster, oddities, strangers))
        if report is not None:
            report.note_place(world.size, hostnames)
    if report is not None:
        slurm = launcher is not None and launcher.key == "slurm"
        setting = launching.find_slurm_setting() if slurm else None
        examiner.add(launching.judge_kill_on_bad_exit(launcher, setting))


def _refuse(examiner: Examiner, error: LaunchError) -> None:
    """A launch that cannot become one: every process may be alone, and one reports."""
    report = examiner.report
    if report is not None:
        examiner.add(failed(launching.MPI_LIBRARY, str(error), code=error.exit_code))
        examiner.add(skipped(THE_REST, "without MPI the ranks cannot be examined together"))
        report.conclude()
    examiner.failure_handler.fail(error, told=report is not None)
    raise error


def _compare_code(examiner: Examiner) -> bool:
    rows = examiner.gather(software.find_versions())
    finding = None
    if rows is not None:
        finding = software.judge_versions(software.CODE, rows, examiner.describe_rank)
        examiner.add(finding)
    return examiner.starter.control.broadcast(finding is None or finding.code == 0)


def _wait_for_torch(examiner: Examiner) -> bool:
    join = examiner.starter.join_import
    return examiner.attempt(join, software.IMPORT_TORCH, Exception, software.ADVICE)


def _compare_torch(examiner: Examiner) -> None:
    starter, name = examiner.starter, software.IMPORT_TORCH
    import torch

    rows = examiner.gather((f"torch {torch.__version__}",))
    if rows is not None:
        versions = software.judge_versions(software.TORCH_VERSION, rows, examiner.describe_rank)
        examiner.add(versions)
    assert starter.torch_import is not None
    seconds = {name: starter.torch_import.seconds}
    longest, rank = find_slowest(seconds, starter.comm)[name]
    size = starter.control.world.size
    examiner.add(software.judge_import(longest, examiner.describe_rank(rank), size))
    mine = [software.judge_torchvision(*software.find_torchvision())] if examiner.leads_node else []
    nodes = examiner.gather_nodes(mine)
    if nodes is not None:
        examiner.add_merged(nodes)


# Store and group


def _try_group(examiner: Examiner) -> bool:
    starter = examiner.starter
    begin = time.monotonic()
    for phase, work in (
        ("store", starter.open_store),
        ("group", starter.open_group),
        ("first all-reduce", starter.try_group),
    ):
        with examiner.stage(phase):
            if not examiner.attempt(work, ALL_REDUCE, Exception):
                return False
    seconds = time.monotonic() - begin
    meeting, ranks = starter.route.meeting, count_noun(starter.control.world.size, "rank")
    examiner.add(
        passed(
            ALL_REDUCE,
            f"right on {ranks} with {starter.backend}; store at "
            f"{meeting.address}:{meeting.port}; {seconds:.2f} s for store, group and first "
            "all-reduce",
        )
    )
    return True


def _conclude(examiner: Examiner, reason: str | None) -> int:
    code = 0
    if examiner.report is not None:
        if reason is not None:
            examiner.add(skipped(THE_REST, f"not examined: {reason}"))
        code = examiner.report.conclude()
        if code != 0 and examiner.starter.control.world.size > 1:
            # A launcher may forget what it has not forwarded when a rank fails.
            time.sleep(FORWARD_SECONDS)
    return examiner.starter.control.broadcast(code)
