"""The phases of mpiddp's start-up: what of it is mpiddp's own, and how it grows with the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.measure.startup.contenders import SESSION
from benchmarks.measure.startup.report import Group, describe_place
from benchmarks.records.options import describe_interval, format_rows
from benchmarks.records.schema import Cell, make_cell
from benchmarks.records.statistics import Interval, slope, slope_interval, summarize

OWN = ("address", "store", "group")
"""The phases that are mpiddp's own: the others start MPI, import torch and move the first bytes."""
SHOWN = ("MPI", "import torch", *OWN, "first all-reduce")
QUANTITY = "start-up phase"
OWN_TITLE = " + ".join(OWN)


@dataclass(frozen=True)
class Growth:
    """How the own phases grow with the number of ranks."""

    fewest: int
    most: int
    milliseconds: float
    """Per added rank."""
    interval: Interval | None
    """Of the same, 95 %; None where the samples are too few for one."""


def measured(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if phase_seconds(group)]


def phase_seconds(group: Group) -> dict[str, list[float]]:
    """Seconds of each phase on its slowest rank, by rounds; empty if none were reported."""
    series = group.series.get(SESSION)
    runs = [run for run in series.samples if run.phases] if series is not None else []
    return {name: [run.phases[name] for run in runs] for name in SHOWN} if runs else {}


def own_seconds(group: Group) -> list[float]:
    """Seconds of the own phases together, in order of rounds.

    Each is its slowest rank's, so that the sum is at least what any rank took.
    """
    phases = phase_seconds(group)
    return [sum(values) for values in zip(*(phases[name] for name in OWN), strict=True)]


def find_growth(groups: Sequence[Group], seed: int) -> Growth | None:
    """The growth of the own phases; None for a single number of ranks."""
    samples = {float(group.ranks): [1e3 * each for each in own_seconds(group)] for group in groups}
    if len(samples) < 2:
        return None
    interval = slope_interval(samples, seed=seed)
    return Growth(int(min(samples)), int(max(samples)), slope(samples), interval)


def format_phases(groups: Sequence[Group], seed: int) -> str:
    """The table of phases, a row per number of ranks; empty if none were reported."""
    groups = measured(groups)
    if not groups:
        return ""
    heads = ["ranks", *SHOWN, "own", "95 % of own"]
    rows = [heads, *(_format_row(group) for group in groups)]
    growth = find_growth(groups, seed)
    title = f"phases of {SESSION} on {groups[0].where}, slowest rank, medians in milliseconds"
    lines = [f"{title}; own: {OWN_TITLE}", *format_rows(rows)]
    if growth is not None:
        between = growth.interval
        known = f" (95 %: {between.low:.2f} to {between.high:.2f})" if between else ""
        lines.append(
            f"own grows by {growth.milliseconds:.2f} ms{known} per added rank, "
            f"{growth.fewest} to {growth.most} ranks"
        )
    return "\n".join(lines)


def _format_row(group: Group) -> list[str]:
    phases = phase_seconds(group)
    own = summarize(own_seconds(group))
    return [
        str(group.ranks),
        *(f"{1e3 * summarize(phases[name]).median:.0f}" for name in SHOWN),
        f"{1e3 * own.median:.0f}",
        describe_interval(own.interval, lambda seconds: f"{1e3 * seconds:.0f}"),
    ]


def make_cells(group: Group) -> Iterator[Cell]:
    """Of each phase on its slowest rank; none if none were reported."""
    for name, values in phase_seconds(group).items():
        place = describe_place(group, SESSION)
        details = {"is_own": name in OWN}
        yield make_cell(values, quantity=QUANTITY, at={"phase": name}, details=details, **place)
