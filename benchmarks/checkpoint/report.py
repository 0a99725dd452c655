"""The table of ``python -m benchmarks checkpoint``."""

from __future__ import annotations

from benchmarks.checkpoint.measurement import Measurement, Plan
from benchmarks.common.options import describe_seconds, describe_size, format_rows

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
        shown = "–".join(map(format_seconds, quartiles))
        rows.append([text, format_seconds(summary.median), shown, share])
    look = describe_seconds(found.agreement.look)
    grown = describe_size(max(0, found.grown_bytes))
    rows.append(["a look for a signal, after a step", look, "", f"{found.agreement_share:.3%}"])
    lines = [
        title,
        *format_rows(rows),
        f"a synchronous save takes {found.over_raw:.2f} × the raw write, round by round",
        f"a look's share is of a step; its thread takes {found.agreement.thread:.3%} of a core",
        f"memory of all ranks: {describe_size(found.copies_bytes)} of copies, {grown} more in all",
    ]
    return "\n".join(lines)


def format_seconds(seconds: float) -> str:
    """Three figures; also of a difference, which may be negative."""
    return f"-{describe_seconds(-seconds)}" if seconds < 0 else describe_seconds(seconds)
