"""Bars, dots and curves of what is not measured by size: start-up, training, checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.judge.winners import MOST_SHOWN, describe_condition, estimate
from benchmarks.records.material import Measured
from benchmarks.records.options import SHARE, describe_value
from benchmarks.records.schema import Cell, group_by
from benchmarks.records.statistics import Spread, spread
from benchmarks.show.charts import Bar, Bars, Chart, ChartLine, DotRow, Dots, Panel, Section
from mpiddp.wording import count_noun, describe_size

PARTS = ("part", "phase")
"""Coordinates whose values are parts of one whole."""
NAMES = {"exposed": "exposed communication", "stall": "until the call returns",
         "slowdown": "slower steps beside the write"}  # fmt: skip
WORDS = {
    "start-up": "Seconds of whole processes, from the launch to the end of the last rank.",
    "start-up phase": "Seconds of each phase on its slowest rank, one after the other.",
    "training step": "The slowest rank's step: what it computes, the communication that nothing "
    "hides, and the update.",
    "training speed": "Samples per second of all ranks together; longer is better.",
    "training loop": "Steps of the trainer and of a bare loop, in turns in one process.",
    "program": "Seconds of a program's token, step or call, over Gloo and over mpiddp's backend.",
    "training": "accuracy while a worker is slow",
    "time to accuracy": "Seconds until the accuracy is reached while a worker is slow.",
    "probe": "Copies by all ranks at once, reading what a neighbour wrote, a message to another "
    "node; nothing: what the measurement itself takes.",
    "checkpoint": "Seconds that training waits for a checkpoint, and the raw write of its bytes.",
}
STAGES = "All stages"
OWN_PHASES = "mpiddp's own phases"
HEADINGS = {
    "start-up phase": "Phases of start-up",
    "training": "Training beside a straggler",
    "program": "Programs of torch.distributed",
    "probe": "What the machine can do",
}
BASES = {"training loop": "a bare loop", "program": "gloo"}
"""Contenders that the others are compared with, round by round."""


def describe_steps(cells: Sequence[Measured], every: Sequence[Measured]) -> Section:
    """The section of one quantity, whose cells are given, and those of all quantities."""
    quantity = cells[0].cell.quantity
    pictures: list[Bars | Dots] = []
    if quantity.startswith("start-up "):
        pictures += _describe_phases(cells)
    elif quantity == "program":
        pictures += map(_describe_programs, group_by(cells, lambda e: e.cell.ranks).values())
    elif quantity != "training":
        places = group_by(cells, describe_conditions)
        pictures += [_describe_place(place, found) for place, found in places.items()]
    return Section(
        name=quantity.replace(" ", "-"),
        heading=HEADINGS.get(quantity, quantity.capitalize()),
        words=WORDS.get(quantity, ""),
        pictures=pictures,
        panels=list(_describe_training(cells, every)) if quantity == "training" else (),
    )


def describe_conditions(measured: Measured) -> str:
    """Where it was measured, without what is a part of one whole."""
    cell = measured.cell
    others = (_describe_coordinate(*each) for each in cell.at.items() if each[0] not in PARTS)
    return ", ".join([_describe_ranks(cell), *others])


def _describe_ranks(cell: Cell) -> str:
    where = f" on {count_noun(cell.nodes, 'node')}" if cell.nodes > 1 else ""
    return f"{count_noun(cell.ranks, 'rank')}{where}"


def _describe_coordinate(name: str, value: object) -> str:
    if name == "bytes" and isinstance(value, int):
        return describe_size(value)
    return describe_condition(name, value)


def _describe_place(place: str, cells: Sequence[Measured]) -> Bars:
    rows: dict[str, dict[str, Measured]] = defaultdict(dict)
    for each in cells:
        rows[each.name][str(each.cell.at.get("part", ""))] = each
    bars = [_describe_row(name, row, rows) for name, row in rows.items()]
    return Bars(
        title=place, unit=cells[0].cell.unit, bars=bars,
        text="Medians of the rounds; the thick line: quartiles; a point a round.",
    )  # fmt: skip


def _describe_row(
    name: str, row: Mapping[str, Measured], rows: Mapping[str, Mapping[str, Measured]]
) -> Bar:
    whole, first = row.get(""), row.get("first all-reduce")
    values = {
        NAMES.get(part, part): _median(each)
        for part, each in row.items()
        if part and each is not first
    }
    notes = []
    if first is not None:
        after = describe_value(_median(first), first.cell.unit)
        notes.append(f"first all-reduce after {after}")
        whole, values = whole or first, {}
    samples = whole.cell.samples if whole is not None else ()
    total = spread(samples) if samples else None
    details = whole.cell.details if whole is not None else {}
    if isinstance(details.get("efficiency"), int | float):
        notes.append(f"efficiency {details['efficiency']:.0%}")
    if isinstance(details.get("share"), int | float):
        notes.append(f"{details['share']:.1%} of the steps between two")
    base = BASES.get(whole.cell.quantity, "") if whole is not None else ""
    if whole is not None and name != base and "" in rows.get(base, {}):
        notes.append(f"{estimate(whole, rows[base]['']):.3f} × the speed of {base}")
    if values:
        return Bar(name, values, total, "; ".join(notes))
    return Bar(name, {"": total.median if total else 0.0}, total, "; ".join(notes), samples)


def _median(measured: Measured) -> float:
    return spread(measured.cell.samples).median


def _describe_phases(cells: Sequence[Measured]) -> list[Bars]:
    """A bar for each number of ranks, so that their growth is seen; phases or stages are parts.

    mpiddp's own phases, which the others outlast, follow on a scale of their own.
    """
    rows: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for each in cells:
        cell = each.cell
        phase = cell.at.get("phase")
        whose, part = (STAGES, each.name) if phase is None else (each.name, str(phase))
        rows[whose][_describe_ranks(cell)][part] = _median(each)
        if cell.details.get("is_own"):
            rows[OWN_PHASES][_describe_ranks(cell)][part] = _median(each)
    return [
        Bars(title=contender, text="Medians of the rounds.", unit=cells[0].cell.unit,
             bars=[Bar(place, parts) for place, parts in found.items()])
        for contender, found in rows.items()
    ]  # fmt: skip


def _describe_programs(cells: Sequence[Measured]) -> Dots:
    """A row for each program, with how many times as fast it is as over the base."""
    rows = []
    for program, found in group_by(cells, lambda each: str(each.cell.at.get("program"))).items():
        others = {each.name: each for each in found}
        base = others.pop(BASES["program"], None)
        speeds = [f"{estimate(each, base):.1f} ×" for each in others.values() if base is not None]
        points = {each.name: spread(each.cell.samples) for each in found}
        rows.append(DotRow(program, points, ", ".join(speeds)))
    return Dots(
        title=_describe_ranks(cells[0].cell), unit=cells[0].cell.unit, rows=rows,
        text="Time of a token, a step or a call: medians of the rounds, bands of their quartiles; "
        f"×: how many times as fast as over {BASES['program']}.",
    )  # fmt: skip


def _describe_training(cells: Sequence[Measured], every: Sequence[Measured]) -> Iterator[Panel]:
    """Accuracy against time, from the curves in the cells' details."""
    goals = [each.cell.at["accuracy"] for each in every if "accuracy" in each.cell.at]
    for place, found in group_by(cells, describe_conditions).items():
        lines = [
            ChartLine(each.name, points)
            for each in found
            if (points := _read_curves(each.cell.details.get("curves")))
        ]
        if lines:
            goal = float(goals[0]) if goals else None
            chart = Chart(
                title="Accuracy against time", unit=SHARE, is_log=False, lines=lines, along="s",
                label="seconds of training, evaluations left out",
                text="Test accuracy by seconds of training: medians of the runs, and quartiles.",
                mark=(goal, "to be reached") if goal else None,
            )  # fmt: skip
            shown = [line.name for line in lines[:MOST_SHOWN]]
            yield Panel(name=place, charts=[chart], shown=shown)


def _read_curves(curves: Any) -> dict[float, Spread]:
    """Of several runs: at each evaluation the median time, and the accuracies."""
    try:
        stages = list(zip(*curves, strict=False))
        return {
            spread([float(seconds) for seconds, _ in stage]).median: spread(
                [float(accuracy) for _, accuracy in stage]
            )
            for stage in stages
        }
    except (TypeError, ValueError):
        return {}
