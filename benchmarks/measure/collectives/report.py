"""The tables of what was measured, the machine's limits, and what stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.judge.ratios import estimate_rounds
from benchmarks.judge.slow_links import list_slow
from benchmarks.measure.collectives.findings import Findings, Refusal
from benchmarks.records.contenders import (
    ALL_PAIRS,
    COPIES,
    EMPTY,
    GLOO,
    LINK,
    MPI,
    OWN,
    PEER_READ,
    POINT_TO_POINT,
    Contender,
)
from benchmarks.records.options import describe_seconds, format_rows
from benchmarks.records.schema import Cell, group_by
from mpiddp.schedules.registry import parse
from mpiddp.wording import describe_size

HEADS = (
    "", "over", "buffer", "ran", "median", "95 % of median", "5–95 % of iterations", "algbw",
    "busbw", "× Gloo", "× MPI", "rounds", "until",
)  # fmt: skip
OVERLAP_HEADS = ("compute", "alone", "hidden")


def format_findings(found: Findings) -> str:
    """All that is printed of one number of ranks, but for the targets."""
    surroundings, plan = found.surroundings, found.plan
    title = (
        f"{found.ranks} ranks on {surroundings.where}: {plan.quantity}; the slowest rank's times, "
        "× by round and then their median; rates in GB/s"
    )
    head = [title, describe_collectives(surroundings.collectives)]
    named = (name for name in plan.algorithms if name != "auto")
    head += [f"{name}: {parse(name).summary}" for name in named]
    if surroundings.framework.get("nccl"):
        head.append(f"NCCL {surroundings.framework['nccl']} on {surroundings.framework['gpu']}")
    if surroundings.others_share is not None:
        head.append(f"other programs took {surroundings.others_share:.0%} of the cores meanwhile")
    notes = [
        _describe_first_calls(surroundings.first_calls),
        describe_limits(found),
        describe_refusals(found),
        describe_lack(found),
        *list_remarks(found.cells),
    ]
    parts = ["\n".join([*head, *filter(None, notes)])]
    if plan.quantity == ALL_PAIRS:
        return "\n\n".join([*parts, *(format_matrix(found, size) for size in plan.bytes)])
    tables = (format_table(found, cells) for cells in found.group(by_size=True))
    return "\n\n".join([*parts, *tables])


def format_table(found: Findings, cells: Sequence[Cell]) -> str:
    """One size: a row for each contender that was timed."""
    first = cells[0]
    counts = sorted({cell.summary.count for cell in cells})
    spread = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    heads = [*HEADS, *(OVERLAP_HEADS if "hidden" in first.details else ())]
    rows = [_format_row(found, cell) for cell in cells]
    title = f"{_describe_place(first)}, {spread} iterations"
    return "\n".join([title, *format_rows([heads, *rows])])


def _describe_place(cell: Cell) -> str:
    at = cell.at
    words = [f"{describe_size(int(at['bytes']))} of {at['type']}"]
    if cell.quantity == POINT_TO_POINT:
        ways = "both ways at once" if at.get("direction") == "both" else "half of a round trip"
        where = "two nodes" if at["link"] == "network" else "one node"
        words.append(f"between two ranks of {where}, {ways}")
    words += [str(at["operator"])] if "operator" in at else []
    words += [name for name in ("cold", "overlap") if name in at]
    if "busy" in at:
        words.append(f"{at['busy']} busy on each node")
    return f"{cell.quantity}: {', '.join(words)}"


def _format_row(found: Findings, cell: Cell) -> list[str]:
    times, details = cell.summary, cell.details
    between = times.interval
    row = Contender(
        details["maker"],
        algorithm=details["algorithm"],
        transport=details["transport"],
        quantity=cell.quantity,
    )
    words = [
        row.name,
        row.way,
        str(details["buffer"]),
        str(details["ran"] or "its own choice"),
        describe_seconds(times.median),
        _describe_range(between.low, between.high) if between else "–",
        _describe_range(times.low, times.high),
        f"{details['algbw']:.3g}",
        f"{details['busbw']:.3g}",
        *(_format_speed(found, cell, maker) for maker in (GLOO, MPI)),
        str(len(cell.samples)),
        str(details["stopped"]),
    ]
    if "hidden" in details:
        words += [describe_seconds(details["compute"]), describe_seconds(details["alone"])]
        words.append(f"{details['hidden']:.0%}")
    return words


def _format_speed(found: Findings, cell: Cell, maker: str) -> str:
    if cell.details["maker"] == maker:
        return "1"
    other = found.find_like(cell, maker)
    return "–" if other is None else f"{estimate_rounds(cell.samples, other.samples):.2f}"


def _describe_range(low: float, high: float) -> str:
    return f"{describe_seconds(low)} – {describe_seconds(high)}"


# ---- all pairs -----------------------------------------------------------------------------------


def format_matrix(found: Findings, size: int) -> str:
    """One size: a row for each end that sends, a column for each that receives."""
    cells = {
        (int(cell.at["from"]), int(cell.at["to"])): cell
        for cell in found.measured
        if cell.bytes == size
    }
    ends = sorted({end for pair in cells for end in pair})
    what = "node" if (found.nodes or 1) > 1 else "rank"
    rows = [["from \\ to", *(f"{what} {end}" for end in ends)]]
    for source in ends:
        row = [_format_pair(cells.get((source, target))) for target in ends]
        rows.append([f"{what} {source}", *row])
    title = f"all-pairs: {describe_size(size)}, the median of one direction, and GB/s"
    slow = list_slow({pair: cell.samples for pair, cell in cells.items()}, what)
    return "\n".join([title, *format_rows(rows), *(slow or ["no link is slow"])])


def _format_pair(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return f"{describe_seconds(cell.summary.median)}, {cell.details['algbw']:.3g}"


# ---- what stands beside the tables ---------------------------------------------------------------


def describe_limits(found: Findings) -> str:
    """What the machine itself can do, of what was measured of it."""
    lines = []
    if (peer := found.find_probe(PEER_READ)) is not None:
        lines.append(
            f"a rank reads what its neighbour has just written ({describe_size(peer.bytes)}) at "
            f"{_describe_rate(peer)}"
        )
    if (copy := found.find_probe(*COPIES)) is not None:
        lines.append(
            f"memory bound: {describe_seconds(copy.summary.median)} to read and write "
            f"{describe_size(copy.bytes)} on each rank, all at once "
            f"({_describe_rate(copy)}, {copy.contender.removeprefix('copy ')})"
        )
    if (link := found.find_probe(LINK)) is not None:
        lines.append(
            f"a link between two nodes carries {_describe_rate(link)}"
            f" one way ({link.bytes / 1e6:g} MB)"
        )
    if (nothing := found.find_probe(EMPTY)) is not None:
        lines.append(f"an iteration of nothing takes {describe_seconds(nothing.summary.median)}")
    return "\n".join(lines)


def _describe_rate(cell: Cell) -> str:
    times = cell.summary
    slow, usual, fast = (
        cell.bytes / seconds * 1e-9 for seconds in (times.high, times.median, times.low)
    )
    return f"{usual:.3g} GB/s (5–95 %: {slow:.3g}–{fast:.3g})"


def describe_collectives(collectives: Mapping[str, object]) -> str:
    copying = "single copy" if collectives.get("single_copy") else "no single copy"
    notes = collectives.get("notes", ())
    assert isinstance(notes, list | tuple)
    return "; ".join([f"mpiddp waits by {collectives.get('wait', '?')}", copying, *notes])


def _describe_first_calls(seconds: Mapping[str, float]) -> str:
    if not seconds:
        return ""
    each = ", ".join(f"{maker} {describe_seconds(value)}" for maker, value in seconds.items())
    return f"the first call of each, which does not count: {each}"


def describe_refusals(found: Findings) -> str:
    """What was left out, and why; one line for each contender and reason."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for refusal in found.refusals:
        place = describe_size(int(refusal.at["bytes"]))
        if "operator" in refusal.at:
            place += f" ({refusal.at['operator']} of {refusal.at['type']})"
        name = f"{refusal.contender}, {refusal.quantity}"
        sizes.setdefault((name, refusal.reason), []).append(place)
    return "\n".join(
        f"left out: {label} at {', '.join(dict.fromkeys(where))}: {reason}"
        for (label, reason), where in sizes.items()
    )


