"""The animated page: what is in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.show.drawing import page as pages
from benchmarks.show.drawing.page import LARGEST, OFFERED, draw_page
from benchmarks.study import explain
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.cost import Machine, MessageCost, flat
from mpiddp.schedules.registry import Choice, find, names, parse
from mpiddp.schedules.schedule import Schedule

FLAT, LINK = flat(5e-6, 8e-11, 2e-11), MessageCost(0, 1e-9)


@cache
def draw_ring() -> str:
    return draw_page(parse("ring"), 4)


def read_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("text", "ranks", "nodes", "message"),
    [
        ("ring", 0, None, "ranks must be an integer >= 1, found 0"),
        ("ring", LARGEST + 1, None, r"up to 64 ranks, not 65: write an .svg"),
        ("ring", 4, (2, 3), "nodes of 2, 3 ranks are not 4 ranks"),
        ("direct:servers=5", 4, None, "1 to 4 colocated servers, not 5"),
        ("ring:segments=65", 16, None, "up to 16384 cells .* ring:segments=65 .* has 16640"),
        ("two-level:inner=one-shot", 4, None, "one-shot has no halves"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    text: str, ranks: int, nodes: Sequence[int] | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as refusal:
        draw_page(parse(text), ranks, nodes)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigurationError, match="1 to 3 dedicated servers, not 4"):
        draw_page(parse("ring"), 4, beside=parse("central:servers=4"))


@pytest.mark.parametrize(
    ("machine", "size", "message"),
    [
        (Machine(LINK, LINK, 1e-9, shared=5e-10), 1, "whose link is as fast as"),
        (flat(0, 0, 1e-9), 1, "bandwidths of 0.001 to 1,000,000 Gbit/s, not inf"),
        (flat(0, 1e-9, 0), 1, "additions of 0.001 to 1,000,000 GB/s, not inf"),
        (flat(1e4, 1e-9, 1e-9), 1, r"latencies of 0 to 1,000,000 µs, not 1e\+10: use the terminal"),
        (FLAT, (1 << 40) + 1, r"buffers of 0 to 1,048,576 MiB"),
    ],
)
def test_figures_that_no_field_can_hold_are_refused(
    machine: Machine, size: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        draw_page(parse("ring"), 4, machine=machine, size=size)
    options = explain.parse_options(["ring"])
    assert (options.size, options.machine) == (pages.MEBIBYTE, pages.MACHINE)


def test_every_algorithm_is_there_for_every_offered_number_of_ranks() -> None:
    """One with parameters wherever it can be."""
    schedules = read_data(draw_page(parse("direct:servers=5,segments=2"), 9))["schedules"]
    assert sorted(map(int, schedules)) == sorted({*OFFERED, 9})
    for ranks, entries in schedules.items():
        own = {"direct:servers=5"} if int(ranks) >= 5 else set()
        assert set(entries) == {*names()} | own, ranks


def test_nodes_hold_for_the_ranks_they_were_given_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "OFFERED", (4, 6))
    data = read_data(draw_page(parse("two-level"), 8, (3, 5)))
    assert data["nodes"] == {"8": [3, 5]}
    schedules = data["schedules"]
    assert not any("halves" in entry for entry in schedules["8"].values())
    assert schedules["6"]["two-level"]["halves"] == [3, 3]
    assert "halves" not in schedules["6"]["ring"]


def test_the_largest_page_is_small_enough_to_send() -> None:
    page = draw_page(parse("ring"), LARGEST, (20, 44), beside=parse("two-level:outer=one-shot"))
    assert len(page.encode()) < 1_500_000
    assert len(draw_ring().encode()) < 320_000


def test_a_page_holds_its_scripts_and_refers_to_nothing_outside_it() -> None:
    page = draw_ring()
    assert not re.search(r"https?:|\bsrc=|url\(|@import|\bfetch\(|XMLHttpRequest", page)
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"@(title|style|script|data)@", page)
    folder = Path(pages.__file__).parent
    assert {path.name for path in folder.glob("*.js")} == set(pages.SCRIPTS)
    assert all((folder / name).read_text("utf-8") in page for name in pages.SCRIPTS)


def test_a_name_cannot_break_out_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "OFFERED", (2,))
    ring = find("ring")
    strange = Choice(ring, {"</script><script>alert(1)</script>": 1})

    class Strange(Choice):
        def build(self, ranks: int, nodes: Sequence[int] | None = None) -> Schedule:
            return ring.make(ranks)

    page = draw_page(Strange(ring, strange.parameters), 2)
    assert "<script>alert" not in page
    assert str(strange) in read_data(page)["schedules"]["2"]
