"""Collectives' measured times beside those that a fit predicts, and why some differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.judge.fit.fitted import NETWORK, NODE, PLACES, Fit
from benchmarks.judge.fit.flow import flow
from benchmarks.records.collectives import COLLECTIVES
from benchmarks.records.contenders import CONDITIONS
from benchmarks.records.options import ITEM, describe_seconds, format_rows
from benchmarks.records.schema import Cell, Record
from benchmarks.records.statistics import quantile
from mpiddp.collectives.compiler.pieces import BufferCut
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules.cost import split
from mpiddp.schedules.machine import Machine, MessageCost
from mpiddp.schedules.registry import Choice, Price, parse
from mpiddp.wording import describe_size

TOLERANCE = 0.15
"""How far measured and predicted may differ."""
MOST_PARTS = 256
"""Of a chunk; more of them change little."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A measured cell and its prediction."""

    cell: Cell
    choice: Choice
    predicted: float
    """Seconds."""
    flows: bool
    """Whether its chunks flow through the steps in parts, or each step ends before the next."""
    reasons: tuple[str, ...]
    """What the model does not know of this cell."""

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.cell.summary.median / self.predicted

    @property
    def is_off(self) -> bool:
        return not 1 - TOLERANCE <= self.ratio <= 1 + TOLERANCE


def check_record(fit: Fit, record: Record) -> list[Check]:
    """Predict all collectives whose algorithm is known.

    Raises ConfigurationError if there are none, or the fit lacks their messages.
    """
    groups: dict[tuple[Choice, int, int], list[Cell]] = {}
    for cell in record.cells:
        choice = find_choice(cell)
        if choice is not None and cell.ranks > 1:
            groups.setdefault((choice, cell.ranks, cell.nodes), []).append(cell)
    if not groups:
        raise ConfigurationError(
            f"{record.path}: expected collectives whose algorithm is known, as "
            "python -m benchmarks allreduce --output FILE.jsonl writes them, found none"
        )
    checks = []
    for (choice, ranks, hosts), cells in groups.items():
        nodes = split(ranks, hosts)
        machine = fit.make_machine(nodes)
        sizes = [cell.bytes for cell in cells]
        for cell, price in zip(cells, choice.prices(sizes, machine, nodes), strict=True):
            reasons = tuple(list_reasons(fit, cell, price, choice, record.environment))
            flows = can_flow(cell)
            predicted = predict_flow(choice, cell, machine) if flows else price.seconds
            checks.append(
                Check(cell=cell, choice=choice, predicted=predicted, flows=flows, reasons=reasons)
            )
    return checks


def can_flow(cell: Cell) -> bool:
    """Whether mpiddp runs it over MPI between nodes, where it cuts long chunks in parts."""
    is_own = cell.details.get("maker", "").startswith("mpiddp")
    return is_own and cell.nodes > 1 and find_ran(cell)[1] == "mpi"


