"""What a training step takes, by synchronisation: its two jobs, and the cells of each contender.

What every contender trains is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.measure.engine import CellGroup, Quantity
from benchmarks.measure.launching.paired_jobs import start_jobs
from benchmarks.measure.launching.srun import Launcher
from benchmarks.measure.training_step.synchronisations import (
    BASE,
    BASES,
    DATA_PARALLEL,
    FUSED,
    OWN_BASE,
    USUAL,
    StepPlan,
    Synchronisation,
)
from benchmarks.measure.training_step.tables import PARTS, SPEED, STEP, tabulate
from benchmarks.measure.training_step.targets import judge
from benchmarks.measure.training_step.traffic import StepTraffic
from benchmarks.measure.training_step.visits import StepVisitor, TimedLink, check_device, probe_link
from benchmarks.measure.trials import Surroundings, make_steps_cell
from benchmarks.records.contenders import MPI_JOB, TORCH_JOB
from benchmarks.records.options import RunOptions, describe_algorithms
from benchmarks.records.schema import Cell, Coordinate, make_cell
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import check_servers
from mpiddp.schedules.registry import parse as parse_algorithm
from mpiddp.training.options.groups.straggler import parse_straggler

WORKER = "benchmarks.measure.training_step.worker"


def complete(options: RunOptions[StepPlan]) -> StepPlan:
    plan = options.plan
    plan = replace(plan, ranks=options.choose_ranks(plan.ranks, here=(2, 4), on_cluster=(4,)))
    for ranks in plan.ranks:
        for contender in plan.contenders:
            check_contender(contender, ranks, plan)
    if plan.straggler is not None:
        slow = parse_straggler(plan.straggler).rank
        if slow is not None and slow >= min(plan.ranks):
            raise ConfigurationError(
                f"--straggler: expected a rank below {min(plan.ranks)}, the fewest of --ranks, "
                f"found {slow}"
            )
    return plan


def check_contender(contender: Synchronisation, ranks: int, plan: StepPlan) -> None:
    contender.configure(ranks, plan.batch_size, plan.seed)
    if contender.serves:
        dedicated = contender.placement == "dedicated"
        try:
            check_servers(ranks, contender.count_servers(ranks), dedicated=dedicated)
        except ConfigurationError as error:
            raise ConfigurationError(f"--sync {contender.name}: {error}") from None
    elif contender.averages and contender.sync != "auto":
        members = parse_algorithm(contender.sync).build(ranks).members
        if len(members) < ranks:
            raise ConfigurationError(
                f"--sync {contender.sync}: it leaves out the gradients of {ranks - len(members)} "
                f"of {ranks} ranks, which only serve; give parameter-server"
            )
    elif contender.sync == DATA_PARALLEL and plan.device == "cpu":
        raise ConfigurationError("--sync data-parallel drives GPUs, but --device is cpu")


def measure(plan: StepPlan, launcher: Launcher) -> Iterator[CellGroup]:
    """Check and time all contenders, by ranks and workload.

    Raises RunError, with a job's output, if one fails; ConfigurationError if there are no GPUs but
    some were asked for.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if plan.device == "cpu" else {}
    for ranks in plan.ranks:
        with start_jobs(WORKER, ranks, launcher, plan.deadline, hidden) as jobs:
            greeting = jobs[TORCH_JOB].greeting
            check_device(plan.device, [jobs[MPI_JOB].greeting, greeting])
            link = probe_link(jobs[MPI_JOB]) if plan.link else None
            rows = [*BASES, *plan.contenders]
            if not plan.sync and greeting["gpus"] >= ranks:
                rows.append(Synchronisation(DATA_PARALLEL))
            for workload in plan.models:
                visitor = StepVisitor(jobs, plan, ranks, workload)
                around = Surroundings(ranks=ranks, nodes=launcher.nodes, framework=greeting)
                try:
                    share = visitor.visit_all(rows, jobs, local=launcher.nodes is None)
                except KeyboardInterrupt:
                    if visitor.keep_whole_rounds():
                        yield make_group(visitor, around, link)
                    raise
                for job in jobs.values():
                    job.ask({"do": "let go"}, "letting models go")
                yield make_group(visitor, replace(around, others_share=share), link)


# ---- cells ---------------------------------------------------------------------------------------


