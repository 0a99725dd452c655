"""What a reader must know before looking at pictures: wrong, missing, slow, not comparable."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.records.contenders import ALL_PAIRS
from benchmarks.records.material import Material, Measured
from benchmarks.show.page.contents import Alert, Fact
from benchmarks.show.pairs import describe_slow, read_links
from mpiddp.wording import count_noun, describe_size

FACTS = {
    "benchmark": "Command", "date": "Measured", "command": "Command line", "launcher": "Launcher",
    "nodes": "Nodes", "mpi_library": "MPI", "processor": "Processor", "cores": "Cores",
    "hardware_threads": "Hardware threads", "usable_hardware_threads": "of them usable",
    "memory_bytes": "Memory", "kernel": "Kernel", "python": "Python", "packages": "Packages",
    "commit": "Commit", "threads_per_process": "Threads per process", "binding": "Binding",
    "load_average": "Load before", "gpu": "GPU", "others_share": "Taken by other programs",
}  # fmt: skip
"""What is shown of an environment; what else it has follows under its own name."""
SAME_MACHINE = ("processor", "cores", "memory_bytes", "mpi_library", "gpu", "kernel", "packages")
"""What must agree for two records to be comparable."""
SLOW_SHARE = 0.5
"""Of a group's cells with per-rank times, from which on a rank that was slow in them is named."""


def list_alerts(material: Material) -> list[Alert]:
    """What is wrong comes first, then what is missing, then what is slow."""
    return [
        *_list_wrong(material),
        *_list_reasons(material, "failure", "Failed or wrong"),
        *_list_incomplete(material),
        *_list_missed(material),
        *_list_reasons(material, "refusal", "Refused, and so not measured"),
        *_list_differences(material),
        *_list_slow_ranks(material),
        *_list_slow_links(material),
        *_list_guidelines(material),
        *_list_short(material),
    ]


def _describe(measured: Measured) -> str:
    cell = measured.cell
    size = cell.at.get("bytes")
    where = f" of {describe_size(size)}" if isinstance(size, int) else ""
    ranks = f"{count_noun(cell.ranks, 'rank')} on {count_noun(cell.nodes, 'node')}"
    return f"{measured.name}: {cell.quantity}{where} on {ranks}"


def _alert(text: str, lines: Sequence[str], *, is_bad: bool = True) -> Iterator[Alert]:
    if lines:
        yield Alert(text=text, lines=lines, is_bad=is_bad)


def _list_wrong(material: Material) -> Iterator[Alert]:
    lines = [
        f"{_describe(each)}: {count_noun(each.wrong, 'wrong element')}"
        for each in material.cells
        if each.wrong
    ]
    yield from _alert(f"Wrong results in {count_noun(len(lines), 'cell')}", lines)


def _list_lines(material: Material, kind: str) -> list[Mapping[str, Any]]:
    lines = (line for record in material.records for line in record.others)
    return [line for line in lines if line["kind"] == kind]


def _fold(texts: Iterable[str]) -> list[str]:
    """Each text once, with how often it is there."""
    counts = Counter(texts).items()
    return [f"{text} ({count} times)" if count > 1 else text for text, count in counts]


def _list_reasons(material: Material, kind: str, title: str) -> Iterator[Alert]:
    lines = _fold(
        f"{line.get('contender')}: {line.get('quantity')}: {line.get('reason')}"
        for line in _list_lines(material, kind)
    )
    yield from _alert(f"{title}: {count_noun(len(lines), 'contender')}", lines)


def _list_incomplete(material: Material) -> Iterator[Alert]:
    for record, name in zip(material.records, material.names, strict=True):
        if not record.is_complete:
            yield Alert(text=f"{name} is incomplete: the command did not come to its end")


def _list_missed(material: Material) -> Iterator[Alert]:
    targets = [each for line in _list_lines(material, "targets") for each in line["targets"]]
    missed = [str(each["text"]) for each in targets if each["met"] is False]
    yield from _alert(f"{len(missed)} of {count_noun(len(targets), 'target')} missed", missed)


def _list_differences(material: Material) -> Iterator[Alert]:
    names = [
        FACTS[name]
        for name in SAME_MACHINE
        if len({str(record.environment.get(name)) for record in material.records}) > 1
    ]
    if names:
        yield Alert(
            text="The records come from different machines or software, so their times cannot be "
            f"compared: {', '.join(names)} differ (see Machines)",
            is_bad=False,
        )


def _list_slow_ranks(material: Material) -> Iterator[Alert]:
    groups: dict[tuple[int, str, int, int], list[Measured]] = defaultdict(list)
    for each in material.cells:
        cell = each.cell
        if cell.by_rank:
            groups[each.record, cell.quantity, cell.ranks, cell.nodes].append(each)
    lines = []
    for (_, quantity, ranks, nodes), found in groups.items():
        slow = Counter(each.cell.details.get("slow_rank") for each in found)
        lines += [
            f"Rank {rank} of {ranks} on {count_noun(nodes, 'node')} is slow, in {count} of "
            f"{len(found)} cells of {quantity}{_find_reason(found, rank)}"
            for rank, count in slow.items()
            if isinstance(rank, int) and count >= SLOW_SHARE * len(found)
        ]
    if lines:
        more = f"; and {len(lines) - 1} more" if lines[1:] else ""
        yield Alert(text=lines[0] + more, lines=lines[1:], is_bad=False)


def _find_reason(found: Sequence[Measured], rank: int) -> str:
    details = (each.cell.details for each in found)
    reasons = (one.get("slow_rank_reason") for one in details if one.get("slow_rank") == rank)
    reason = next(filter(None, reasons), None)
    return f": it {reason}" if reason is not None else ""


def _list_slow_links(material: Material) -> Iterator[Alert]:
    for links in read_links(material.of(ALL_PAIRS)):
        text = describe_slow(links)
        if text:
            yield Alert(text=f"{links.contender}: {text}", is_bad=False)


def _list_guidelines(material: Material) -> Iterator[Alert]:
    known = ((each.name, each.cell.details.get("guidelines")) for each in material.cells)
    broken = ((name, texts) for name, texts in known if isinstance(texts, list))
    lines = _fold(f"{name}: {text}" for name, texts in broken for text in texts)
    yield from _alert("Slower than what it could be made of", lines, is_bad=False)


def _list_short(material: Material) -> Iterator[Alert]:
    known = [each for each in material.cells if each.cell.details.get("stopped")]
    lines = [_describe(each) for each in known if each.cell.details["stopped"] == "budget"]
    text = f"In {len(lines)} of {count_noun(len(known), 'cell')} the time was spent before the "
    yield from _alert(f"{text}interval of the median was narrow", lines, is_bad=False)


def list_facts(material: Material) -> list[Fact]:
    """As far as records have it."""
    environments = [{"benchmark": r.benchmark, **r.environment} for r in material.records]
    names = [*FACTS, *(name for each in environments for name in each if name not in FACTS)]
    facts = [
        Fact("Cells", [f"{len(record.cells):,}" for record in material.records], False),
        Fact("Complete", ["yes" if r.is_complete else "no" for r in material.records], False),
    ]
    for name in dict.fromkeys(names):
        texts = [_describe_fact(name, each.get(name)) for each in environments]
        if any(texts):
            facts.append(Fact(FACTS.get(name, name), texts, name in SAME_MACHINE))
    return facts


def _describe_fact(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "memory_bytes" and isinstance(value, int):
        return describe_size(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    if isinstance(value, list):
        return ", ".join(f"{each:.3g}" if isinstance(each, float) else str(each) for each in value)
    return str(value)
