"""``python -m benchmarks training-step``: what a training step takes, by synchronisation.

What every contender trains is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.allreduce.contenders import TRANSPORTS
from benchmarks.common import results
from benchmarks.common.checks import check_run
from benchmarks.common.options import (
    CommandLine,
    RunOptions,
    at_least,
    describe_algorithms,
    make,
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
from benchmarks.training_step.measurement import LENGTH, Plan, measure
from benchmarks.training_step.plot import draw
from benchmarks.training_step.targets import judge
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import check_servers
from mpiddp.schedules.registry import parse as parse_algorithm
from mpiddp.training.options.groups.straggler import parse_straggler

RANKS = (2, 4)
RANKS_ON_CLUSTER = (4,)
DEVICES = ("auto", "cpu", "gpu")


def parse(arguments: Sequence[str]) -> RunOptions[Plan]:
    values = _make_parser().read_values(arguments)
    named = [parse_contender(text) for text in values["sync"] or USUAL]
    rows = [
        row for each in named for row in expand(each, values["transports"], values["wire_dtype"])
    ]
    plan = make(
        Plan,
        values,
        workloads=tuple(dict.fromkeys(map(parse_workload, values["models"]))),
        contenders=tuple(dict.fromkeys(rows)),
        offers_data_parallel=values["sync"] is None,
    )
    return make_run(values, plan, RANKS, RANKS_ON_CLUSTER)


def _make_parser() -> CommandLine:
    parser = CommandLine(
        "training-step",
        "Time training steps in turns, by synchronisation: compute, communication that nothing "
        "hides, update; with samples per second, efficiency and bytes.",
        "SYNC is framework, framework-fused, auto, an algorithm, parameter-server (for example "
        "parameter-server:servers=ranks,placement=dedicated,staleness=3), or data-parallel. "
        f"{describe_algorithms('ring:segments=4')}",
    )
    add = parser.add
    add("models", f"{', '.join(SHAPES)} or mlp:megabytes=M (default: all, the mlp with 67)",
        nargs="+", metavar="MODEL", default=tuple(SHAPES))  # fmt: skip
    add("sync", f"default: {' '.join(USUAL)}, and data-parallel if one process has as many GPUs as "
        "there are ranks", nargs="+", metavar="SYNC")  # fmt: skip
    add("transports", f"transports of mpiddp's gradients: {', '.join(TRANSPORTS)}", nargs="+",
        choices=TRANSPORTS, default=("auto",), metavar="TRANSPORT")  # fmt: skip
    add("wire-dtype", f"types in which mpiddp sends gradients: {', '.join(WIRE_DTYPES)}", nargs="+",
        choices=WIRE_DTYPES, default=("auto",), metavar="TYPE")  # fmt: skip
    add("batch-size", "samples per worker", type=at_least(1), default=8, metavar="N")
    add("device", "auto, cpu or gpu; auto takes GPUs if every rank has one", choices=DEVICES,
        default="auto", metavar="DEVICE")  # fmt: skip
    add("straggler", "slow one worker's passes: RANK=FACTOR, or random=FACTOR for a worker "
        "drawn in each step", metavar="WHO=FACTOR")  # fmt: skip
    add("ranks", "numbers of ranks (default: 2 4; with srun 4)", type=at_least(2))
    add("repetitions", default=5)
    add("warm-up", "rounds before them, after a first visit to each", default=0)
    add("iterations", f"steps per visit (default: {LENGTH})")
    add("seed", "seed of parameters, samples and the order")
    add("deadline", "time limit of a job's start, and of each answer", default=300.0)
    parser.add_run("write every visit and the environment", "draw the parts",
                   "with srun: time a link between two nodes; with --targets compare servers with "
                   "the cost model")  # fmt: skip
    return parser


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
