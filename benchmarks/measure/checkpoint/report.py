"""The table, the picture and the targets of ``python -m benchmarks checkpoint``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.judge.ratios import Ratio
from benchmarks.judge.targets import Target
from benchmarks.measure.checkpoint.measurement import Measurement, Plan
from benchmarks.records.options import SECONDS, describe_seconds, describe_value, format_rows
from benchmarks.records.schema import Coordinate, RecordWriter, make_cell
from benchmarks.show.plotting import COLOURS, draw_bar, finish_bars, open_figure
from mpiddp.wording import describe_size

SYNCHRONOUS, ASYNCHRONOUS, OVER_RAW, AGREEMENT = 0.035, 0.01, 1.5, 0.01
LEAST_BYTES = 64 << 20
"""Smaller checkpoints take what their files' names and lists take, which grows with no bytes."""
QUANTITY = "checkpoint"
NAMES = {
    "synchronous": "synchronous save",
    "asynchronous": "asynchronous save",
    "raw": "raw write and flush",
    "digest": "checksum alone (XXH3)",
}
EXPLANATION = """\
Times are of the slowest rank, medians over rounds. A share is of the time of the steps between two
checkpoints. A synchronous save ends when the checkpoint is on the disk. An asynchronous one costs
the time until the call returns, and what the steps beside the write take longer (noise may make
that negative). Raw: one file per rank, as many bytes, written and flushed."""


def format_table(found: Measurement, plan: Plan) -> str:
    title = (
        f"{plan.model}, AdamW, {found.ranks} ranks ({found.device}), batch {plan.batch_size} per "
        f"rank, a checkpoint every {plan.save_every} steps, {plan.repetitions} rounds; state "
        f"{describe_size(found.state_bytes)}, files {describe_size(found.file_bytes)}"
    )
    rows = [["", "median", "quartiles", "share"]]
    names = {
        "step": "a step without a checkpoint",
        "synchronous": "a synchronous save",
        "asynchronous": "an asynchronous save",
        "stall": "  until the call returns",
        "slowdown": "  slower steps beside the write",
        "raw": "raw write and flush",
        "digest": "XXH3 of the bytes, alone",
    }
    for name, text in names.items():
        summary = found.summarize(name)
        quartiles = (summary.lower_quartile, summary.upper_quartile)
        share = "" if name == "step" else f"{found.find_share(name, plan.save_every):.2%}"
        shown = "–".join(describe_value(each, SECONDS) for each in quartiles)
        rows.append([text, describe_value(summary.median, SECONDS), shown, share])
    look = describe_seconds(found.agreement.look)
    grown = describe_size(max(0, found.grown_bytes))
    rows.append(["a look for a signal, after a step", look, "", f"{found.agreement_share:.3%}"])
    lines = [
        title,
        *format_rows(rows),
        f"a synchronous save takes {found.over_raw.estimate:.2f} × the raw write, round by round",
        f"a look's share is of a step; its thread takes {found.agreement.thread:.3%} of a core",
        f"memory of all ranks: {describe_size(found.copies_bytes)} of copies, {grown} more in all",
    ]
    return "\n".join(lines)


def record_measurement(record: RecordWriter, found: Measurement, plan: Plan) -> None:
    """Seconds that training waits, each with its share of the steps between two checkpoints."""
    at: dict[str, Coordinate] = {"model": plan.model, "batch": plan.batch_size}

    def add(quantity: str, contender: str, name: str, **more: Any) -> None:
        values = [getattr(each, name) for each in found.rounds]
        more["at"] = {**at, **more.get("at", {})}
        cell = make_cell(values, quantity=quantity, contender=contender, ranks=found.ranks, **more)
        record.add(cell)

    add("training step", "no checkpoint", "step")
    for name, title in NAMES.items():
        share = {"share": found.find_share(name, plan.save_every)}
        add(QUANTITY, title, name, details={**share, "save_every": plan.save_every})
    for part in ("stall", "slowdown"):
        add(QUANTITY, NAMES["asynchronous"], part, at={"part": part})
    facts = {name: value for name, value in asdict(found).items() if name != "rounds"}
    record.write("group", **at, **facts)


def draw(path: Path, measured: Sequence[Measurement], plan: Plan, note: str) -> None:
    """A panel for each number of ranks."""
    title = (
        "How long training waits for a checkpoint: median, band of the quartiles, a point a round"
    )
    with open_figure(path, 6.4 * len(measured), 3.0, title, note) as figure:
        axes = figure.subplots(1, len(measured), squeeze=False)[0]
        for axis, found in zip(axes, measured, strict=True):
            for place, name in enumerate(NAMES):
                median = found.summarize(name).median
                values = [getattr(each, name) for each in found.rounds]
                share = f"{found.find_share(name, plan.save_every):.2%}"
                text = f"{describe_value(median, SECONDS)}, {share} of {plan.save_every} steps"
                draw_bar(axis, place, values, COLOURS[place], text)
            most = max(max(getattr(each, name) for each in found.rounds) for name in NAMES)
            axis.set_xlim(0, 1.8 * most)
            axis.set_xlabel("seconds", fontsize=8)
            axis.set_title(f"{found.ranks} ranks ({found.device})", loc="left", fontsize=10)
            finish_bars(axis, list(NAMES.values()))


def judge(found: Measurement, plan: Plan) -> list[Target]:
    every = f"a checkpoint every {plan.save_every} steps"
    whole, part = (
        found.find_share(name, plan.save_every) for name in ("synchronous", "asynchronous")
    )
    raw = f"a synchronous save: at most {OVER_RAW:g} × the raw write and flush"
    looks = f"agreeing on signals: at most {AGREEMENT:.0%} of a step"
    rows: list[tuple[str, Ratio | float, float]] = [
        (f"{every}, synchronous: at most {SYNCHRONOUS:.1%} of training time", whole, SYNCHRONOUS),
        (f"{every}, asynchronous: at most {ASYNCHRONOUS:.0%} of training time", part, ASYNCHRONOUS),
        *([(raw, found.over_raw, OVER_RAW)] if found.file_bytes >= LEAST_BYTES else []),
        (looks, found.agreement_share, AGREEMENT),
    ]
    return [Target(text, {"": value}, at_most=limit) for text, value, limit in rows]
