"""The table, the record and the targets of ``python -m benchmarks programs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.judge.promises import make_target
from benchmarks.judge.ratios import Ratio, compare_rounds, find_common
from benchmarks.judge.targets import Target
from benchmarks.measure.programs.measurement import GLOO, OWN, PROGRAMS, Group
from benchmarks.records.options import describe_interval, describe_seconds, format_rows
from benchmarks.records.schema import Cell, Coordinate, RecordWriter
from benchmarks.records.statistics import quantile, summarize
from mpiddp.wording import count_noun

QUANTITY = "program"
EXPLANATION = """\
Times of a token, a step or a call of the slowest rank: medians over rounds. × Gloo: how many times
faster it is over mpiddp, round by round, and the 95 % interval of that (–: too few
rounds). Digits: whether every bit of the results is the same over both; else they differ by
rounding."""
HEADS = ("", "ranks", "of a", "Gloo", "mpiddp", "× Gloo", "95 %", "digits")


def describe_programs() -> str:
    return "; ".join(
        f"{name}: {each.title}" if each.title != name else name for name, each in PROGRAMS.items()
    )


def compare(groups: Sequence[Group]) -> dict[tuple[str, int], Ratio]:
    """By program and ranks: how many times faster it is over mpiddp, if it was timed over both."""
    rows = [group for group in groups if len(group.series) == 2]
    pairs = [(group.find_times(OWN), group.find_times(GLOO)) for group in rows]
    coefficient = find_common(pairs)
    return {
        (group.program, group.ranks): compare_rounds(*pair, coefficient)
        for group, pair in zip(rows, pairs, strict=True)
    }


def format_table(groups: Sequence[Group]) -> str:
    speeds = compare(groups)
    lines = format_rows([HEADS, *(_format_row(group, speeds) for group in groups if group.series)])
    for group in groups:
        # Mostly one reason for both.
        for why in dict.fromkeys(group.refusals.values()):
            lines.append(f"left out: {group.program} on {count_noun(group.ranks, 'rank')}: {why}")
    lines += [f"wrong: {text}" for text in list_wrong(groups)]
    shares = [each.others_share for each in groups if each.others_share is not None]
    if shares:
        lines.append(f"other programs took up to {max(shares):.0%} of the cores meanwhile")
    return "\n".join(lines) if groups else ""


def _format_row(group: Group, speeds: Mapping[tuple[str, int], Ratio]) -> list[str]:
    speed = speeds.get((group.program, group.ranks))
    times = (group.find_times(each) for each in (GLOO, OWN))
    return [
        group.program,
        str(group.ranks),
        PROGRAMS[group.program].step,
        *(describe_seconds(quantile(each, 0.5)) if each else "–" for each in times),
        f"{speed.estimate:.2f}" if speed is not None else "–",
        describe_interval(speed.interval, "{:.2f}".format) if speed is not None else "–",
        "the same" if group.has_equal_digits else "rounded" if speed is not None else "–",
    ]


def list_wrong(groups: Sequence[Group]) -> list[str]:
    return [
        f"{group.program} over {contender.name} on {count_noun(group.ranks, 'rank')}: {why}"
        for group in groups
        for contender, why in group.wrong.items()
    ]


def record_group(record: RecordWriter, group: Group) -> None:
    at: dict[str, Coordinate] = {"program": group.program}
    for contender, series in group.series.items():
        ranks = zip(*(visit.by_rank for visit in series.samples), strict=True)
        details = {
            "steps": [visit.steps for visit in series.samples],
            "positions": series.positions,
            "digits": "the same" if group.has_equal_digits else "rounded",
        }
        times = group.find_times(contender)
        cell = Cell(
            quantity=QUANTITY, contender=contender.name, ranks=group.ranks, at=at,
            samples=tuple(times), summary=summarize(times),
            by_rank=tuple(map(summarize, ranks)), details=details,
        )  # fmt: skip
        record.add(cell)
    for contender, why in group.refusals.items():
        record.refuse(QUANTITY, contender.name, why, ranks=group.ranks, **at)
    for contender, why in group.wrong.items():
        record.fail(QUANTITY, contender.name, why, ranks=group.ranks, **at)
    record.write("group", ranks=group.ranks, **at, others_share=group.others_share)


def judge(groups: Sequence[Group]) -> list[Target]:
    """The promises that these groups say something about."""
    found: dict[str, dict[str, Ratio]] = {}
    for (name, ranks), speed in compare(groups).items():
        found.setdefault(name, {})[count_noun(ranks, "rank")] = speed
    return [
        make_target(f"{name}: at least {least:g} × Gloo's {kind.step}s", found[name], least)
        for name, kind in PROGRAMS.items()
        if (least := kind.promise) is not None and name in found
    ]
