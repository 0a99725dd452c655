"""The report's page in a real browser: its pictures have names, figures and tables, and open."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from benchmarks.study import reporting as command
from browser import Page
from planted_records import Planted, make_cells, make_messages, make_pairs, write_record

pytestmark = pytest.mark.browser
K = 1 << 10


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one record that has everything with curves."""
    folder = tmp_path_factory.mktemp("report")
    planted = Planted(places=((4, 4), (8, 2)), sizes=(K, 64 * K, 1 << 24), rounds=5)
    cells = chain(make_cells(planted), make_messages(), make_pairs(5, {(1, 2): 2.0}))
    record = write_record(folder / "a.jsonl", cells)
    command.main([str(record), "--output", str(folder / "a.html")])
    return folder / "a.html"


def test_the_last_place_is_open_and_its_pictures_are_seen(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    panels = "#all-reduce > details"
    assert page.texts(f"{panels} > summary") == ["4 ranks on 4 nodes", "8 ranks on 2 nodes"]
    assert page.texts(f"{panels}[open] > summary") == ["8 ranks on 2 nodes"]
    shown = page.run(
        """return [...document.querySelectorAll("#all-reduce details[open] figure svg")]
          .map((svg) => [svg.getAttribute("role"), svg.ariaLabel, svg.checkVisibility()])"""
    )
    assert len(shown) == 5 and all(role == "img" and seen for role, _, seen in shown)
    assert shown[0][1].startswith("Time. Time of the slowest rank by size")
    page.click(f"{panels} > summary")
    assert len(page.texts(f"{panels}[open] > summary")) == 2


def test_what_is_pointed_at_is_said_and_the_table_has_all(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    box = "#all-reduce details[open]"
    (first, *others) = page.texts(f"{box} figure:first-of-type svg title")
    size, *rows = first.splitlines()
    assert size == "1 KiB" and len(rows) == 6 and len(others) == 2
    assert any(row.startswith("Gloo: ") and " – " in row for row in rows)
    found = page.run(
        """const svg = document.querySelector(arguments[0]), box = svg.getBoundingClientRect();
        svg.scrollIntoView({ block: "center" });
        const { left, top, width, height } = svg.getBoundingClientRect();
        const hit = document.elementFromPoint(left + width * 0.2, top + height * 0.5);
        return hit.closest("g:has(> title)").querySelector("title").textContent""",
        f"{box} figure svg",
    )
    assert found == first
    rows = page.texts(f"{box} > details tbody tr")
    assert len(rows) == 3 * 10 and rows[0].startswith("Gloo1 KiB")


def test_the_animated_explanation_opens_from_within_the_page(page: Page, file: Path) -> None:
    page.visit(file.as_uri())
    first, *_ = page.driver.window_handles
    button = page.driver.find_element("css selector", "#all-reduce .links button:nth-child(2)")
    name = button.text
    button.click()
    page.wait(lambda: len(page.driver.window_handles) == 2)
    page.driver.switch_to.window(page.driver.window_handles[1])
    try:
        page.wait(lambda: page.texts("h2") == [f"{name} on 4 ranks"])
        page.click("#end")
        assert "Now every rank has the whole sum." in page.text(".words")
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)
