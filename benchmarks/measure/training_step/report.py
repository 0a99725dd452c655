"""The results of a measurement of training steps: the tables, and the record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.judge.ratios import Ratio, compare_rounds
from benchmarks.measure.training_step.contenders import BASE, BASES, FUSED, OWN_BASE, Contender
from benchmarks.measure.training_step.measurement import Group
from benchmarks.measure.training_step.traffic import Bytes
from benchmarks.records.contenders import TORCH_JOB
from benchmarks.records.options import describe_seconds, format_rows
from benchmarks.records.schema import Cell, Coordinate, RecordWriter, make_cell
from benchmarks.records.statistics import Summary, quantile, summarize
from mpiddp.training.options.groups.synchronisation import FRAMEWORK
from mpiddp.wording import describe_size

EXPLANATION = """\
A step is the slowest rank's. compute: forward and backward alone, in passes of their own, all ranks
at once; update: the optimizer; exposed: what is left, communication that nothing hides (noise may
make it negative); where servers update, that is in it. Efficiency: samples per second, over those
of one rank alone, the framework's or mpiddp's, times the ranks. Bytes are counted by what is sent;
~ is what interfaces counted, headers included."""
HEADS = (
    "", "step", "quartiles", "compute", "exposed", "update", "samples/s", "efficiency", "× DDP",
    "overlap", "sent/rank", "busiest link",
)  # fmt: skip
FRAMEWORKS = Contender(FRAMEWORK)
STEP, PARTS = "training step", ("compute", "exposed", "update")
"""The quantity of a record, and its parts."""


@dataclass(frozen=True)
class Parts:
    """Medians over the visits, in seconds of a step."""

    seconds: Summary
    compute: float
    exposed: float
    update: float
    samples_per_second: float


def summarize_parts(group: Group, contender: Contender) -> Parts | None:
    """None if it was not timed."""
    visits = group.samples(contender)
    if not visits:
        return None

    names = ("compute", "exposed", "update", "samples_per_second")
    medians = (quantile([getattr(visit, name) for visit in visits], 0.5) for name in names)
    return Parts(summarize([visit.seconds for visit in visits]), *medians)


def find_efficiency(group: Group, contender: Contender) -> Ratio | None:
    """Samples per second over those of one rank alone times the ranks; None if unknown.

    The framework's loops are compared with one like them, mpiddp's with one like those: otherwise
    a faster optimizer would look like a faster synchronisation. For that reason there is none for
    the framework's loop with another optimizer.
    """
    if contender.sync == FUSED:
        return None
    base = BASE if contender.job == TORCH_JOB else OWN_BASE
    mine, alone = group.samples(contender), group.samples(base)
    if not mine or not alone:
        return None
    ranks = 1 if contender in BASES else group.ranks
    return compare_rounds(
        [ranks * visit.samples_per_second for visit in alone],
        [visit.samples_per_second for visit in mine],
        group.coefficient,
    )


def find_bytes(group: Group, contender: Contender) -> Bytes | None:
    """Counted by what is sent, where that is known; else as interfaces counted."""
    visits = group.samples(contender)
    if not visits or contender in BASES:
        return None
    traffic = group.notes.get(contender, {}).get("traffic")
    if traffic is not None:
        return Bytes(traffic["each"], traffic["busiest"], is_read=False)
    if group.framework.get("device") == "cuda":
        # NCCL's bytes pass by no interface within a node.
        return None
    # Other programs' bytes can only add to it.
    each = min(visit.reading.each for visit in visits)
    busiest = [visit.reading.busiest for visit in visits if visit.reading.busiest is not None]
    return Bytes(each, min(busiest, default=None), is_read=True)


# ---- the tables ---------------------------------------------------------------------------


def format_group(group: Group) -> str:
    """All that is printed of one workload on one number of ranks, but for the targets."""
    plan = group.plan
    device = "GPUs" if group.framework.get("device") == "cuda" else "CPUs"
    title = (
        f"{group.workload} on {group.ranks} ranks of {group.where}, {device}, "
        f"batch {plan.batch_size} per worker, {plan.repetitions} rounds; milliseconds; the "
        f"framework's DDP is over {group.framework.get('backend')}"
    )
    lines = [title]
    if plan.straggler is not None:
        lines.append(f"straggler {plan.straggler}")
    if group.others_share is not None:
        lines.append(f"other programs took {group.others_share:.0%} of the cores meanwhile")
    if group.link is not None:
        lines.append(
            f"a link between two nodes carries {group.link.megabits:.3g} Mbit/s one way, "
            f"after {describe_seconds(group.link.latency)}"
        )
    lines += format_rows([HEADS, *filter(None, (_format_row(group, c) for c in group.series))])
    lines += [f"left out: {c.name}: {why}" for c, why in group.refusals.items()]
    lines += [f"wrong: {c.name}: {why}" for c, why in group.wrong.items()]
    return "\n".join(lines)


def _format_row(group: Group, contender: Contender) -> list[str] | None:
    parts = summarize_parts(group, contender)
    if parts is None:
        return None
    speed, efficiency = group.find_speed(contender, FRAMEWORKS), find_efficiency(group, contender)
    bytes_ = find_bytes(group, contender)
    mark = "~" if bytes_ is not None and bytes_.is_read else ""
    busiest = bytes_.busiest if bytes_ is not None else None
    quartiles = (parts.seconds.lower_quartile, parts.seconds.upper_quartile)
    return [
        contender.name,
        format_milliseconds(parts.seconds.median),
        "–".join(map(format_milliseconds, quartiles)),
        format_milliseconds(parts.compute),
        format_milliseconds(parts.exposed),
        "servers" if contender.serves else format_milliseconds(parts.update),
        f"{parts.samples_per_second:.4g}",
        f"{efficiency.estimate:.0%}" if efficiency else "–",
        "1" if contender == FRAMEWORKS else f"{speed.estimate:.2f}" if speed else "–",
        group.notes.get(contender, {}).get("overlap", "–"),
        f"{mark}{describe_size(round(bytes_.each))}" if bytes_ else "–",
        f"{mark}{describe_size(round(busiest))}" if busiest is not None else "–",
    ]


def format_milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def list_wrong(groups: Sequence[Group]) -> list[str]:
    return [
        f"{contender.name} on {group.workload} and {group.ranks} ranks: {why}"
        for group in groups
        for contender, why in group.wrong.items()
    ]


# ---- the record ---------------------------------------------------------------------------


def make_cells(group: Group) -> Iterator[Cell]:
    """Of each contender its step, that step's parts and its samples per second."""
    plan = group.plan
    at: dict[str, Coordinate] = {"model": str(group.workload), "batch": plan.batch_size}
    if plan.straggler is not None:
        at["straggler"] = plan.straggler
    for contender, series in group.series.items():
        visits = series.samples
        place: dict[str, Any] = {
            "contender": contender.name, "ranks": group.ranks, "nodes": group.nodes or 1,
        }  # fmt: skip
        seconds = [visit.seconds for visit in visits]
        bytes_, efficiency = find_bytes(group, contender), find_efficiency(group, contender)
        details = {
            "workers": contender.count_workers(group.ranks),
            "steps": [visit.steps for visit in visits],
            "efficiency": efficiency.estimate if efficiency is not None else None,
            "bytes": asdict(bytes_) if bytes_ is not None else None,
            "read": [asdict(visit.reading) for visit in visits],
            "notes": dict(group.notes.get(contender, {})),
            "positions": series.positions,
        }
        ranks = zip(*(visit.by_rank for visit in visits), strict=True)
        yield Cell(
            quantity=STEP, at=at, samples=tuple(seconds), summary=summarize(seconds),
            by_rank=tuple(map(summarize, ranks)), details=details, **place,
        )  # fmt: skip
        for part in PARTS:
            values = [getattr(visit, part) for visit in visits]
            yield make_cell(values, quantity=STEP, at={**at, "part": part}, **place)
        rates = [visit.samples_per_second for visit in visits]
        yield make_cell(rates, quantity="training speed", at=at, unit="samples/s", **place)


def record_group(record: RecordWriter, group: Group) -> None:
    """Its cells, what was left out or wrong, and what holds for all of it."""
    for cell in make_cells(group):
        record.add(cell)
    where: dict[str, Coordinate] = {"model": str(group.workload), "ranks": group.ranks}
    for contender, why in group.refusals.items():
        record.refuse(STEP, contender.name, why, **where)
    for contender, why in group.wrong.items():
        record.fail(STEP, contender.name, why, **where)
    device = {name: group.framework.get(name) for name in ("device", "gpu", "gpus", "backend")}
    link = asdict(group.link) if group.link is not None else None
    record.write(
        "group", **where, nodes=group.nodes, others_share=group.others_share, link=link, **device
    )