def predict_flow(choice: Choice, cell: Cell, machine: Machine) -> float:
    """When the last member has its result, with chunks in as many parts as mpiddp's."""
    # It brings torch with it.
    from mpiddp.collectives.transport.mpi import NETWORK_MESSAGE

    nodes = split(cell.ranks, cell.nodes)
    schedule = choice.build(cell.ranks, nodes)
    least = math.ceil(cell.bytes / schedule.chunks / MOST_PARTS)
    if least > NETWORK_MESSAGE:
        machine = _spread(machine, NETWORK_MESSAGE)
    longest = max(NETWORK_MESSAGE, least) // ITEM
    cut = BufferCut(cell=longest, message=longest, flows=True)
    ends = flow(schedule, cell.bytes // ITEM, machine, nodes, cut, ITEM)
    return max(ends[member] for member in schedule.members)


def _spread(machine: Machine, size: int) -> Machine:
    """A machine whose messages cost per byte what one of ``size`` bytes does.

    A part of the model stands for several of mpiddp's, which take no longer messages' protocol.
    """
    inside, between = (
        MessageCost(float(each.delay(size)), float(each.occupation(size)) / size)
        for each in (machine.inside, machine.between)
    )
    return Machine(inside, between, float(machine.addition_seconds(size)) / size, machine.shared)


def find_choice(cell: Cell) -> Choice | None:
    """The algorithm of a cell; None if it is no plain collective, or of an unknown algorithm."""
    name = find_ran(cell)[0]
    if cell.quantity not in COLLECTIVES or not name or not CONDITIONS.isdisjoint(cell.at):
        return None
    try:
        choice = replace(parse(name), collective=COLLECTIVES[cell.quantity])
        choice.build(cell.ranks, split(cell.ranks, cell.nodes))
    except (ConfigurationError, ScheduleError):
        return None
    return choice


def find_ran(cell: Cell) -> tuple[str, str]:
    """The algorithm that ran, and by which messages; empty if that is not known."""
    (name, transport), details = cell.ran, cell.details
    transports = {"gloo": "Gloo", "nccl": "NCCL", "ring": "mpi", "persistent": "mpi"}
    return (
        name or details.get("algorithm") or "",
        transport or transports.get(details.get("maker", ""), ""),
    )


def list_reasons(
    fit: Fit, cell: Cell, price: Price, choice: Choice, environment: Mapping[str, Any]
) -> Iterator[str]:
    """What of the cell the model does not know."""
    transport, each = find_ran(cell)[1], -(-cell.ranks // cell.nodes)
    if transport and transport.lower() not in fit.contender.lower():
        yield f"its messages go by {transport}, the fit is of those of {fit.contender}"
    cores = environment.get("usable_hardware_threads")
    if cores and each > cores:
        yield f"{each} ranks of a node share {cores} cores, and copy and add in turns"
    elif each > 1:
        yield "ranks of a node share its memory; the fit knows one pair of them alone"
    if can_flow(cell):
        return
    steps = [step for step in price.simulation.steps if step.messages] if price.simulation else []
    means = [step.sent / step.messages for step in steps]
    used = [NODE] * (each > 1) + [NETWORK] * (cell.nodes > 1)
    least = max(fit.links[link].points[0].size for link in used)
    most = min(fit.links[link].points[-1].size for link in used)
    if means and not least <= min(means) <= max(means) <= most:
        low, high = (describe_size(round(size)) for size in (min(means), max(means)))
        yield f"its messages, {low} to {high}, are not all of sizes that were measured"
    if any(step.messages > 2 * cell.ranks for step in steps):
        yield "its ranks send several messages at once, in the model one after the other"
    if choice.segments > 1:
        yield "its segments hide latency behind each other, which the model leaves out"
    for link, ratio in fit.both_ways.items():
        if link in used and ratio > 1 + TOLERANCE:
            yield (
                f"messages {PLACES[link]} that meet others take {ratio:.1f} × as long, in the "
                "model they do not"
            )


def describe_checks(checks: Sequence[Check]) -> Iterator[str]:
    """A row for each cell, then what each algorithm is off by, and why."""
    rows = [("algorithm", "collective", "contender", "ranks", "bytes", "measured", "predicted",
             "steps", "ratio", "")]  # fmt: skip
    for check in checks:
        cell = check.cell
        rows.append((
            str(check.choice), cell.quantity, cell.contender, f"{cell.ranks} on {cell.nodes}",
            describe_size(cell.bytes), describe_seconds(cell.summary.median),
            describe_seconds(check.predicted), "flowing" if check.flows else "in turn",
            f"{check.ratio:.2f}", "off" if check.is_off else "",
        ))  # fmt: skip
    yield from (line.rstrip() for line in format_rows(rows))
    off = [check for check in checks if check.is_off]
    yield ""
    yield (
        f"{len(checks) - len(off)} of {len(checks)} within {TOLERANCE:.0%} of what the fit "
        f"predicts; measured over predicted, median {_middle(checks):.2f}"
    )
    for label in dict.fromkeys((str(check.choice), check.cell.contender) for check in off):
        same = [check for check in off if (str(check.choice), check.cell.contender) == label]
        reasons = dict.fromkeys(reason for check in same for reason in check.reasons)
        why = "; ".join(reasons) or "the model does not say why"
        yield f"  {label[0]} ({label[1]}), {_middle(same):.2f} × in {len(same)}: {why}"


def _middle(checks: Sequence[Check]) -> float:
    return quantile([check.ratio for check in checks], 0.5)
