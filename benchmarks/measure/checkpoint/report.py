"""The table and the targets of ``python -m benchmarks checkpoint``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.judge.promises import make_target
from benchmarks.judge.ratios import Ratio
from benchmarks.judge.targets import Target
from benchmarks.measure.checkpoint.measurement import Measurement, Plan
from benchmarks.records.options import SECONDS, describe_seconds, describe_value, format_rows
from benchmarks.records.schema import Coordinate, RecordWriter, make_cell
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
    return [make_target(text, {"": value}, at_most=limit) for text, value, limit in rows]
