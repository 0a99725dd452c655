"""``python -m benchmarks training-step``: what a training step takes, by synchronisation.

What every contender trains is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure.checks import check_run
from benchmarks.measure.launching.srun import Launcher
from benchmarks.measure.training_step import report
from benchmarks.measure.training_step.contenders import DATA_PARALLEL, USUAL, Contender
from benchmarks.measure.training_step.measurement import Group, Plan, measure
from benchmarks.measure.training_step.targets import judge
from benchmarks.measure.trials import WrongResultError
from benchmarks.records.options import (
    RunOptions,
    describe_algorithms,
    make_parser,
    make_reader,
)
from benchmarks.show import results
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import check_servers
from mpiddp.schedules.registry import parse as parse_algorithm
from mpiddp.training.options.groups.straggler import parse_straggler
from mpiddp.wording import print_text

RANKS_ON_CLUSTER = (4,)


READER = make_reader(
    command="training-step",
    description="Time training steps in turns, by synchronisation: compute, communication that "
    "nothing hides, update; with samples per second, efficiency and bytes.",
    groups={"what is measured": Plan, "the run": RunOptions},
    epilog="SYNC is framework, framework-fused, framework-mpiddp (DDP over that backend), auto, "
    "an algorithm, parameter-server (for example "
    "parameter-server:servers=ranks,placement=dedicated,staleness=3), or data-parallel. "
    f"By default: {' '.join(USUAL)}. {describe_algorithms('ring:segments=4')}",
)
parse = make_parser(READER, Plan, RANKS_ON_CLUSTER)


def check(options: RunOptions[Plan]) -> Launcher:
    plan = options.plan
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
    return check_run(options, plan.ranks, link=plan.link)


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
    groups: list[Group] = []
    text = f"{report.EXPLANATION}\n"
    with results.open_output("training-step", options, launcher, text) as output:
        for ranks in options.plan.ranks:
            for group in measure(ranks, launcher, options.plan):
                print_text(f"{report.format_group(group)}\n")
                report.record_group(output.record, group)
                groups.append(group)
        output.show(targets=judge(groups) if options.targets else ())
    if wrong := report.list_wrong(groups):
        raise WrongResultError(f"wrong training: {'; '.join(wrong)}")
