"""The tables of start-up, and how mpiddp's own phases grow with the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.measure.engine import CellGroup
from benchmarks.measure.startup.launches import FLOOR, SESSION, TORCHRUN, TORCHRUN_STATIC
from benchmarks.measure.trials import Rounds
from benchmarks.records.options import describe_interval
from benchmarks.records.schema import Cell
from benchmarks.records.statistics import (
    Interval,
    Summary,
    median_interval,
    quantile,
    slope,
    slope_interval,
    summarize,
)
from benchmarks.show.tables import format_table
from mpiddp.process.cpus import find_cpus
from mpiddp.wording import count_noun

START_UP, PHASE = "start-up", "start-up phase"
"""The quantities of a record."""
OWN = ("address", "store", "group")
"""The phases that are mpiddp's own: the others start MPI, import torch and move the first bytes."""
SHOWN = ("MPI", "import torch", *OWN, "first all-reduce")
OWN_TITLE = " + ".join(OWN)


def tabulate(groups: Sequence[CellGroup], plan: Rounds) -> str:
    parts = [*map(format_group, groups), format_phases(groups, plan.seed)]
    return "\n\n".join(filter(None, parts))


# ---- whole processes -----------------------------------------------------------------------------


def name_group(group: CellGroup) -> str:
    where = f" on {group.where}" if group.nodes is not None else ""
    return f"{count_noun(group.ranks, 'rank')}{where}" if group.ranks else "one process"


def find_median(group: CellGroup, name: str) -> float:
    """Of whole processes."""
    return quantile(group.find_samples(name, part=None), 0.5)


def choose_torchrun(group: CellGroup) -> str:
    """The quicker form."""
    return min(TORCHRUN, TORCHRUN_STATIC, key=lambda name: find_median(group, name))


def format_group(group: CellGroup) -> str:
    """The table: seconds, and ratios round by round; and what stands below it."""
    columns: dict[str, Callable[[Cell], str]] = {
        "": lambda cell: cell.contender,
        "median": lambda cell: f"{cell.summary.median:.3f}",
        "quartiles": lambda cell: _describe_range(cell.summary),
        "95 % of median": lambda cell: describe_interval(cell.summary.interval),
    }
    if group.ranks:
        torchrun = choose_torchrun(group)
        columns |= {
            "1st all-reduce": lambda cell: _describe_median(
                group.find_samples(cell.contender, part="first all-reduce"), 3
            ),
            "/ torchrun": lambda cell: _describe_ratio(group, cell, torchrun),
            "/ import torch": lambda cell: _describe_ratio(group, cell, FLOOR),
        }
    columns["CPU"] = lambda cell: _describe_median(cell.details["cpu_seconds"], 2)
    rounds = len(group.cells[0].samples)
    title = f"{name_group(group)}, {rounds} rounds: seconds of the whole process"
    table = format_table(group.whole, columns)
    notes = (_describe_warm_up(group), describe_others(group), describe_failures(group))
    return "\n".join(filter(None, [title, table, *notes]))


def _describe_range(summary: Summary) -> str:
    return f"{summary.lower_quartile:.3f}–{summary.upper_quartile:.3f}"


def _describe_median(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{quantile(known, 0.5):.{digits}f}" if known else "–"


def _describe_ratio(group: CellGroup, cell: Cell, other: str) -> str:
    ratio = group.divide(cell.contender, other)
    return "1" if cell.contender == other else f"{ratio.estimate:.2f}" if ratio else "–"


def _describe_warm_up(group: CellGroup) -> str:
    """The times of the warm-up rounds, which count for nothing else; empty if there were none."""
    parts = [
        f"{cell.contender} " + " ".join(f"{seconds:.2f}" for seconds in cell.details["warm_up"])
        for cell in group.whole
        if cell.details["warm_up"]
    ]
    return f"warm-up: {'; '.join(parts)}" if parts else ""


def describe_others(group: CellGroup) -> str:
    """How busy other programs kept the machine meanwhile; empty if that is unknown."""
    cores = len(find_cpus())
    shares = [
        others / seconds / cores
        for cell in group.whole
        for others, seconds in zip(cell.details["others_cpu_seconds"], cell.samples, strict=True)
        if others is not None
    ]
    if not shares:
        return ""
    summary = summarize(shares)
    quartiles = f"{summary.lower_quartile:.0%}–{summary.upper_quartile:.0%}"
    return (
        f"other programs took {summary.median:.0%} of the cores meanwhile (quartiles {quartiles})"
    )


def describe_failures(group: CellGroup) -> str:
    """Whose runs failed and were made again; empty if none were."""
    names = [failure.contender for failure in group.refusals]
    if not names:
        return ""
    counts = ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))
    return f"runs that failed and were made again: {counts} (their output is in the record)"


# ---- phases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """How the own phases grow with the number of ranks."""

    fewest: int
    most: int
    milliseconds: float
    """Per added rank."""
    interval: Interval | None
    """Of the same, 95 %; None where the samples are too few for one."""


def list_phased(groups: Sequence[CellGroup]) -> list[CellGroup]:
    """Those of which phases were reported."""
    return [each for each in groups if each.find(SESSION, phase=OWN[0])]


def sum_own(group: CellGroup) -> list[float]:
    """Seconds of the own phases together, in order of rounds.

    Each is its slowest rank's, so that the sum is at least what any rank took.
    """
    phases = (group.find_samples(SESSION, phase=name) for name in OWN)
    return [sum(values) for values in zip(*phases, strict=True)]


def find_growth(groups: Sequence[CellGroup], seed: int) -> Growth | None:
    """The growth of the own phases; None for a single number of ranks."""
    samples = {float(each.ranks): [1e3 * value for value in sum_own(each)] for each in groups}
    if len(samples) < 2:
        return None
    interval = slope_interval(samples, seed=seed)
    return Growth(int(min(samples)), int(max(samples)), slope(samples), interval)


def format_phases(groups: Sequence[CellGroup], seed: int) -> str:
    """The table of phases, a row per number of ranks; empty if none were reported."""
    rows = list_phased(groups)
    if not rows:
        return ""
    columns: dict[str, Callable[[CellGroup], str]] = {"ranks": lambda group: str(group.ranks)}
    for name in SHOWN:
        columns[name] = partial(_describe_phase, name=name)
    columns["own"] = lambda group: f"{1e3 * quantile(sum_own(group), 0.5):.0f}"
    columns["95 % of own"] = lambda group: describe_interval(
        median_interval(sum_own(group)), lambda seconds: f"{1e3 * seconds:.0f}"
    )
    title = f"phases of {SESSION} on {rows[0].where}, slowest rank, medians in milliseconds"
    lines = [f"{title}; own: {OWN_TITLE}", format_table(rows, columns)]
    growth = find_growth(rows, seed)
    if growth is not None:
        between = growth.interval
        known = f" (95 %: {between.low:.2f} to {between.high:.2f})" if between else ""
        lines.append(
            f"own grows by {growth.milliseconds:.2f} ms{known} per added rank, "
            f"{growth.fewest} to {growth.most} ranks"
        )
    return "\n".join(lines)


def _describe_phase(group: CellGroup, name: str) -> str:
    return f"{1e3 * quantile(group.find_samples(SESSION, phase=name), 0.5):.0f}"
