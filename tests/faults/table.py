"""The campaign's table: a row for each fault."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attempts import Record
from campaign import Campaign

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
"""The marks between which a document has the table."""
HEADINGS = (
    "fault (name)", "attempts", "passed", "detected in, median / worst", "lost steps, worst",
    "outcome",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    fault: str
    title: str
    planned: int
    made: int
    passed: int
    detected_median: float | None
    """Seconds."""
    detected_worst: float | None
    lost_steps: int | None
    """The worst of all attempts."""
    outcomes: dict[str, int]
    """How often attempts that passed ended in a way."""
    seconds: float
    """That all attempts took together."""
    load: float | None
    """The median of `Record.load`."""


def make_rows(campaign: Campaign, records: Iterable[Record]) -> list[Row]:
    """A row for each fault of the campaign, with or without records."""
    by_fault: dict[str, list[Record]] = {name: [] for name in campaign.faults}
    for record in records:
        if record.fault in by_fault:
            by_fault[record.fault].append(record)
    return [_make_row(campaign, name, found) for name, found in by_fault.items()]


def _make_row(campaign: Campaign, name: str, records: Sequence[Record]) -> Row:
    fault = campaign.faults[name]
    detected = [each.detected for each in records if each.detected is not None]
    lost = [each.lost_steps for each in records if each.lost_steps is not None]
    return Row(
        fault=name,
        title=fault.title,
        planned=fault.attempts,
        made=len(records),
        passed=sum(each.passed for each in records),
        detected_median=round(statistics.median(detected), 3) if detected else None,
        detected_worst=round(max(detected), 3) if detected else None,
        lost_steps=max(lost, default=None),
        outcomes=dict(Counter(each.outcome for each in records if each.passed).most_common()),
        seconds=round(sum(each.seconds for each in records), 1),
        load=statistics.median(each.load for each in records) if records else None,
    )


def describe(rows: Iterable[Row]) -> str:
    """The table in Markdown, without rows of which nothing was made."""
    lines = [_join(HEADINGS), _join("---" for _ in HEADINGS)]
    lines += [_join(_list_cells(row)) for row in rows if row.made]
    return "\n".join(lines) + "\n"


def _join(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _list_cells(row: Row) -> list[str]:
    made = f"{row.made}" if row.made == row.planned else f"{row.made} of {row.planned}"
    detected = "–"
    if row.detected_median is not None and row.detected_worst is not None:
        detected = f"{row.detected_median:.2f} / {row.detected_worst:.2f} s"
    lost = "–" if row.lost_steps is None else f"{row.lost_steps}"
    outcomes = "; ".join(
        text if len(row.outcomes) == 1 else f"{text} ({count})"
        for text, count in row.outcomes.items()
    )
    return [f"{row.title} (`{row.fault}`)", made, f"{row.passed}", detected, lost, outcomes or "–"]


def put_into(path: Path, commit: str, machine: str, rows: Sequence[Row]) -> None:
    """Write the table between the marks of a document. Raises ValueError where there are none."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path}: expected {BEGIN} and {END}")
    made, planned = sum(row.made for row in rows), sum(row.planned for row in rows)
    minutes = sum(row.seconds for row in rows) / 60
    loads = [row.load for row in rows if row.load is not None]
    text = (
        f"{made} of {planned} attempts at commit `{commit}`, {minutes:.0f} minutes in all, on\n"
        f"{machine},\nwith a load of {statistics.median(loads or [0]):.1f} processes "
        f"(median):\n\n{describe(rows)}"
    )
    path.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")
