"""The table of training steps: a row for each contender."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure.engine import CellGroup
from benchmarks.measure.training_step.synchronisations import StepPlan, Synchronisation
from benchmarks.measure.training_step.visits import TimedLink
from benchmarks.measure.trials import REFUSED
from benchmarks.records.options import describe_seconds
from benchmarks.records.schema import Cell
from benchmarks.records.statistics import quantile
from benchmarks.show.tables import format_table
from mpiddp.training.options.groups.synchronisation import FRAMEWORK, PARAMETER_SERVER
from mpiddp.wording import describe_size

FRAMEWORKS = Synchronisation(FRAMEWORK)
STEP, PARTS, SPEED = "training step", ("compute", "exposed", "update"), "training speed"
"""A quantity of a record, and its parts; another quantity."""


def tabulate(groups: Sequence[CellGroup], plan: StepPlan) -> str:
    return "\n\n".join(_tabulate(each, plan) for each in groups)


def find_link(group: CellGroup) -> TimedLink | None:
    return TimedLink(**group.facts["link"]) if group.facts["link"] else None


def _tabulate(group: CellGroup, plan: StepPlan) -> str:
    facts, link = group.facts, find_link(group)
    processors = "GPUs" if facts["device"] == "cuda" else "CPUs"
    title = (
        f"{facts['model']} on {group.ranks} ranks of {group.where}, {processors}, batch "
        f"{plan.batch_size} per worker, {plan.repetitions} rounds; milliseconds; the framework's "
        f"DDP is over {facts['backend']}"
    )
    lines = [title]
    if plan.straggler is not None:
        lines.append(f"straggler {plan.straggler}")
    if group.others_share is not None:
        lines.append(f"other programs took {group.others_share:.0%} of the cores meanwhile")
    if link is not None:
        lines.append(
            f"a link between two nodes carries {link.megabits:.3g} Mbit/s one way, after "
            f"{describe_seconds(link.latency)}"
        )

    def describe_part(cell: Cell, part: str) -> str:
        if part == "update" and cell.contender.startswith(PARAMETER_SERVER):
            return "servers"
        return format_milliseconds(quantile(group.find_samples(cell.contender, part=part), 0.5))

    def describe_rate(cell: Cell) -> str:
        return f"{quantile(group.find_samples(cell.contender, SPEED), 0.5):.4g}"

    def describe_speed(cell: Cell) -> str:
        speed = group.divide(FRAMEWORKS.name, cell.contender)
        return (
            "1" if cell.contender == FRAMEWORKS.name else f"{speed.estimate:.2f}" if speed else "–"
        )

    lines.append(format_table(group.whole, {
        "": lambda cell: cell.contender,
        "step": lambda cell: format_milliseconds(cell.summary.median),
        "quartiles": _describe_quartiles,
        "compute": lambda cell: describe_part(cell, "compute"),
        "exposed": lambda cell: describe_part(cell, "exposed"),
        "update": lambda cell: describe_part(cell, "update"),
        "samples/s": describe_rate,
        "efficiency": _describe_efficiency,
        "× DDP": describe_speed,
        "overlap": lambda cell: cell.details["notes"].get("overlap", "–"),
        "sent/rank": lambda cell: _describe_bytes(cell, "each"),
        "busiest link": lambda cell: _describe_bytes(cell, "busiest"),
    }))  # fmt: skip
    for each in group.refusals:
        word = "left out" if each.kind == REFUSED else "wrong"
        lines.append(f"{word}: {each.contender}: {each.reason}")
    return "\n".join(lines)


def _describe_quartiles(cell: Cell) -> str:
    ends = (cell.summary.lower_quartile, cell.summary.upper_quartile)
    return "–".join(map(format_milliseconds, ends))


def _describe_efficiency(cell: Cell) -> str:
    efficiency = cell.details["efficiency"]
    return f"{efficiency:.0%}" if efficiency is not None else "–"


def _describe_bytes(cell: Cell, name: str) -> str:
    traffic = cell.details["bytes"]
    if traffic is None or traffic[name] is None:
        return "–"
    mark = "~" if traffic["is_read"] else ""
    return f"{mark}{describe_size(round(traffic[name]))}"


def format_milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"
