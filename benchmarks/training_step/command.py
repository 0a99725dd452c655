"""``python -m benchmarks training-step``: what a training step takes, by synchronisation.

What every contender trains is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from benchmarks.allreduce.contenders import TRANSPORTS
from benchmarks.common import results, trials
from benchmarks.common.checks import check_run
from benchmarks.common.options import (
    Count,
    RunOptions,
    Seconds,
    SeveralRanks,
    describe_algorithms,
    make_reader,
    make_run,
)
from benchmarks.common.targets import format_targets
from benchmarks.common.trials import WrongResultError
from benchmarks.common.workloads import SHAPES, parse_workload
from benchmarks.launching.launchers import Mpirun
from benchmarks.launching.srun import Srun
from benchmarks.training_step import report
from benchmarks.training_step.contenders import (
    DATA_PARALLEL,
    USUAL,
    WIRE_DTYPES,
    Contender,
    expand,
    parse_contender,
)
from benchmarks.training_step.measurement import Plan, measure
from benchmarks.training_step.plot import draw
from benchmarks.training_step.targets import judge
from mpiddp.errors import ConfigurationError
from mpiddp.options.fields import Argument, pick
from mpiddp.schedules.registry import check_servers
from mpiddp.schedules.registry import parse as parse_algorithm
from mpiddp.training.options.groups.straggler import parse_straggler

RANKS = (2, 4)
RANKS_ON_CLUSTER = (4,)


@dataclass(frozen=True, kw_only=True)
class StepOptions(trials.Plan):
    """What is measured."""

    models: Annotated[tuple[str, ...], Argument("MODEL")] = tuple(SHAPES)
    """convnet, resnet18, mlp or mlp:megabytes=M (default: all, the mlp with 67)."""

    sync: Annotated[tuple[str, ...], Argument("SYNC")] = ()
    """See below (default: those below, and data-parallel if one process has as many GPUs as there
    are ranks)."""

    transports: Annotated[tuple[str, ...], Argument(choices=TRANSPORTS)] = ("auto",)
    """Of mpiddp's gradients."""

    wire_dtype: Annotated[tuple[str, ...], Argument(choices=WIRE_DTYPES)] = ("auto",)
    """Types in which mpiddp sends gradients."""

    batch_size: Count = 8
    """Samples per worker."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto takes GPUs if every rank has one."""

    straggler: Annotated[str | None, Argument("WHO=FACTOR")] = None
    """Slow one worker's passes: RANK=FACTOR, or random=FACTOR for a worker drawn in each step."""

    repetitions: Count = 5
    deadline: Seconds = 300.0


@dataclass(frozen=True, kw_only=True)
class StepRun(RunOptions[Plan]):
    """Where ranks are started, and where the results go."""

    ranks: SeveralRanks = ()
    """Numbers of ranks (default: 2 4; with srun 4)."""


READER = make_reader(
    command="training-step",
    description="Time training steps in turns, by synchronisation: compute, communication that "
    "nothing hides, update; with samples per second, efficiency and bytes.",
    groups={"what is measured": StepOptions, "the run": StepRun},
    epilog="SYNC is framework, framework-fused, auto, an algorithm, parameter-server (for example "
    "parameter-server:servers=ranks,placement=dedicated,staleness=3), or data-parallel. "
    f"By default: {' '.join(USUAL)}. {describe_algorithms('ring:segments=4')}",
)


def parse(arguments: Sequence[str]) -> RunOptions[Plan]:
    values = READER.read(arguments)
    options = pick(StepOptions, values)
    named = [parse_contender(text) for text in options.sync or USUAL]
    rows = [row for each in named for row in expand(each, options.transports, options.wire_dtype)]
    derived = {
        "workloads": tuple(dict.fromkeys(map(parse_workload, options.models))),
        "contenders": tuple(dict.fromkeys(rows)),
        "offers_data_parallel": not options.sync,
    }
    plan = pick(Plan, {**vars(options), **derived})
    return make_run(StepRun, values, plan, RANKS, RANKS_ON_CLUSTER)


def check(options: RunOptions[Plan]) -> Mpirun | Srun:
    plan = options.plan
    for ranks in options.ranks:
        for contender in plan.contenders:
            check_contender(contender, ranks, plan)
    if plan.straggler is not None:
        slow = parse_straggler(plan.straggler).rank
        if slow is not None and slow >= min(options.ranks):
            raise ConfigurationError(
                f"--straggler: expected a rank below {min(options.ranks)}, the fewest of --ranks, "
                f"found {slow}"
            )
    return check_run(options, link=plan.link)


def check_contender(contender: Contender, ranks: int, plan: Plan) -> None:
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


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    launcher = check(options)
    environment, heading = results.begin(launcher, f"{report.EXPLANATION}\n")
    groups = []
    for ranks in options.ranks:
        for group in measure(ranks, launcher, options.plan):
            print(f"{report.format_group(group)}\n", flush=True)
            groups.append(group)
    targets = judge(groups) if options.targets else None
    print(format_targets(targets or ()), end="\n" if targets else "")
    described = list(map(report.describe_group, groups))
    results.write_measurement(options.json, "training-step", environment, targets, groups=described)
    if options.plot is not None:
        draw(options.plot, groups, heading)
    if wrong := report.list_wrong(groups):
        raise WrongResultError(f"wrong training: {'; '.join(wrong)}")
