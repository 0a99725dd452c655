"""What is printed of a measurement: tables, the machine's limits, and what stands out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from benchmarks.judge.ratios import estimate_rounds
from benchmarks.judge.slow_links import list_slow
from benchmarks.measure.collectives.cells import CallGroup, find_probe, group_like
from benchmarks.measure.collectives.options import CollectivesPlan
from benchmarks.measure.trials import Refusal
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
from benchmarks.records.options import describe_seconds
from benchmarks.records.schema import Cell, Coordinate, group_by
from benchmarks.show.tables import format_table
from mpiddp.schedules.registry import parse
from mpiddp.wording import describe_size

Column = tuple[str, Callable[[Cell], str]]


def format_run(groups: Sequence[CallGroup], plan: CollectivesPlan) -> str:
    """All that is printed of one number of ranks, but for the targets; nothing if it has none."""
    cells = [each for group in groups for each in group.cells]
    left_out = [each for group in groups for each in group.refusals]
    if not cells and not left_out:
        return ""
    told = groups[-1]
    lines = [
        *describe_surroundings(told, plan),
        *list_limits(cells),
        *list_left_out(left_out),
        *list_lack(cells, left_out),
        *list_remarks(cells),
    ]
    if plan.quantity == ALL_PAIRS:
        tables = [format_matrix(cells, size) for size in plan.bytes]
    else:
        tables = list(map(format_size, group_like(cells)))
    return "\n\n".join(["\n".join(lines), *tables])


def describe_surroundings(told: CallGroup, plan: CollectivesPlan) -> Iterator[str]:
    yield (
        f"{told.ranks} ranks on {told.where}: {plan.quantity}; the slowest rank's times, × by "
        "round and then their median; rates in GB/s"
    )
    collectives = told.collectives
    copying = "single copy" if collectives.get("single_copy") else "no single copy"
    notes = collectives.get("notes", ())
    yield "; ".join([f"mpiddp waits by {collectives.get('wait', '?')}", copying, *notes])
    yield from (f"{name}: {parse(name).summary}" for name in plan.algorithms if name != "auto")
    if told.framework.get("nccl"):
        yield f"NCCL {told.framework['nccl']} on {told.framework['gpu']}"
    if told.others_share is not None:
        yield f"other programs took {told.others_share:.0%} of the cores meanwhile"
    calls = [f"{maker} {describe_seconds(value)}" for maker, value in told.first_calls.items()]
    if calls:
        yield f"the first call of each, which does not count: {', '.join(calls)}"


def format_size(cells: Sequence[Cell]) -> str:
    """One size: a row for each contender that was timed."""
    first = cells[0]
    counts = sorted({cell.summary.count for cell in cells})
    spread = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    title = f"{_describe_place(first)}, {spread} iterations"
    columns = [
        *COLUMNS,
        *_list_speeds(cells),
        *ENDS,
        *(OVERLAP if "hidden" in first.details else ()),
    ]
    return f"{title}\n{format_table(cells, columns)}"


def _describe_place(cell: Cell) -> str:
    at = cell.at
    words = [f"{describe_size(cell.bytes)} of {at['type']}"]
    if cell.quantity == POINT_TO_POINT:
        ways = "both ways at once" if at.get("direction") == "both" else "half of a round trip"
        where = "two nodes" if at["link"] == "network" else "one node"
        words.append(f"between two ranks of {where}, {ways}")
    words += [str(at["operator"])] if "operator" in at else []
    words += [name for name in ("cold", "overlap") if name in at]
    if "busy" in at:
        words.append(f"{at['busy']} busy on each node")
    return f"{cell.quantity}: {', '.join(words)}"


def _find_contender(cell: Cell) -> Contender:
    of = cell.details
    return Contender(
        of["maker"], algorithm=of["algorithm"], transport=of["transport"], quantity=cell.quantity
    )


def _describe_interval(cell: Cell) -> str:
    between = cell.summary.interval
    return _describe_range(between.low, between.high) if between else "–"


def _describe_range(low: float, high: float) -> str:
    return f"{describe_seconds(low)} – {describe_seconds(high)}"


COLUMNS: Sequence[Column] = (
    ("", lambda cell: _find_contender(cell).name),
    ("over", lambda cell: _find_contender(cell).way),
    ("buffer", lambda cell: str(cell.details["buffer"])),
    ("ran", lambda cell: str(cell.details["ran"] or "its own choice")),
    ("median", lambda cell: describe_seconds(cell.summary.median)),
    ("95 % of median", _describe_interval),
    ("5–95 % of iterations", lambda cell: _describe_range(cell.summary.low, cell.summary.high)),
    ("algbw", lambda cell: f"{cell.details['algbw']:.3g}"),
    ("busbw", lambda cell: f"{cell.details['busbw']:.3g}"),
)
ENDS: Sequence[Column] = (
    ("rounds", lambda cell: str(len(cell.samples))),
    ("until", lambda cell: str(cell.details["stopped"])),
)
OVERLAP: Sequence[Column] = (
    ("compute", lambda cell: describe_seconds(cell.details["compute"])),
    ("alone", lambda cell: describe_seconds(cell.details["alone"])),
    ("hidden", lambda cell: f"{cell.details['hidden']:.0%}"),
)


def _list_speeds(cells: Sequence[Cell]) -> Iterator[Column]:
    """How many times as fast as the first contender of a maker, which was measured beside it."""
    for name, maker in (("× Gloo", GLOO), ("× MPI", MPI)):
        base = next((cell for cell in cells if cell.details["maker"] == maker), None)
        yield name, partial(_describe_speed, maker, base)


def _describe_speed(maker: str, base: Cell | None, cell: Cell) -> str:
    if cell.details["maker"] == maker:
        return "1"
    return "–" if base is None else f"{estimate_rounds(cell.samples, base.samples):.2f}"


def format_matrix(cells: Iterable[Cell], size: int) -> str:
    """One size: a row for each end that sends, a column for each that receives."""
    pairs = {
        (int(cell.at["from"]), int(cell.at["to"])): cell for cell in cells if cell.bytes == size
    }
    ends = sorted({end for pair in pairs for end in pair})
    what = "node" if any(cell.nodes > 1 for cell in pairs.values()) else "rank"

    def describe(target: int, source: int) -> str:
        cell = pairs.get((source, target))
        if cell is None:
            return "–"
        return f"{describe_seconds(cell.summary.median)}, {cell.details['algbw']:.3g}"

    columns = [(f"{what} {target}", partial(describe, target)) for target in ends]
    table = format_table(ends, [("from \\ to", lambda source: f"{what} {source}"), *columns])
    title = f"all-pairs: {describe_size(size)}, the median of one direction, and GB/s"
    slow = list_slow({pair: cell.samples for pair, cell in pairs.items()}, what)
    return "\n".join([title, table, *(slow or ["no link is slow"])])


# ---- what stands beside the tables ---------------------------------------------------------------


def list_limits(cells: Sequence[Cell]) -> Iterator[str]:
    """What the machine itself can do, of what was measured of it."""
    if (peer := find_probe(cells, PEER_READ)) is not None:
        yield (
            f"a rank reads what its neighbour has just written ({describe_size(peer.bytes)}) at "
            f"{_describe_rate(peer)}"
        )
    if (copy := find_probe(cells, *COPIES)) is not None:
        yield (
            f"memory bound: {describe_seconds(copy.summary.median)} to read and write "
            f"{describe_size(copy.bytes)} on each rank, all at once "
            f"({_describe_rate(copy)}, {copy.contender.removeprefix('copy ')})"
        )
    if (link := find_probe(cells, LINK)) is not None:
        megabytes = f"{link.bytes / 1e6:g} MB"
        yield f"a link between two nodes carries {_describe_rate(link)} one way ({megabytes})"
    if (nothing := find_probe(cells, EMPTY)) is not None:
        yield f"an iteration of nothing takes {describe_seconds(nothing.summary.median)}"


def _describe_rate(cell: Cell) -> str:
    times = cell.summary
    slow, usual, fast = (
        cell.bytes / seconds * 1e-9 for seconds in (times.high, times.median, times.low)
    )
    return f"{usual:.3g} GB/s (5–95 %: {slow:.3g}–{fast:.3g})"


def list_left_out(left_out: Iterable[Refusal]) -> Iterator[str]:
    """One line for each contender and reason."""
    groups = group_by(left_out, lambda each: (each.contender, each.quantity, each.reason))
    for (contender, quantity, reason), group in groups.items():
        places = ", ".join(dict.fromkeys(_describe_size(each.at) for each in group))
        yield f"left out: {contender}, {quantity} at {places}: {reason}"


def _describe_size(at: Mapping[str, Coordinate]) -> str:
    """With the operator and the type, if it has both."""
    reduced = f" ({at['operator']} of {at['type']})" if "operator" in at else ""
    return f"{describe_size(int(at['bytes']))}{reduced}"


def list_lack(cells: Iterable[Cell], left_out: Iterable[Refusal]) -> Iterator[str]:
    """That nothing of mpiddp was measured, and why, if something was to be."""
    reasons = [each.reason for each in left_out if each.contender.startswith(OWN)]
    if reasons and not any(cell.contender.startswith(OWN) for cell in cells):
        yield f"nothing of mpiddp was measured: {'; '.join(dict.fromkeys(reasons))}"


def list_remarks(cells: Sequence[Cell]) -> Iterator[str]:
    """Slow ranks and broken guidelines, and which contenders' medians are not known to 5 %."""
    late = (cell for cell in cells if "slow_rank" in cell.details)
    for rank, named in group_by(late, lambda cell: cell.details["slow_rank"]).items():
        reason = named[0].details["slow_rank_reason"]
        yield f"slow rank: rank {rank} {reason} (in {len(named)} of {len(cells)} rows)"
    for cell in cells:
        for text in cell.details.get("guidelines", ()):
            place = f"{cell.contender}, {cell.quantity} at {describe_size(cell.bytes)}"
            yield f"guideline: {place} {text}"
    spent = sum(cell.details["stopped"] == "budget" for cell in cells)
    if spent:
        yield (
            f"{spent} of {len(cells)} rows spent their budget before their median was known to "
            "5 %; --budget gives them more"
        )