def describe_lack(found: Findings) -> str:
    """That nothing of mpiddp was measured, and why; empty if something was, or none was to be."""
    names = [cell.contender for cell in found.measured]
    own = [each.reason for each in found.refusals if each.contender.startswith(OWN)]
    if not own or any(name.startswith(OWN) for name in names):
        return ""
    return f"nothing of mpiddp was measured: {'; '.join(dict.fromkeys(own))}"


def list_remarks(cells: Sequence[Cell]) -> list[str]:
    """Slow ranks and broken guidelines, and which contenders' medians are not known to 5 %."""
    late = (cell for cell in cells if "slow_rank" in cell.details)
    slow = group_by(late, lambda cell: cell.details["slow_rank"])
    remarks = [
        f"slow rank: rank {rank} {named[0].details['slow_rank_reason']} (in {len(named)} of "
        f"{len(cells)} rows)"
        for rank, named in slow.items()
    ]
    remarks += [
        f"guideline: {cell.contender}, {cell.quantity} at {describe_size(cell.bytes)} {text}"
        for cell in cells
        for text in cell.details.get("guidelines", ())
    ]
    spent = sum(cell.details["stopped"] == "budget" for cell in cells)
    if spent:
        remarks.append(
            f"{spent} of {len(cells)} rows spent their budget before their median was known to "
            "5 %; --budget gives them more"
        )
    return remarks


def list_wrong(groups: Sequence[Findings]) -> list[str]:
    """What computed something else: when it was first asked, or in a later round."""
    wrong: list[tuple[Findings, Cell | Refusal, str]] = [
        (found, each, each.reason) for found in groups for each in found.refusals if each.is_wrong
    ]
    wrong += [
        (found, each, f"its result has {each.details['wrong']} wrong elements")
        for found in groups
        for each in found.cells
        if each.details.get("wrong")
    ]
    return [
        f"{each.contender}, {each.quantity} at {describe_size(int(each.at['bytes']))} on "
        f"{found.ranks} ranks: {reason}"
        for found, each, reason in wrong
    ]
