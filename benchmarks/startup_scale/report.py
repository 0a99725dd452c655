"""What start-up asks of rank 0: tables by quantity, models, predictions, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.machines import describe_place
from benchmarks.common.options import describe_seconds, format_rows
from benchmarks.startup_scale.measurement import Plan, Starts
from benchmarks.startup_scale.models import Model, Place, fit
from benchmarks.startup_scale.stages import (
    AGREEMENT,
    BY_NAME,
    BYTES,
    COUNTED,
    MESSAGES,
    MPI,
    OURS,
    PROCESSOR,
    SECONDS,
    STAGES,
    TIMED,
    TORCH,
)
from mpiddp.wording import count_noun

Models = Mapping[tuple[str, str], Model]
"""By name of stage and quantity."""

OWNERS = (OURS, TORCH, MPI)
PREDICTED = (*COUNTED, PROCESSOR)
"""What is modelled. Seconds are not: they are those of ranks that share a few cores."""
LEAST: Mapping[str, float] = {BYTES: 1000.0, MESSAGES: 10.0, PROCESSOR: 1e-3}
"""Below which differences are noise; 1 for the other quantities."""
WAITS = (
    "what rank 0 looks for messages while it waits, too: the more ranks share a core here, the "
    "longer; for a large job they are an upper bound, and agreements, which are waits, are left out"
)
FEWEST = 4
"""Numbers of ranks that tell a line from a curve, and leave one to check."""
SHOWN = 6
"""Places in a table."""


def fit_all(starts: Sequence[Starts]) -> dict[tuple[str, str], Model]:
    """A model for each stage and quantity that occurs.

    Not of the processor seconds of agreements, in which rank 0 waits for the slowest rank. Bytes
    alone may grow with the square of the ranks, as a list of all ranks for each of them does.
    """
    return {
        (stage.name, quantity): fit(
            {each.place: each.find(stage.name, quantity) for each in starts},
            LEAST.get(quantity, 1.0),
            has_squares=quantity == BYTES,
        )
        for stage in STAGES
        for quantity in PREDICTED
        if any((stage.name, quantity) in each.samples for each in starts)
        and (stage.marks, quantity) != ((AGREEMENT,), PROCESSOR)
    }


def describe_models(models: Models, place: Place) -> Iterator[dict[str, Any]]:
    """The models for a record."""
    for (stage, quantity), model in models.items():
        yield {
            "stage": stage,
            "of": BY_NAME[stage].owner,
            "quantity": quantity,
            "constant": model.constant,
            "factors": dict(model.factors),
            "residual": model.residual,
            "error": model.error if model.is_checked else None,
            "predicted": {"ranks": place[0], "nodes": place[1], "value": model.predict(place)},
        }


def format_report(starts: Sequence[Starts], models: Models, plan: Plan) -> str:
    parts = [_format_quantity(quantity, starts, models, plan.predicted) for quantity in PREDICTED]
    parts += [_format_seconds(starts), _format_owners(models, plan.predicted)]
    parts += [_list_changes(models, plan.predicted), _describe_limits(starts)]
    return "\n\n".join(filter(None, parts))


def _choose(starts: Sequence[Starts]) -> list[Starts]:
    """At most SHOWN of them, evenly, with the first and the last."""
    if len(starts) <= SHOWN:
        return list(starts)
    places = {round(i * (len(starts) - 1) / (SHOWN - 1)) for i in range(SHOWN)}
    return [starts[place] for place in sorted(places)]


def _head(starts: Sequence[Starts]) -> list[str]:
    """Columns: ranks, and after a stroke nodes if they differ."""
    several = len({each.place[1] for each in starts}) > 1
    return [f"{r}/{n}" if several else str(r) for r, n in (each.place for each in starts)]


def _format_quantity(quantity: str, starts: Sequence[Starts], models: Models, place: Place) -> str:
    shown = _choose(starts)
    heads = ["", "of", *_head(shown), "model", "residual", "left out", f"{place[0]:,}"]
    rows = [heads]
    for stage in STAGES:
        model = models.get((stage.name, quantity))
        if model is not None:
            values = [show_value(each.find(stage.name, quantity), quantity) for each in shown]
            checked = f"{model.error:.0%}" if model.is_checked else "–"
            rows.append(
                [stage.name, stage.owner, *values, str(model), f"{model.residual:.0%}", checked,
                 show_value(model.predict(place), quantity)]
            )  # fmt: skip
    title = f"{quantity} of rank 0, by ranks{' / nodes' if '/' in ''.join(heads[2:-4]) else ''}"
    return "\n".join([title, *format_rows(rows)])


def show_value(value: float, quantity: str) -> str:
    """In a unit that suits it."""
    if quantity in TIMED:
        return describe_seconds(value) if value else "0"
    if quantity == BYTES:
        return describe_bytes(value)
    return f"{value:,.0f}"


def describe_bytes(count: float) -> str:
    """Three figures and a decimal unit."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _format_seconds(starts: Sequence[Starts]) -> str:
    shown = _choose(starts)
    rows = [["", "of", *_head(shown)]]
    for stage in STAGES:
        values = [show_value(each.find(stage.name, SECONDS), SECONDS) for each in shown]
        rows.append([stage.name, stage.owner, *values])
    title = "seconds on rank 0, waits for the other ranks included, without strace"
    return "\n".join([title, *format_rows(rows)])


