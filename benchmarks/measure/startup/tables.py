"""The tables of start-up, and how mpiddp's own phases grow with the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.measure.engine import Section
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


def tabulate(sections: Sequence[Section], plan: Rounds) -> str:
    parts = [*map(format_section, sections), format_phases(sections, plan.seed)]
    return "\n\n".join(filter(None, parts))


# ---- whole processes -----------------------------------------------------------------------------


def name_section(section: Section) -> str:
    where = f" on {section.where}" if section.nodes is not None else ""
    return f"{count_noun(section.ranks, 'rank')}{where}" if section.ranks else "one process"


def find_median(section: Section, name: str) -> float:
    """Of whole processes."""
    return quantile(section.find_samples(name, part=None), 0.5)


def choose_torchrun(section: Section) -> str:
    """The quicker form."""
    return min(TORCHRUN, TORCHRUN_STATIC, key=lambda name: find_median(section, name))


def format_section(section: Section) -> str:
    """The table: seconds, and ratios round by round; and what stands below it."""
    columns: dict[str, Callable[[Cell], str]] = {
        "": lambda cell: cell.contender,
        "median": lambda cell: f"{cell.summary.median:.3f}",
        "quartiles": lambda cell: _describe_range(cell.summary),
        "95 % of median": lambda cell: describe_interval(cell.summary.interval),
    }
    if section.ranks:
        torchrun = choose_torchrun(section)
        columns |= {
            "1st all-reduce": lambda cell: _describe_median(
                section.find_samples(cell.contender, part="first all-reduce"), 3
            ),
            "/ torchrun": lambda cell: _describe_ratio(section, cell, torchrun),
            "/ import torch": lambda cell: _describe_ratio(section, cell, FLOOR),
        }
    columns["CPU"] = lambda cell: _describe_median(cell.details["cpu_seconds"], 2)
    rounds = len(section.cells[0].samples)
    title = f"{name_section(section)}, {rounds} rounds: seconds of the whole process"
    table = format_table(section.whole, columns)
    notes = (_describe_warm_up(section), describe_others(section), describe_failures(section))
    return "\n".join(filter(None, [title, table, *notes]))


def _describe_range(summary: Summary) -> str:
    return f"{summary.lower_quartile:.3f}–{summary.upper_quartile:.3f}"


def _describe_median(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{quantile(known, 0.5):.{digits}f}" if known else "–"


def _describe_ratio(section: Section, cell: Cell, other: str) -> str:
    ratio = section.divide(cell.contender, other)
    return "1" if cell.contender == other else f"{ratio.estimate:.2f}" if ratio else "–"


def _describe_warm_up(section: Section) -> str:
    """The times of the warm-up rounds, which count for nothing else; empty if there were none."""
    parts = [
        f"{cell.contender} " + " ".join(f"{seconds:.2f}" for seconds in cell.details["warm_up"])
        for cell in section.whole
        if cell.details["warm_up"]
    ]
    return f"warm-up: {'; '.join(parts)}" if parts else ""


def describe_others(section: Section) -> str:
    """How busy other programs kept the machine meanwhile; empty if that is unknown."""
    cores = len(find_cpus())
    shares = [
        others / seconds / cores
        for cell in section.whole
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


def describe_failures(section: Section) -> str:
    """Whose runs failed and were made again; empty if none were."""
    names = [failure.contender for failure in section.refusals]
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


def list_phased(sections: Sequence[Section]) -> list[Section]:
    """Those of which phases were reported."""
    return [each for each in sections if each.find(SESSION, phase=OWN[0])]


def sum_own(section: Section) -> list[float]:
    """Seconds of the own phases together, in order of rounds.

    Each is its slowest rank's, so that the sum is at least what any rank took.
    """
    phases = (section.find_samples(SESSION, phase=name) for name in OWN)
    return [sum(values) for values in zip(*phases, strict=True)]


def find_growth(sections: Sequence[Section], seed: int) -> Growth | None:
    """The growth of the own phases; None for a single number of ranks."""
    samples = {float(each.ranks): [1e3 * value for value in sum_own(each)] for each in sections}
    if len(samples) < 2:
        return None
    interval = slope_interval(samples, seed=seed)
    return Growth(int(min(samples)), int(max(samples)), slope(samples), interval)


def format_phases(sections: Sequence[Section], seed: int) -> str:
    """The table of phases, a row per number of ranks; empty if none were reported."""
    rows = list_phased(sections)
    if not rows:
        return ""
    columns: dict[str, Callable[[Section], str]] = {"ranks": lambda section: str(section.ranks)}
    for name in SHOWN:
        columns[name] = partial(_describe_phase, name=name)
    columns["own"] = lambda section: f"{1e3 * quantile(sum_own(section), 0.5):.0f}"
    columns["95 % of own"] = lambda section: describe_interval(
        median_interval(sum_own(section)), lambda seconds: f"{1e3 * seconds:.0f}"
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


def _describe_phase(section: Section, name: str) -> str:
    return f"{1e3 * quantile(section.find_samples(SESSION, phase=name), 0.5):.0f}"