def make_group(
    visitor: StepVisitor, around: Surroundings, link: TimedLink | None = None
) -> CellGroup:
    """Its cells, what was left out or wrong, and what holds for all of it."""
    where: dict[str, Coordinate] = {"model": str(visitor.workload), "ranks": around.ranks}
    device = {name: around.framework.get(name) for name in ("device", "gpu", "gpus", "backend")}
    facts = {
        "nodes": around.nodes,
        "others_share": around.others_share,
        "link": asdict(link) if link is not None else None,
    }
    return CellGroup(
        **vars(around),
        cells=[cell for key in visitor.visits for cell in make_cells(visitor, key, around)],
        refusals=visitor.list_refusals(STEP, where),
        facts={**where, **facts, **device},
    )


def make_cells(
    visitor: StepVisitor, contender: Synchronisation, around: Surroundings
) -> Iterator[Cell]:
    """Of a contender its step, that step's parts and its samples per second."""
    plan, series = visitor.plan, visitor.list_series(contender)
    at: dict[str, Coordinate] = {"model": str(visitor.workload), "batch": plan.batch_size}
    if plan.straggler is not None:
        at["straggler"] = plan.straggler
    traffic = find_traffic(visitor, contender, is_on_gpu=around.framework.get("device") == "cuda")
    efficiency = find_efficiency(visitor, contender)
    details = {
        "workers": contender.count_workers(around.ranks),
        "efficiency": efficiency.estimate if efficiency is not None else None,
        "bytes": asdict(traffic) if traffic is not None else None,
        "read": [asdict(visit.reading) for visit in series.samples],
        "notes": dict(visitor.notes.get(contender, {})),
    }

    place = {"contender": contender.name, "ranks": around.ranks, "nodes": around.nodes or 1}
    yield make_steps_cell(series, details, quantity=STEP, at=at, **place)
    for part in PARTS:
        values = [getattr(visit, part) for visit in series.samples]
        yield make_cell(values, quantity=STEP, at={**at, "part": part}, **place)
    rates = [visit.samples_per_second for visit in series.samples]
    yield make_cell(rates, quantity=SPEED, at=at, unit="samples/s", **place)


def find_efficiency(visitor: StepVisitor, contender: Synchronisation) -> Ratio | None:
    """Samples per second over those of one rank alone times the ranks; None if unknown.

    The framework's loops are compared with one like them, mpiddp's with one like those: otherwise
    a faster optimizer would look like a faster synchronisation. For that reason there is none for
    the framework's loop with another optimizer.
    """
    base = BASE if contender.job == TORCH_JOB else OWN_BASE
    mine, alone = (
        [visit.samples_per_second for visit in visitor.list_samples(key)]
        for key in (contender, base)
    )
    if contender.sync == FUSED or not mine or not alone:
        return None
    ranks = 1 if contender in BASES else visitor.ranks
    times = [[visit.usual for visit in visitor.list_samples(key)] for key in visitor.visits]
    return compare_rounds([ranks * each for each in alone], mine, find_common([times]))


def find_traffic(
    visitor: StepVisitor, contender: Synchronisation, *, is_on_gpu: bool = False
) -> StepTraffic | None:
    """Counted by what is sent, where that is known; else as interfaces counted."""
    visits = visitor.list_samples(contender)
    if not visits or contender in BASES:
        return None
    traffic = visitor.notes.get(contender, {}).get("traffic")
    if traffic is not None:
        return StepTraffic(traffic["each"], traffic["busiest"], is_read=False)
    if is_on_gpu:
        # NCCL's bytes pass by no interface within a node.
        return None
    # Other programs' bytes can only add to it.
    each = min(visit.reading.each for visit in visits)
    busiest = [visit.reading.busiest for visit in visits if visit.reading.busiest is not None]
    return StepTraffic(each, min(busiest, default=None), is_read=True)


QUANTITY = Quantity(
    command="training-step",
    description="Time training steps in turns, by synchronisation: compute, communication that "
    "nothing hides, update; with samples per second, efficiency and bytes.",
    explanation="""\
A step is the slowest rank's. compute: forward and backward alone, in passes of their own, all ranks
at once; update: the optimizer; exposed: what is left, communication that nothing hides (noise may
make it negative); where servers update, that is in it. Efficiency: samples per second, over those
of one rank alone, the framework's or mpiddp's, times the ranks. Bytes are counted by what is sent;
~ is what interfaces counted, headers included.""",
    epilog="SYNC is framework, framework-fused, framework-mpiddp (DDP over that backend), auto, "
    "an algorithm, parameter-server (for example "
    "parameter-server:servers=ranks,placement=dedicated,staleness=3), or data-parallel. "
    f"By default: {' '.join(USUAL)}. {describe_algorithms('ring:segments=4')}",
    on_cluster=True,
    plan=StepPlan,
    complete=complete,
    measure=measure,
    tabulate=tabulate,
    judge=judge,
    is_told_at_once=True,
)