def sum_by_owner(models: Models, quantity: str, place: Place) -> dict[str, float]:
    """What all stages of each owner are predicted to take."""
    return {
        owner: sum(
            model.predict(place)
            for (stage, each), model in models.items()
            if each == quantity and BY_NAME[stage].owner == owner
        )
        for owner in OWNERS
    }


def _format_owners(models: Models, place: Place) -> str:
    rows = [["", *PREDICTED]]
    sums = {quantity: sum_by_owner(models, quantity, place) for quantity in PREDICTED}
    for owner in OWNERS:
        rows.append(
            [owner, *(show_value(sums[quantity][owner], quantity) for quantity in PREDICTED)]
        )
    return "\n".join([f"predicted for {describe_place(*place)}, rank 0", *format_rows(rows)])


def _list_changes(models: Models, place: Place) -> str:
    """The stages that ask most of rank 0 there: of all, then of mpiddp's own. Counts decide, which
    do not depend on how many ranks share a core here."""
    lines = [f"what to change first, for {describe_place(*place)}:"]
    for title, owners in (("of all", OWNERS), ("of mpiddp's own", (OURS,))):
        leading: dict[str, list[str]] = {}
        for quantity in COUNTED:
            values = {
                stage: model.predict(place)
                for (stage, each), model in models.items()
                if each == quantity and BY_NAME[stage].owner in owners
            }
            if values:
                stage = max(values, key=lambda name: values[name])
                share = values[stage] / (sum(values.values()) or 1.0)
                leading.setdefault(stage, []).append(
                    f"{share:.0%} of the {quantity} ({show_value(values[stage], quantity)})"
                )
        for stage, shares in sorted(leading.items(), key=lambda item: -len(item[1])):
            lines.append(f"  {title}: {stage}, {', '.join(shares)}: {BY_NAME[stage].advice}")
    return "\n".join(lines)


def _describe_limits(starts: Sequence[Starts]) -> str:
    """What the figures do not say."""
    lines = [
        "residual: the largest; left out: the error of points that the others predict",
        f"processor seconds hold {WAITS}",
    ]
    if len({each.place[1] for each in starts}) == 1:
        lines.append(
            f"all ranks were on {count_noun(starts[0].place[1], 'node')}: what grows with the "
            "nodes is not seen, and what grows with a node's ranks looks as if it grew with all; "
            "give several --nodes to tell them apart (srun, or MPICH's mpirun)"
        )
    if len({each.place[0] for each in starts}) < FEWEST:
        lines.append(
            f"fewer than {FEWEST} numbers of ranks: these models could as well be others, and what "
            "they predict is no more than an example"
        )
    return "\n".join(lines)
