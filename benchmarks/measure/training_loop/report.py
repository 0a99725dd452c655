"""The table and the targets of ``python -m benchmarks training-loop``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.judge.promises import make_target
from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.training_loop.measurement import Group, Plan
from benchmarks.measure.training_loop.workloads import BARE, TRAINER
from benchmarks.records.options import describe_interval, describe_value, format_rows
from benchmarks.records.schema import Cell, Coordinate, make_cell
from benchmarks.records.statistics import quantile
from mpiddp.wording import count_noun

SPEED = 0.98
EXPLANATION = """\
Time of a step: medians over rounds, in each of which both loops take turns in one process.
More: the trainer's less the bare loop's, round by round. Speed: the bare loop's time by the
trainer's, round by round, with its 95 % interval. Batches are samples per rank."""


def compare(groups: Sequence[Group]) -> list[Ratio]:
    """The speed of the trainer in each: the bare loop's time by its own, round by round."""
    coefficient = find_common(group.seconds for group in groups)
    return [compare_rounds(*group.seconds, coefficient) for group in groups]


def format_table(groups: Sequence[Group]) -> str:
    rows = [["model", "ranks", "batch", "turn", TRAINER, BARE, "more", "speed", "95 %"]]
    for group, speed in zip(groups, compare(groups), strict=True):
        differences = [mine - bare for mine, bare in zip(*group.seconds, strict=True)]
        medians = [quantile(each, 0.5) for each in (*group.seconds, differences)]
        rows.append(
            [
                group.model,
                str(group.ranks),
                str(group.batch_size),
                count_noun(group.steps, "step"),
                *(describe_value(each, "s") for each in medians),
                f"{speed.estimate:.3f}",
                describe_interval(speed.interval),
            ]
        )
    return "\n".join(format_rows(rows))


def make_cells(group: Group, plan: Plan) -> Iterator[Cell]:
    at: dict[str, Coordinate] = {"model": group.model, "batch": group.batch_size}
    at["precision"] = plan.precision
    for name in ("channels_last", "compile"):
        if getattr(plan, name):
            at[name] = "on"
    for name, seconds in group.series.items():
        yield make_cell(
            seconds, quantity="training loop", contender=name, ranks=group.ranks, at=at,
            details={"steps": group.steps, "turns": group.turns},
        )  # fmt: skip


def judge(groups: Sequence[Group]) -> list[Target]:
    return [
        make_target(
            f"the trainer's samples per second: at least {SPEED:g} × a bare loop's",
            {
                f"{each.model}, {count_noun(each.ranks, 'rank')}": ratio
                for each, ratio in zip(groups, compare(groups), strict=True)
            },
            at_least=SPEED,
        )
    ]
