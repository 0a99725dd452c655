"""Bars of what is not measured by size: start-up, training steps, checkpoints, stragglers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.judge.winners import describe_condition
from benchmarks.records.material import Measured
from benchmarks.records.options import SHARE, describe_value
from benchmarks.records.schema import Cell, group_by
from benchmarks.records.statistics import Spread, spread
from benchmarks.show.page.pictures import Bar, Bars, Chart, Line, Panel, Section
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
    "training": "Seconds of a whole training while a worker is slow.",
    "time to accuracy": "Seconds until the accuracy is reached while a worker is slow.",
    "probe": "Copies by all ranks at once, reading what a neighbour wrote, a message to another "
    "node; nothing: what the measurement itself takes.",
    "checkpoint": "Seconds that training waits for a checkpoint, and the raw write of its bytes.",
}
STAGES = "All stages"
HEADINGS = {
    "start-up phase": "Phases of start-up",
    "training": "Training beside a straggler",
    "program": "Programs of torch.distributed",
    "probe": "What the machine can do",
}


def draw_steps(cells: Sequence[Measured], quantity: str) -> Section:
    """The section of one quantity."""
    if quantity.startswith("start-up "):
        pictures = _draw_phases(cells)
    else:
        places = group_by(cells, describe_conditions)
        pictures = [_draw_place(place, found) for place, found in places.items()]
    return Section(
        name=quantity.replace(" ", "-"),
        heading=HEADINGS.get(quantity, quantity.capitalize()),
        words=WORDS.get(quantity, ""),
        pictures=pictures,
        panels=list(_draw_training(cells)) if quantity == "training" else (),
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


def _draw_place(place: str, cells: Sequence[Measured]) -> Bars:
    rows: dict[str, dict[str, Measured]] = defaultdict(dict)
    for each in cells:
        rows[each.name][str(each.cell.at.get("part", ""))] = each
    bars = [_draw_row(name, row) for name, row in rows.items()]
    unit = cells[0].cell.unit
    return Bars(title=place, text="Medians of the rounds; the thin line: quartiles.", unit=unit,
                bars=bars)  # fmt: skip


def _draw_row(name: str, row: Mapping[str, Measured]) -> Bar:
    whole = row.get("")
    parts = {part: each for part, each in row.items() if part and part != "first all-reduce"}
    values = {NAMES.get(part, part): _median(each) for part, each in parts.items()}
    total = spread(whole.cell.samples) if whole is not None else None
    if not values:
        values = {"": total.median if total is not None else 0.0}
    notes = []
    if "first all-reduce" in row:
        first = row["first all-reduce"]
        after = describe_value(_median(first), first.cell.unit)
        notes.append(f"first all-reduce after {after}")
        values = {"": total.median} if total is not None else {"": _median(first)}
    details = whole.cell.details if whole is not None else {}
    for key, text in (("efficiency", "efficiency"), ("share", "of the steps between two")):
        if isinstance(details.get(key), int | float):
            shown = f"{details[key]:.1%}" if key == "share" else f"{details[key]:.0%}"
            notes.append(f"{shown} {text}" if key == "share" else f"{text} {shown}")
    return Bar(name, values, total, "; ".join(notes))


def _median(measured: Measured) -> float:
    return spread(measured.cell.samples).median


def _draw_phases(cells: Sequence[Measured]) -> list[Bars]:
    """A bar for each number of ranks, so that their growth is seen; phases or stages are parts."""
    rows: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for each in cells:
        cell = each.cell
        phase = cell.at.get("phase")
        whose, part = (STAGES, each.name) if phase is None else (each.name, str(phase))
        rows[whose][_describe_ranks(cell)][part] = _median(each)
    return [
        Bars(title=contender, text="Medians of the rounds.", unit=cells[0].cell.unit,
             bars=[Bar(place, parts) for place, parts in found.items()])
        for contender, found in rows.items()
    ]  # fmt: skip


def _draw_training(cells: Sequence[Measured]) -> Iterator[Panel]:
    """Accuracy against time, from the curves in the cells' details."""
    for place, found in group_by(cells, describe_conditions).items():
        lines = [
            Line(each.name, points)
            for each in found
            if (points := _read_curves(each.cell.details.get("curves")))
        ]
        if lines:
            chart = Chart(
                title="Accuracy against time", unit=SHARE, is_log=False, lines=lines, along="s",
                text="Test accuracy by seconds of training: medians of the runs, and quartiles.",
            )  # fmt: skip
            yield Panel(name=place, charts=[chart], shown=[line.name for line in lines[:6]])


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
